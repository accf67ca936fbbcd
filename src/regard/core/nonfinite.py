"""Hidden keys and values, and queries without a key, leave no trace in the results, even if they are NaN or inf."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from ..compat.torch import is_capturing, is_traced, lacks_values, samples, transforms_are_active, unwrap, unwrap_largest
from ..masks import Mask, dense
from ..softmax import arithmetic_dtype
from .formula import bias_tile, hidden
from .gathered import GATHERED_BIAS, GATHERED_KEY, GATHERED_ROW, GatheredTile, gathered_tiles, lists_of
from .problem import Problem
from .rows import Rows
from .spec import Spec
from .tiling import BIAS, ROW, Tile, TileSizes, tiles

__all__ = [
    "all_finite",
    "attend_apart",
    "of_rows",
    "rows_that_see_nonfinite_keys",
    "visible_rows_and_keys",
    "zero_unseen",
]


def all_finite(*tensors: Tensor) -> bool:
    """Whether neither the tensors nor products of their rows hold NaN or inf: a finite sum of squares shows both."""
    return lacks_values(*tensors) or all(math.isfinite(_sum_of_squares(unwrap(x))) for x in tensors)


@torch.no_grad()
def _sum_of_squares(x: Tensor) -> float:
    x = x.detach()  # without a tangent
    dtype = arithmetic_dtype(x.dtype)
    if x.device.type == "cpu" and x.dtype == dtype:
        dense = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
        if dense.is_contiguous():
            flat = dense.view(-1)
            return float(torch.dot(flat, flat))  # on all threads; a norm takes one
    return float(torch.linalg.vector_norm(x, dtype=dtype))


def attend_apart(p: Problem, attend: Callable[[Problem, bool], Rows]) -> Rows:
    """Attend, rows that see a NaN or inf apart from those that see none: then 0 · NaN reaches none of the latter.

    `attend` is told whether nothing can spread. Each part hides the other's rows, and so it hides from the clean rows
    every key that is not finite. Wrappers of torch.func and shared masks are not taken apart.
    """
    if (p.mask is None and p.bias is None) or _unread(p.query):
        return attend(p, p.mask is None and p.bias is None and p.rows > 0 and p.keys > 0)
    if all_finite(p.query, p.key, p.value):
        return attend(p, True)
    if transforms_are_active() or p.items_per_mask > 1:
        return attend(p, False)
    bias = p.bias if isinstance(p.bias, Tensor) else None
    if bias is not None:
        bias = bias.unsqueeze(1) if bias.shape[1] == 1 else bias.unflatten(1, (p.key.shape[1], -1))
    rows = rows_that_see_nonfinite_keys(Spec.of(p), p.query, p.key, p.value, bias)
    if rows is None:
        return attend(p, False)
    clean, spoilt = (attend(p._replace(mask=of_rows(p.mask, some)), False) for some in (~rows, rows))
    found = []
    for a, b in zip(clean, spoilt, strict=True):
        there = p.shaped(rows) if a is None or a.dim() == len(p.lead) + 1 else p.shaped(rows)[..., None]
        found.append(None if a is None or b is None else torch.where(there, b, a))
    return Rows(*found)


def of_rows(mask: Mask | None, rows: Tensor) -> Mask:
    """The mask in these rows (B, H, N) alone."""
    only = dense(rows[..., None])
    return only if mask is None else mask & only


@torch.no_grad()
def rows_that_see_nonfinite_keys(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> Tensor | None:
    """Which rows (B, H, N) may attend to a key or value that is not finite; None if that parts no rows."""
    bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))  # (B, K, M)
    if not bool(bad.any()):
        return None
    only = dense(bad.repeat_interleave(query.shape[1] // key.shape[1], 1)[:, :, None])
    spec = replace(spec, mask=only if spec.mask is None else spec.mask & only)
    rows, _ = visible_rows_and_keys(spec, query, key, bias)
    return rows if bool(rows.any()) else None


def zero_unseen(
    spec: Spec, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, finite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero rows and keys that take no part, if a NaN or inf in them could spread: (L, H, N, D), (L, K, M, …)."""
    if finite or (spec.mask is None and bias is None and spec.bias is None and spec.n and spec.m):
        return query, key, value
    if not _unread(query) and all_finite(query, key, value):
        return query, key, value
    rows, keys = visible_rows_and_keys(spec, query, key, bias)
    keys = keys[..., None]
    return torch.where(rows[..., None], query, 0.0), torch.where(keys, key, 0.0), torch.where(keys, value, 0.0)


