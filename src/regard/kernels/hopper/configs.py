"""Tile sizes of the Hopper kernels: one small table by padded dim, and one for calls with a bias or dropout."""

from __future__ import annotations

from typing import NamedTuple

from .. import launch_cache

__all__ = ["OUTLIER_BITS", "ROWS", "Tile", "cdiv", "chunks", "config", "override", "producer_registers"]

ROWS = 64  # query rows of one warp group
OUTLIER_BITS = 14  # a weight of at most 2^14 relative to the row max is fine: float16 ends at 2^16, and beyond 2^14 the entropy loses digits


class Tile(NamedTuple):
    """Consumer groups, keys per block, blocks in flight, registers per consumer thread."""

    groups: int
    BN: int
    stages: int
    registers: int
    persistent: bool = False  # one program per multiprocessor, which takes one row block after the other

    @property
    def BM(self) -> int:
        return ROWS * self.groups

    def rows_before(self, rows: int) -> int:
        """How many rows before row 0 the first block begins (`tile_scheduler.first_row`), so that the last block fills all groups.

        >>> Tile(3, 128, 3, 160).rows_before(64)
        128
        """
        return (-cdiv(rows, ROWS) % 3) * ROWS if self.groups == 3 else 0


# By the larger of the padded dims of keys and values. Measured on an H200, bf16, n 16,384, TFLOP/s, full and causal:
# d128 703 and 683, with entropy 680 and 641; d64 545 and 520, with entropy 525 and 494; d256 700 and 704, with entropy 681 and 697
# (bench/results/gpu_forward.md). The figures for other choices are from earlier runs, with another order of the programs and so
# other clocks. Side by side, d128 had 632 with a row max that rose in each block and 700 with a lazy one. With one row block per
# program d128 had 649 and 637, d64 496 and 482; persistent, but with tiles dealt out round robin, d128 causal 571. Before partial
# sums stayed in the thread, d128 had 627 and 617; with 232 registers 617 and 610; d64 with two groups 450 and 447. Those of 96 and
# 192 were chosen by shared memory and registers.
_TILES: dict[int, Tile] = {
    64: Tile(3, 128, 3, 160, persistent=True),
    96: Tile(2, 128, 2, 240, persistent=True),
    128: Tile(2, 128, 2, 240, persistent=True),
    192: Tile(2, 64, 2, 240),
    256: Tile(2, 64, 2, 240),
}
# With a bias or dropout a tile holds more.
_SMALLER_TILES: dict[int, Tile] = {
    64: Tile(2, 64, 2, 240),
    96: Tile(2, 64, 2, 240),
    128: Tile(2, 64, 2, 240),
    192: Tile(2, 32, 2, 240),
    256: Tile(2, 32, 2, 240),
}
_CHUNKS: dict[int, tuple[int, int]] = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}
_overrides: dict[tuple[int, bool], Tile] = {}


def producer_registers(groups: int, registers: int) -> int:
    """The registers that the consumer groups leave to each thread of the producer.

    >>> producer_registers(3, 160)
    32
    """
    return 65536 // (groups + 1) // 128 // 8 * 8 * (groups + 1) - groups * registers


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own is written for kernels, and slow outside of them.

    >>> cdiv(7, 2)
    4
    """
    return -(-a // b)


def padded(dim: int) -> int:
    """The smallest dim of the table that holds `dim`.

    >>> padded(80)
    96
    """
    return min(size for size in _CHUNKS if size >= dim)


def chunks(dim: int) -> tuple[int, int]:
    """The powers of two that a dim is split into for matrix products; the second is 0 if one is enough.

    >>> chunks(160)
    (128, 64)
    """
    return _CHUNKS[padded(dim)]


def config(dim: int, bias_or_dropout: bool = False) -> Tile:
    """The tile for the larger dim; it never depends on the batch, the kind of mask or what is observed.

    >>> config(128).BM
    128
    """
    key = (padded(dim), bias_or_dropout)
    return _overrides.get(key) or (_SMALLER_TILES if bias_or_dropout else _TILES)[key[0]]


def override(dim: int, bias_or_dropout: bool, tile: Tile | None) -> None:
    """Use another tile for a dim, to measure it; None restores the table's."""
    launch_cache.clear()
    if tile is None:
        _overrides.pop((padded(dim), bias_or_dropout), None)
    else:
        _overrides[padded(dim), bias_or_dropout] = tile
