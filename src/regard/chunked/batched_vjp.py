"""The backward pass over batches of equal tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.folded import FoldedProblem
from .tile_batches import TileBatch, masked_logits, raw_logits
from .tile_ops import FLOOR, RowStats, Workspace, exp_normal, multiply

__all__ = ["RowCotangents", "add_batch"]


class RowCotangents(NamedTuple):
    """What the backward pass needs of every row: (L, K, G, N, …) each."""

    dO: Tensor
    stats: RowStats
    delta: Tensor  # g_lse − Σ dO ∘ O
    mean: Tensor  # E[S] above the row max
    g_H: Tensor | None


def add_batch(
    x: FoldedProblem,
    tiles: TileBatch,
    b: RowCotangents,
    sums: tuple[Tensor | None, Tensor | None, Tensor | None],
    workspace: Workspace,
) -> None:
    """Add what the tiles of a batch give to the gradients of query, key and value."""
    d_query, d_key, d_value = sums
    X = masked_logits(x, tiles, workspace)  # (l·k·count, g·r, c)
    X.sub_(_column(tiles, b.stats.row_max))
    P = X if b.g_H is None else workspace.like("weights", X)
    if b.g_H is not None and tiles.hidden is not None:
        X.clamp_(min=FLOOR[X.dtype])  # finite where pairs are hidden
    torch.sub(X, _column(tiles, b.stats.log_row_sum), out=P)
    if tiles.hidden is None:
        P.exp_()
    else:
        exp_normal(P.clamp_(min=FLOOR[P.dtype]), out=P)
    dO = tiles.row_matrices(b.dO)
    if d_value is not None:
        tiles.add_keys(d_value, multiply(P.mT, dO))
    dS = workspace.like("dP", P)
    multiply(dO, tiles.key_matrices(x.value).mT, out=dS)
    dS.add_(_column(tiles, b.delta))
    if b.g_H is not None:
        dS.sub_(X.sub_(_column(tiles, b.mean)).mul_(_column(tiles, b.g_H)))
    dS.mul_(P)
    if x.spec.softcap is not None:
        dS.mul_(1 - raw_logits(x, tiles, workspace, "scores").div_(x.spec.softcap).tanh_().square_())
    if d_query is not None:
        part = tiles.rows(d_query)
        part.add_(multiply(dS, tiles.key_matrices(x.key)).view(part.shape))
    if d_key is not None:
        tiles.add_keys(d_key, multiply(dS.mT, tiles.row_matrices(x.query)))


def _column(tiles: TileBatch, x: Tensor) -> Tensor:
    """One number per row: (l·k·count, g·r, 1) of (L, K, G, N)."""
    return tiles.row_matrices(x[..., None])