@torch.no_grad()
def visible_rows_and_keys(spec: Spec, query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which rows (L, H, N) may attend to some key, and which keys (L, K, M) some row may attend to."""
    batch, heads, m = key.shape[:3]
    groups = query.shape[1] // max(heads, 1)
    tables = [] if spec.bias is None else samples(*spec.bias.tensors)
    rows = torch.zeros(batch, heads, groups, spec.n, dtype=torch.bool, device=key.device)
    keys = torch.zeros(batch, heads, m, dtype=torch.bool, device=key.device)
    if bias is not None:
        bias = unwrap_largest(bias)  # under vmap, −inf hides only where every sample has it, and so for tables
    lists = None if _unread(rows) else lists_of(spec)
    if lists is not None:
        for at in gathered_tiles(spec, lists, rows.shape, 1, TileSizes()):
            _mark_gathered(spec, at, bias, tables, rows, keys)
        return rows.flatten(1, 2), keys
    for tile, full in _tiles(spec, rows):
        row, col = ROW.part(rows, tile), keys[tile.batch, tile.heads, tile.cols]
        shown = torch.ones((), dtype=torch.bool, device=key.device)
        if not full and (hide := hidden(spec, tile, groups, key.device)) is not None:
            shown = ~hide
        if bias is not None:
            shown = shown & (BIAS.part(bias, tile) != -torch.inf)
        elif tables:
            shown = shown & _shown_by_table(spec, tile, groups, tables)
        shown = shown.expand(*row.shape, col.shape[-1])  # (l, k, g, r, c)
        row |= shown.any(-1)
        col |= shown.flatten(2, 3).any(2)
    return rows.flatten(1, 2), keys


def _mark_gathered(
    spec: Spec, at: GatheredTile, bias: Tensor | None, tables: list[tuple[Tensor, ...]], rows: Tensor, keys: Tensor
) -> None:
    """Mark the rows (L, K, G, N) and keys (L, K, M) that take part in some lists of keys."""
    part, row = at.spec(spec), GATHERED_ROW.part(rows, at)
    shown = at.positions.shown
    if bias is not None:
        shown = shown & (GATHERED_BIAS.part(bias, at) != -torch.inf)
    elif tables:
        shown = shown & _shown_by_table(part, at.tile, at.heads.groups, tables)
    shown = shown.expand(*row.shape, part.m)  # (lists, heads, groups, rows, W)
    row |= shown.any(-1)
    count = torch.zeros(*keys.shape, 1, dtype=torch.int32, device=keys.device)
    GATHERED_KEY.add(count, at, shown.flatten(2, 3).any(2)[..., None].int())
    keys |= count[..., 0] > 0


def _shown_by_table(spec: Spec, tile: Tile, groups: int, tables: list[tuple[Tensor, ...]]) -> Tensor:
    """Where a structured bias is above −inf in some sample of vmap: broadcastable to (l, k, g, r, c)."""
    spec = replace(spec, paired=0)  # these tensors are those of the bias alone
    tiles = (bias_tile(spec, tile, groups, None, sample) for sample in tables)
    return reduce(torch.logical_or, (added != -torch.inf for added in tiles if added is not None))


def _tiles(spec: Spec, rows: Tensor) -> Iterator[tuple[Tile, bool]]:
    """Yield the visible tiles, and whether each is fully visible; one tile where no value can be read."""
    shape = rows.shape
    if _unread(rows):
        yield Tile(slice(0, shape[0]), slice(0, shape[1]), slice(0, spec.n), slice(0, spec.m)), False
        return
    yield from ((tile, run.full) for tile, run in tiles(spec, shape, TileSizes()))


def _unread(x: Tensor) -> bool:
    """Whether operations are recorded for later, so that no value can be read."""
    return is_traced() or torch.compiler.is_compiling() or (x.is_cuda and is_capturing())
