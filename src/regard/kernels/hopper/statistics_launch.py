"""Launch the Hopper kernels for statistics of the weights for a `KernelArgs`: what they refuse, their tiles, their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import launch_cache
from ..arguments import BIAS_NONE, KernelArgs
from ..block_lists import SPANS, BlockLists, bounds_by_keys, pad_to_multiple, strides_of
from ..block_mask import BlockMask
from . import forward_launch as forward
from .configs import ROWS, cdiv, chunks, padded
from .descriptors import descriptors
from .forward_launch import heads_in_l2
from .statistics import pooled as pooled_kernel
from .statistics import received as received_kernel

__all__ = [
    "Grid", "StatisticsTile", "bands_for", "bands_shortcut", "grid_for", "pooled", "pooled_arguments", "received", "received_arguments", "received_by_bands",
    "refuses", "refuses_bands", "refuses_grid", "tile_for",
]  # fmt: skip

_BLOCK = 2 * ROWS  # rows of a block in the lists
_SPARE = 2 * _BLOCK  # cells past the end whose edges are computed
_FEW = 16  # columns; n 8192, 16 heads, d 128: map(8, 8) 0.86 ms, portable 0.80; map(64, 64) 1.01 and 1.51
_PROGRAMS = 4 * 264  # that keep a chip busy, two per multiprocessor
_CHANGING = ("q", "qb", "k", "kb", "out", "row_max", "log_row_sum", "scales", "bias", "lists")
_OPTIONS: dict[str, Any] = {"num_warps": 4, "maxnreg": 128, "enable_fp_fusion": True}


class StatisticsTile(NamedTuple):
    """Keys per program, and tiles of queries in flight."""

    BN: int
    stages: int


class Grid(NamedTuple):
    """How a map of `height` × `width` cells is divided: a program has `cells` columns, or one of the `parts` of a wide one."""

    height: int
    width: int
    cells: int
    parts: int
    bands: int  # rows of cells

    @property
    def columns(self) -> int:
        return -(-self.width // self.cells) * self.parts


# By padded dim: two programs share the memory of a multiprocessor.
_TILES: dict[int, StatisticsTile] = {
    64: StatisticsTile(128, 4),
    96: StatisticsTile(128, 4),
    128: StatisticsTile(128, 4),
    192: StatisticsTile(128, 2),
    256: StatisticsTile(64, 2),
}


def tile_for(w: KernelArgs) -> StatisticsTile:
    """The tile: by the dim, and by whether there is a bias."""
    tile = _TILES[padded(w.query.shape[3])]
    return tile if w.kind == BIAS_NONE else tile._replace(BN=64)


def received(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, tile: StatisticsTile | None = None) -> Tensor:
    """Σ over rows of the weight each key receives: (L, H, M)."""
    L, H, _ = w.rows
    out = row_max.new_empty(L, H, w.m)
    tile = tile or tile_for(w)
    arguments, options = received_arguments(w, out, row_max, log_row_sum, tile)
    received_kernel[(cdiv(w.m, tile.BN) * L * H,)](**arguments, **options)
    return out


def received_arguments(
    w: KernelArgs, out: Tensor, row_max: Tensor, log_row_sum: Tensor, tile: StatisticsTile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's arguments by name, and the options of its launch."""
    lists = w.block_mask.by_keys(_BLOCK, tile.BN)
    return {**_arguments(w, out, row_max, log_row_sum, tile), "lists": lists, "blocks": cdiv(w.m, tile.BN)}, _OPTIONS


def refuses(w: KernelArgs) -> list[str]:
    """Why the kernels cannot compute this problem; empty if they can: they take what the forward takes."""
    return forward.refuses(w)


def refuses_grid(w: KernelArgs, height: int, width: int) -> list[str]:
    """Why the kernel cannot compute this map; empty if it can."""
    reasons = refuses(w)
    if width < _FEW:
        reasons.append(f"the portable kernel is faster below {_FEW} columns; got {width}")
    if max((height + _SPARE) * w.n, (width + _SPARE) * w.m) >= 2**31:
        reasons.append(f"it counts cells in 31 bits; got {height} × {width} cells over {w.n} × {w.m} pairs")
    return reasons


def refuses_bands(w: KernelArgs, bands: int) -> list[str]:
    """Why the kernel cannot compute what keys receive from so many bands of rows; empty if it can."""
    reasons = refuses(w)
    if (bands + _SPARE) * w.n >= 2**31:
        reasons.append(f"it counts bands in 31 bits; got {bands} bands of {w.n} rows")
    return reasons


def received_by_bands(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, bands: int, tile: StatisticsTile | None = None) -> Tensor:
    """The weight each key receives from each band of rows; row i is in band ⌊i·bands/N⌋: (L, H, bands, M)."""
    L, H, _ = w.rows
    out = row_max.new_zeros(L, H, bands, w.m)
    key = ("hopper bands", bands, w.signature) if tile is None else None
    launch = launch_cache.find(key)
    if launch is not None:
        (grid, tile), q, k = launch.about, w.query, w.key
        launch.again(
            q=q, qb=q, k=k, kb=k, out=out, row_max=row_max, log_row_sum=log_row_sum, scales=w.scales, bias=w.bias,
            lists=_block_lists(w, grid, tile, by_bands=True),
        )  # fmt: skip
        return out
    tile = tile or tile_for(w)
    grid = bands_for(w, bands, tile)
    arguments, options = pooled_arguments(w, out, row_max, log_row_sum, grid, tile, by_bands=True)
    programs = grid.columns * cdiv(bands, grid.bands) * L * H
    launch_cache.start(key, pooled_kernel, programs, arguments, options, _CHANGING, (grid, tile))
    return out


