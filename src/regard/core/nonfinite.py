"""What nobody may see leaves no trace, not even if it is NaN or inf: keys, values, and queries without a key."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C import _functorch

from ..compat.torch import exported, inside
from ..softmax import arithmetic_dtype
from .formula import bias_tile, hidden
from .spec import Rule
from .tiling import BIAS, ROW, Cut, Tile, strips

__all__ = ["all_finite", "seen", "without_unseen"]


def all_finite(*tensors: Tensor) -> bool:
    """Whether no NaN or inf is in them, nor in the products of their rows: their norms tell both."""
    return all(x.is_meta or math.isfinite(_norm(inside(x))) for x in tensors)


@torch.no_grad()
def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=arithmetic_dtype(x.dtype)))


def without_unseen(
    rule: Rule, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero what takes no part, if a NaN or inf in it could reach something: (L, H, N, D), (L, K, M, …)."""
    if rule.mask is None and bias is None and rule.bias is None:
        return query, key, value
    if not exported() and all_finite(query, key, value):
        return query, key, value
    rows, keys = seen(rule, query, key, bias)
    keys = keys[..., None]
    return torch.where(rows[..., None], query, 0.0), torch.where(keys, key, 0.0), torch.where(keys, value, 0.0)


@torch.no_grad()
def seen(rule: Rule, query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which rows (L, H, N) may attend some key, and which keys (L, K, M) some row may attend."""
    batch, heads, m = key.shape[:3]
    groups = query.shape[1] // max(heads, 1)
    tables = () if rule.bias is None else tuple(map(inside, rule.bias.tensors))
    rows = torch.zeros(batch, heads, groups, rule.n, dtype=torch.bool, device=key.device)
    keys = torch.zeros(batch, heads, m, dtype=torch.bool, device=key.device)
    if bias is not None:
        bias = _widest(bias)
    for tile, full in _tiles(rule, rows.shape):
        row, col = ROW.part(rows, tile), keys[tile.batch, tile.heads, tile.cols]
        shown = torch.ones((), dtype=torch.bool, device=key.device)
        if not full and (hide := hidden(rule, tile, groups, key.device)) is not None:
            shown = ~hide
        if bias is not None:
            shown = shown & (BIAS.part(bias, tile) != -torch.inf)
        elif rule.bias is not None and (added := bias_tile(rule, tile, groups, None, tables)) is not None:
            shown = shown & (added != -torch.inf)
        shown = shown.expand(*row.shape, col.shape[-1])  # (l, k, g, r, c)
        row |= shown.any(-1)
        col |= shown.flatten(2, 3).any(2)
    return rows.flatten(1, 2), keys


def _tiles(rule: Rule, shape: tuple[int, ...]) -> Iterator[tuple[Tile, bool]]:
    """What may be seen, tile by tile, and whether all of it is; in one piece for torch.export, which reads no value."""
    if exported():
        yield Tile(slice(0, shape[0]), slice(0, shape[1]), slice(0, rule.n), slice(0, rule.m)), False
        return
    for strip in strips(rule, shape, Cut()):
        yield from ((strip.tile(run), run.full) for run in strip.runs)


def _widest(bias: Tensor) -> Tensor:
    """A bias without torch.func's wrappers; where vmap runs over it, −inf only where every sample has it."""
    while _functorch.is_functorch_wrapped_tensor(bias):
        dim = _functorch.maybe_get_bdim(bias) if _functorch.is_batchedtensor(bias) else -1
        bias = _functorch.get_unwrapped(bias)
        bias = bias.amax(dim) if dim >= 0 else bias
    return bias
