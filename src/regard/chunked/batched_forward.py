"""The forward pass over batches of equal tiles: the online softmax folds each batch into the rows that it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.folded import FoldedProblem
from ..softmax import lowest
from .tile_batches import TileBatch, masked_logits
from .tile_ops import FLOOR, Workspace, exp_normal, multiply

__all__ = ["fold_batches"]


def fold_batches(
    x: FoldedProblem, batches: Iterable[TileBatch], observed: bool, output: Tensor, totals: Tensor, workspace: Workspace
) -> None:
    """Leave row max, row sum and e of all rows in `totals`, and their numerators divided by the row sum in `output`."""
    totals[0].fill_(lowest(totals.dtype))
    rows = totals.permute(1, 2, 3, 4, 0)
    for tiles in batches:
        top, total, e = tiles.rows(rows).unbind(-1)
        _fold(x, tiles, observed, RowSums(top, total, e, tiles.rows(output)), workspace)
    output.div_(totals[1].clamp(min=1.0)[..., None])


class RowSums(NamedTuple):
    """Running sums of a batch's rows: the max, Σ exp(X), Σ exp(X)·X and Σ exp(X)·V, with X = S − max."""

    max: Tensor  # (l, k, count, g, r)
    total: Tensor
    e: Tensor
    numerator: Tensor  # (l, k, count, g, r, E)


def _fold(x: FoldedProblem, tiles: TileBatch, observed: bool, old: RowSums, workspace: Workspace) -> None:
    """Add what a batch contributes, in few operations: each costs 10 µs, and with many threads that is its time."""
    logits = masked_logits(x, tiles, workspace)  # (l·k·count, g·r, c)
    S = workspace.take("logits", (*old.max.shape, tiles.width), logits)  # the same memory
    column = S.amax(-1, keepdim=True)
    if tiles.hidden is not None:
        column.clamp_(min=lowest(S.dtype))
    m = column.squeeze(-1)
    if not tiles.opens:
        torch.maximum(m, old.max, out=m)
    X = S.sub_(column)
    P = workspace.like("weights", X) if observed else X
    if tiles.hidden is None:
        torch.exp(X, out=P)
    else:
        exp_normal(X.clamp_(min=FLOOR[X.dtype]), out=P)
    l = P.sum(-1)  # noqa: E741
    e = X.mul_(P).sum(-1) if observed else None
    O = multiply(P.view(logits.shape), tiles.key_matrices(x.value)).view(old.numerator.shape)  # noqa: E741
    if tiles.opens:
        old.total.copy_(l)
        old.numerator.copy_(O)
        if e is not None:
            old.e.copy_(e)
    else:
        down = old.max.sub_(m)
        a = down.exp()
        if e is not None:
            deep = down.clamp_(min=-1e4)  # finite, and deep enough for exp to be 0
            old.e.addcmul_(deep, old.total).mul_(a).add_(e)
        old.total.mul_(a).add_(l)
        old.numerator.mul_(a[..., None]).add_(O)
    old.max.copy_(m)