def bands_shortcut(w: KernelArgs, bands: int) -> Callable[[Tensor, Tensor, int, int, int, BlockMask], None] | None:
    """`received_by_bands` for other tensors of these sizes and strides, from queries, keys, the addresses of the result (which is zeros),
    of the row max and of the log of the row sum, and a block mask; None before its first launch.
    """
    launch = launch_cache.find(("hopper bands", bands, w.signature))
    if launch is None:
        return None
    start, spans, BN = launch.bound("q", "qb", "k", "kb", "out", "row_max", "log_row_sum", "lists"), w.block_mask.kind == SPANS, launch.about[1].BN

    def run(q: Tensor, k: Tensor, out: int, row_max: int, log_row_sum: int, block_mask: BlockMask) -> None:
        lists = block_mask.for_launch(_BLOCK, BN, None) if spans else block_mask.for_launch(_BLOCK, _BLOCK, 0)
        start(q, q, k, k, out, row_max, log_row_sum, lists)

    return run


def pooled(
    w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, height: int, width: int, tile: StatisticsTile | None = None, grid: Grid | None = None
) -> Tensor:
    """The mean weight in each cell of a grid: (L, H, height, width)."""
    L, H, _ = w.rows
    tile = tile or tile_for(w)
    grid = grid or grid_for(w, height, width, tile)
    out = row_max.new_zeros(L, H, height, width, grid.parts)
    arguments, options = pooled_arguments(w, out, row_max, log_row_sum, grid, tile)
    pooled_kernel[(grid.columns * cdiv(height, grid.bands) * L * H,)](**arguments, **options)
    return out.sum(-1) if grid.parts > 1 else out[..., 0]


def grid_for(w: KernelArgs, height: int, width: int, tile: StatisticsTile) -> Grid:
    """As many columns of cells as a program's keys hold; rows are cut into bands until programs fill the chip.

    The bands do not change the bits of a result: each cell is summed by one program, in the order of its rows.
    """
    widest = cdiv(w.m, width)
    return _cut(w, Grid(height, width, max(1, tile.BN // widest), cdiv(widest, tile.BN), height))


def bands_for(w: KernelArgs, bands: int, tile: StatisticsTile) -> Grid:
    """One block of keys per program, and rows cut as in `grid_for`."""
    return _cut(w, Grid(bands, cdiv(w.m, tile.BN), 1, 1, bands))


def _cut(w: KernelArgs, grid: Grid) -> Grid:
    """Cut the rows into bands until programs fill the chip."""
    programs = grid.columns * w.rows[0] * w.rows[1]
    cuts = max(1, min(grid.height, _PROGRAMS // programs, w.n // (4 * _BLOCK)))
    return grid._replace(bands=cdiv(grid.height, cuts))


def pooled_arguments(
    w: KernelArgs, out: Tensor, row_max: Tensor, log_row_sum: Tensor, grid: Grid, tile: StatisticsTile, by_bands: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's arguments by name, and the options of its launch."""
    arguments = {
        **_arguments(w, out, row_max, log_row_sum, tile), "lists": _block_lists(w, grid, tile, by_bands), **grid._asdict(),
        "key_blocks": cdiv(w.m, _BLOCK), "columns": grid.columns, "BY_BANDS": by_bands,
    }  # fmt: skip
    return arguments, _OPTIONS


def _block_lists(w: KernelArgs, grid: Grid, tile: StatisticsTile, by_bands: bool) -> BlockLists:
    """The mask's block lists for a map; for spans, with the row blocks that each column of programs visits."""
    if by_bands and w.block_mask.kind == SPANS:
        return w.block_mask.by_keys(_BLOCK, tile.BN)
    lists = w.block_mask.by_rows(_BLOCK, _BLOCK)
    if w.block_mask.kind != SPANS:
        return lists
    bounds = pad_to_multiple(_bounds(w, grid, tile).flatten(2))
    item, head = strides_of(bounds)
    return lists._replace(bounds=bounds, block_item=item, block_head=head)


def _bounds(w: KernelArgs, grid: Grid, tile: StatisticsTile) -> Tensor:
    """For each column of programs, in row blocks: the first it visits, the full ones, and one past the last."""
    lo, hi, n = w.block_mask.lo, w.block_mask.hi, w.n
    if lo is None or hi is None:
        raise RuntimeError("spans have two ends")
    column = torch.arange(grid.columns, device=lo.device)
    x = column // grid.parts * grid.cells
    left = -(-x * w.m // grid.width) + column % grid.parts * tile.BN
    right = torch.minimum(-(-(x + grid.cells).clamp(max=grid.width) * w.m // grid.width), left + tile.BN)
    return bounds_by_keys(lo, hi, n, left, right, _BLOCK)


def _arguments(w: KernelArgs, out: Tensor, row_max: Tensor, log_row_sum: Tensor, tile: StatisticsTile) -> dict[str, Any]:
    """The arguments that both kernels take."""
    (L, H, N), (DA, DB) = w.rows, chunks(w.query.shape[3])
    (q, qb), (k, kb) = descriptors(w.query, ROWS, DA, DB), descriptors(w.key, tile.BN, DA, DB)
    return {
        "q": q, "qb": qb, "k": k, "kb": kb, "out": out, "row_max": row_max, "log_row_sum": log_row_sum,
        "scale": w.scale, "scales": w.scales, "cap": w.softcap or 0.0, "bias": w.bias, "n": N, "M": w.m,
        "batch_heads": L * H, "num_heads": H, "heads_per_kv": w.groups, "swizzle": heads_in_l2(w),
        "DA": DA, "DB": DB, "BN": tile.BN, "STAGES": tile.stages, **{name: w.kinds[name] for name in ("MASK", "BIAS", "CAP", "SCALES")},
        "FAST": w.fast,
    }  # fmt: skip
