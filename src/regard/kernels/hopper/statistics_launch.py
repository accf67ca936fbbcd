"""From a `KernelArgs` to the Hopper kernels that look at the weights: how they cut it, and their start."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import BIAS_NONE, KernelArgs
from ..block_lists import SPANS, BlockLists, bounds_by_keys, pad_to_multiple, strides_of
from . import forward_launch as forward
from .configs import ROWS, cdiv, chunks, padded
from .descriptors import described
from .forward_launch import room
from .statistics import pooled as pooled_kernel
from .statistics import received as received_kernel

__all__ = ["Grid", "Look", "grid_for", "look_for", "pooled", "pooled_arguments", "received", "received_arguments", "refuses", "refuses_grid"]

_BLOCK = 2 * ROWS  # rows of a block in the lists
_SPARE = 2 * _BLOCK  # cells beyond the last whose place is asked for
_FEW = 16  # columns; n 8192, 16 heads, d 128: map(8, 8) 0.86 ms, portable 0.80; map(64, 64) 1.01 and 1.51
_FILLED = 4 * 264  # programs that keep a chip busy, two a multiprocessor


class Look(NamedTuple):
    """Keys of a program, and tiles of queries in flight."""

    BN: int
    stages: int


class Grid(NamedTuple):
    """How a map of `height` × `width` cells is dealt out: a program has `cells` columns, or one of the `parts` of a wide one."""

    height: int
    width: int
    cells: int
    parts: int
    bands: int  # rows of cells

    @property
    def columns(self) -> int:
        return -(-self.width // self.cells) * self.parts


# By padded dim: two programs share the memory of a multiprocessor.
_LOOKS: dict[int, Look] = {64: Look(128, 4), 96: Look(128, 4), 128: Look(128, 4), 192: Look(128, 2), 256: Look(64, 2)}


def look_for(w: KernelArgs) -> Look:
    """How a work is cut: by its dim and by what is held beside the logits."""
    look = _LOOKS[padded(w.query.shape[3])]
    return look if w.kind == BIAS_NONE else look._replace(BN=64)


def received(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, look: Look | None = None) -> Tensor:
    """Σ over rows of the weight each key receives: (L, H, M)."""
    L, H, _ = w.rows
    out = row_max.new_empty(L, H, w.m)
    look = look or look_for(w)
    args, options = received_arguments(w, out, row_max, log_row_sum, look)
    received_kernel[(cdiv(w.m, look.BN) * L * H,)](*args, **options)
    return out


def received_arguments(w: KernelArgs, out: Tensor, row_max: Tensor, log_row_sum: Tensor, look: Look) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the kernel is called with."""
    L, H, N = w.rows
    where = w.block_mask.by_keys(_BLOCK, look.BN)
    args = (*_facts(w, out, row_max, log_row_sum, look), where, N, w.m, cdiv(w.m, look.BN), L * H, H, w.groups, room(w))
    return args, _options(w, look)


def refuses(w: KernelArgs) -> list[str]:
    """Why the kernels cannot do this work; empty if they can: they see what the forward does."""
    return forward.refuses(w)


def refuses_grid(w: KernelArgs, height: int, width: int) -> list[str]:
    """Why the kernel cannot make this map; empty if it can."""
    reasons = refuses(w)
    if width < _FEW:
        reasons.append(f"the portable kernel is faster below {_FEW} columns; got {width}")
    if max((height + _SPARE) * w.n, (width + _SPARE) * w.m) >= 2**31:
        reasons.append(f"it counts cells in 31 bits; got {height} × {width} cells over {w.n} × {w.m} pairs")
    return reasons


def pooled(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, height: int, width: int, look: Look | None = None, grid: Grid | None = None) -> Tensor:
    """The mean weight in each cell of a grid: (L, H, height, width)."""
    L, H, _ = w.rows
    look = look or look_for(w)
    grid = grid or grid_for(w, height, width, look)
    out = row_max.new_zeros(L, H, height, width, grid.parts)
    args, options = pooled_arguments(w, out, row_max, log_row_sum, grid, look)
    pooled_kernel[(grid.columns * cdiv(height, grid.bands) * L * H,)](*args, **options)
    return out.sum(-1) if grid.parts > 1 else out[..., 0]


def grid_for(w: KernelArgs, height: int, width: int, look: Look) -> Grid:
    """As many columns of cells as a program's keys hold; rows are cut until there are programs for all of the chip.

    How rows are cut does not change the bits of a result: each cell is summed by one program, in the order of its rows.
    """
    widest = cdiv(w.m, width)
    grid = Grid(height, width, max(1, look.BN // widest), cdiv(widest, look.BN), height)
    programs = grid.columns * w.rows[0] * w.rows[1]
    cuts = max(1, min(height, _FILLED // programs, w.n // (4 * _BLOCK)))
    return grid._replace(bands=cdiv(height, cuts))


def pooled_arguments(w: KernelArgs, out: Tensor, row_max: Tensor, log_row_sum: Tensor, grid: Grid, look: Look) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the kernel is called with."""
    L, H, N = w.rows
    counts = (grid.columns, L * H, H, w.groups, room(w))
    args = (*_facts(w, out, row_max, log_row_sum, look), _where(w, grid, look), N, w.m, *grid, cdiv(w.m, _BLOCK), *counts)
    return args, _options(w, look)


def _where(w: KernelArgs, grid: Grid, look: Look) -> BlockLists:
    """What a map is told of a mask: of spans, which blocks of rows each column of programs meets."""
    where = w.block_mask.by_rows(_BLOCK, _BLOCK)
    if w.block_mask.kind != SPANS:
        return where
    bounds = pad_to_multiple(_bounds(w, grid, look).flatten(2))
    item, head = strides_of(bounds)
    return where._replace(bounds=bounds, block_item=item, block_head=head)


def _bounds(w: KernelArgs, grid: Grid, look: Look) -> Tensor:
    """For each column of programs, in blocks of rows: the first it meets, the full ones, one behind the last."""
    lo, hi, n = w.block_mask.lo, w.block_mask.hi, w.n
    if lo is None or hi is None:
        raise RuntimeError("spans have two ends")
    column = torch.arange(grid.columns, device=lo.device)
    x = column // grid.parts * grid.cells
    left = -(-x * w.m // grid.width) + column % grid.parts * look.BN
    right = torch.minimum(-(-(x + grid.cells).clamp(max=grid.width) * w.m // grid.width), left + look.BN)
    return bounds_by_keys(lo, hi, n, left, right, _BLOCK)


def _facts(w: KernelArgs, out: Tensor, row_max: Tensor, log_row_sum: Tensor, look: Look) -> tuple[Any, ...]:
    widths = chunks(w.query.shape[3])
    blocks = (*described(w.query, ROWS, *widths), *described(w.key, look.BN, *widths))
    return (*blocks, out, row_max, log_row_sum, w.scale, w.scales, w.softcap or 0.0, w.bias)


def _options(w: KernelArgs, look: Look) -> dict[str, Any]:
    DA, DB = chunks(w.query.shape[3])
    kinds = {name: w.kinds[name] for name in ("MASK", "BIAS", "CAP", "SCALES")}
    return {
        "DA": DA, "DB": DB, "BN": look.BN, "STAGES": look.stages, **kinds, "FAST": w.fast, "num_warps": 4, "maxnreg": 128,
        "enable_fp_fusion": True,
    }  # fmt: skip
