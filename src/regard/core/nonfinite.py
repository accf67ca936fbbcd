"""Hidden keys and values, and queries without a key, leave no trace in the results, even if they are NaN or inf."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..compat.torch import is_exporting, unwrap, unwrap_largest
from ..softmax import arithmetic_dtype
from .formula import bias_tile, hidden
from .spec import Spec
from .tiling import BIAS, ROW, Tile, TileSizes, strips

__all__ = ["all_finite", "visible_rows_and_keys", "zero_unseen"]


def all_finite(*tensors: Tensor) -> bool:
    """Whether neither the tensors nor products of their rows hold NaN or inf: a finite norm shows both."""
    return all(x.is_meta or math.isfinite(_norm(unwrap(x))) for x in tensors)


@torch.no_grad()
def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=arithmetic_dtype(x.dtype)))


def zero_unseen(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero rows and keys that take no part, if a NaN or inf in them could spread: (L, H, N, D), (L, K, M, …)."""
    if spec.mask is None and bias is None and spec.bias is None:
        return query, key, value
    if not is_exporting() and all_finite(query, key, value):
        return query, key, value
    rows, keys = visible_rows_and_keys(spec, query, key, bias)
    keys = keys[..., None]
    return torch.where(rows[..., None], query, 0.0), torch.where(keys, key, 0.0), torch.where(keys, value, 0.0)


@torch.no_grad()
def visible_rows_and_keys(spec: Spec, query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which rows (L, H, N) may attend to some key, and which keys (L, K, M) some row may attend to."""
    batch, heads, m = key.shape[:3]
    groups = query.shape[1] // max(heads, 1)
    tables = () if spec.bias is None else tuple(map(unwrap, spec.bias.tensors))
    rows = torch.zeros(batch, heads, groups, spec.n, dtype=torch.bool, device=key.device)
    keys = torch.zeros(batch, heads, m, dtype=torch.bool, device=key.device)
    if bias is not None:
        bias = unwrap_largest(bias)  # under vmap, −inf hides only where every sample has it
    for tile, full in _tiles(spec, rows.shape):
        row, col = ROW.part(rows, tile), keys[tile.batch, tile.heads, tile.cols]
        shown = torch.ones((), dtype=torch.bool, device=key.device)
        if not full and (hide := hidden(spec, tile, groups, key.device)) is not None:
            shown = ~hide
        if bias is not None:
            shown = shown & (BIAS.part(bias, tile) != -torch.inf)
        elif spec.bias is not None and (added := bias_tile(spec, tile, groups, None, tables)) is not None:
            shown = shown & (added != -torch.inf)
        shown = shown.expand(*row.shape, col.shape[-1])  # (l, k, g, r, c)
        row |= shown.any(-1)
        col |= shown.flatten(2, 3).any(2)
    return rows.flatten(1, 2), keys


def _tiles(spec: Spec, shape: tuple[int, ...]) -> Iterator[tuple[Tile, bool]]:
    """Yield the visible tiles, and whether each is fully visible; one tile for torch.export, which reads no values."""
    if is_exporting():
        yield Tile(slice(0, shape[0]), slice(0, shape[1]), slice(0, spec.n), slice(0, spec.m)), False
        return
    for strip in strips(spec, shape, TileSizes()):
        yield from ((strip.tile(run), run.full) for run in strip.runs)
