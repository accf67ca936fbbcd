"""How the Hopper kernels cut their work: one small table, by padded dims and by what a tile has to hold."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUCH", "ROWS", "Tile", "cdiv", "chunks", "config", "copying", "overridden"]

ROWS = 64  # query rows of one warp group
MUCH = 14  # bits by which a logit may be above the level of its row: float16 ends at 16, and beyond 14 the entropy loses digits


class Tile(NamedTuple):
    """Warp groups that compute, keys of a block, blocks in flight, registers a thread."""

    groups: int
    BN: int
    stages: int
    registers: int
    persistent: bool = False  # one program a multiprocessor, which takes one block of rows after the other

    @property
    def BM(self) -> int:
        return ROWS * self.groups

    def before(self, rows: int) -> int:
        """How many rows before the first the first block begins (`walk.row_of`), so that all groups of the last have some.

        >>> Tile(3, 128, 3, 160).before(64)
        128
        """
        return (-cdiv(rows, ROWS) % 3) * ROWS if self.groups == 3 else 0


# (padded dim of keys, of values): the larger of the two counts. Measured on an H200, bf16, n 16,384, TFLOP/s, full and causal:
# d128 703 and 683, with entropy 680 and 641; d64 545 and 520, with entropy 525 and 494; d256 700 and 704, with entropy 681 and 697
# (bench/results/gpu_forward.md). What is told of other choices is from earlier runs, in which peers had other orders and so the chip
# other clocks; side by side, d128 had 632 when the level rose with each block and 700 when it stayed. With one block of rows a
# program d128 649 and 637, d64 496 and 482; persistent, but dealt out in turns, d128 causal 571. Before
# sums stayed in the thread, d128 627 and 617; with 232 registers 617 and 610; d64 with two groups 450 and 447. Those of 96 and 192
# were chosen by shared memory and registers.
_PLAIN: dict[int, Tile] = {
    64: Tile(3, 128, 3, 160, persistent=True),
    96: Tile(2, 128, 2, 240, persistent=True),
    128: Tile(2, 128, 2, 240, persistent=True),
    192: Tile(2, 64, 2, 240),
    256: Tile(2, 64, 2, 240),
}
# With a bias or dropout a tile holds more.
_LADEN: dict[int, Tile] = {
    64: Tile(2, 64, 2, 240),
    96: Tile(2, 64, 2, 240),
    128: Tile(2, 64, 2, 240),
    192: Tile(2, 32, 2, 240),
    256: Tile(2, 32, 2, 240),
}
_CHUNKS: dict[int, tuple[int, int]] = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}
_instead: dict[tuple[int, bool], Tile] = {}


def copying(groups: int, registers: int) -> int:
    """What is left for the warp that copies of the registers that a program begins with, for each thread of a group.

    >>> copying(3, 160)
    32
    """
    return 65536 // (groups + 1) // 128 // 8 * 8 * (groups + 1) - groups * registers


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own is made for kernels, and slow outside of them.

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
    """A dim as the powers of two that a matrix product takes it in; the second is 0 where one is enough.

    >>> chunks(160)
    (128, 64)
    """
    return _CHUNKS[padded(dim)]


def config(dim: int, laden: bool = False) -> Tile:
    """The tile for the larger dim; never a function of the batch, the kind of mask or of what is observed.

    >>> config(128).BM
    128
    """
    at = (padded(dim), laden)
    return _instead.get(at) or (_LADEN if laden else _PLAIN)[at[0]]


def overridden(dim: int, laden: bool, tile: Tile | None) -> None:
    """Take another tile for a dim, to measure it; None takes the table's again."""
    if tile is None:
        _instead.pop((padded(dim), laden), None)
    else:
        _instead[padded(dim), laden] = tile
