"""What the programs of the statistics kernels on Hopper get and keep: small structures that Triton passes as tuples."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Barriers", "Grid", "Head", "MapPart", "MapState", "Params"]


class Barriers(NamedTuple):
    """mbarriers: one for the keys, one of each other kind per stage."""

    k_ready: Any
    ready: Any
    free: Any


class Params(NamedTuple):
    """What every warp of a program gets."""

    descriptors: Any
    smem: Any
    barriers: Any
    row_max: Any  # from the forward pass, one per row
    log_row_sum: Any
    out: Any
    scale: Any
    scales: Any  # one per head, in place of `scale`
    cap: Any
    bias: Any
    lists: Any  # the mask's block lists
    n: Any
    M: Any
    blocks: Any  # of keys, or columns of programs
    batch_heads: Any  # batch size times query heads
    num_heads: Any
    heads_per_kv: Any  # query heads that share a key head
    swizzle: Any  # batch-heads that are scheduled together


class Grid(NamedTuple):
    """The cells of a map, and how programs share them."""

    height: Any
    width: Any
    cells: Any  # columns of cells per program
    parts: Any  # programs per column of cells
    bands: Any  # rows of cells per program
    key_blocks: Any  # key blocks of the mask's table


class Head(NamedTuple):
    """The head of a program, its keys, and how its logits are computed."""

    batch: Any
    h: Any
    j0: Any  # the first of its keys
    j: Any  # [BN] keys
    row_offset: Any  # where the statistics of its rows begin
    scale: Any
    unit: Any  # scale in log2 units


class MapPart(NamedTuple):
    """The part of a map that a program computes."""

    y0: Any  # its first row of cells
    x: Any  # its first column
    part: Any  # which part of that column
    start: Any  # its keys, from here …
    stop: Any  # … to here
    low: Any  # its rows, from here …
    high: Any  # … to here


class MapState(NamedTuple):
    """The running sums of a map."""

    total: Any  # [4, 8, BN] of the current row of cells
    cells: Any  # [4, 32] finished cells that are not yet stored
    first: Any  # the number of the first of them
    count: Any  # how many there are
    y: Any  # the current row of cells
    bottom: Any  # one past its last row
