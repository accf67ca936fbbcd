"""Tile sizes of the Hopper kernels: small tables by padded dim; calls with dropout, a bias or a narrow mask have their own."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OUTLIER_BITS", "ROWS", "Tile", "cdiv", "chunks", "config", "producer_registers", "value_chunks"]

ROWS = 64  # query rows of one warp group
OUTLIER_BITS = 14  # a weight of at most 2^14 relative to the row max is fine: float16 ends at 2^16, and beyond 2^14 the entropy loses digits


class Tile(NamedTuple):
    """Consumer groups, keys per block, blocks in flight, registers per consumer thread."""

    groups: int
    BN: int
    stages: int
    registers: int
    persistent: bool = False  # one program per multiprocessor, which takes one row block after the other
    queries: int = 0  # row blocks in flight; 0: two if persistent, else one

    @property
    def BM(self) -> int:
        return ROWS * self.groups

    @property
    def q_buffers(self) -> int:
        return self.queries or (2 if self.persistent else 1)

    def rows_before(self, rows: int) -> int:
        """How many rows before row 0 the first block begins (`tile_scheduler.first_row`), so that the last block fills all groups.

        >>> Tile(3, 128, 3, 160).rows_before(64)
        128
        """
        return (-cdiv(rows, ROWS) % 3) * ROWS if self.groups == 3 else 0


# By the larger of the padded dims of keys and values. Measured on an H200, bf16, n 16,384, TFLOP/s, full and causal:
# d128 700 and 688, with entropy 676 and 652; d64 552 and 526, with entropy 532 and 494; d256 747 and 741, with entropy
# 743 and 742 (bench/results/gpu_forward.md). The figures for other choices are from earlier runs, with another order of the programs and so
# other clocks. Side by side, d128 had 632 with a row max that rose in each block and 700 with a lazy one. With one row block per
# program d128 had 649 and 637, d64 496 and 482. Before partial sums stayed in the thread, d128 had 627 and 617; with 232 registers
# 617 and 610; d64 with two groups 450 and 447. What was tried for the wider ones is in `docs/kernels/hopper_forward.md`.
_TILES: dict[int, Tile] = {
    64: Tile(3, 128, 3, 160, persistent=True),
    96: Tile(3, 64, 5, 160, persistent=True),
    128: Tile(2, 128, 2, 240, persistent=True),
    192: Tile(2, 64, 3, 240, persistent=True, queries=1),
    256: Tile(2, 64, 2, 240, persistent=True, queries=1),
    512: Tile(2, 32, 2, 240),  # of values at most 256 at a time
}
# By the padded dims of keys and values, where these leave room for more keys per block than the larger dim does.
_OWN_TILES: dict[tuple[int, int], Tile] = {(192, 128): Tile(2, 128, 2, 240, persistent=True, queries=1)}
# With a bias or dropout a row needs more registers, so blocks have fewer keys; and more of them fit.
_SMALLER_TILES: dict[int, Tile] = {
    64: Tile(2, 64, 4, 240, persistent=True),
    96: Tile(2, 64, 3, 240, persistent=True),
    128: Tile(2, 64, 3, 240, persistent=True),
    192: Tile(2, 32, 4, 240, persistent=True, queries=1),
    256: Tile(2, 32, 2, 240, persistent=True, queries=1),
}
# Under a narrow mask a row block visits few key blocks, and more of them in flight hide more of the latency.
# Measured on an H200, bf16, 16,384 tokens, hidden 2048, windows of 128 and 1,024 keys, ms: d64 0.198 and 0.395, with the tile above
# 0.233 and 0.482; d96 0.146 and 0.338, with the tile above 0.153 and 0.343; d128 0.126 and 0.279, with the tile above 0.131 and 0.282.
_NARROW_TILES: dict[int, Tile] = {
    64: Tile(2, 128, 4, 240, persistent=True),
    96: Tile(2, 64, 4, 240, persistent=True),
    128: Tile(2, 64, 4, 240, persistent=True),
}
_CHUNKS: dict[int, tuple[int, int]] = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0), 512: (256, 256)}


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


def value_chunks(dim: int) -> tuple[int, int]:
    """The powers of two of values in the forward: as `chunks`, but 96 is one of 128, which is faster than 64 and 32.

    >>> value_chunks(80)
    (128, 0)
    """
    return (128, 0) if padded(dim) == 96 else chunks(dim)


def config(dim: int, values: int | None = None, bias_or_dropout: bool = False, narrow: bool = False, fast: bool = True) -> Tile:
    """The tile for the dims of keys and values, for a bias that may hide or dropout, and for masks that are `BlockMask.narrow`.

    `fast` says whether logits are products times one positive number, so that the row max can be lazy. Without that, a bias or dropout and more
    than 128 dims have one program per row block: persistent programs with a bias took up to 1.1 times as long. The batch and what is observed
    never count.

    >>> config(128).BN, config(128, narrow=True).BN
    (128, 64)
    """
    dims = padded(dim), padded(dim if values is None else values)
    if bias_or_dropout:
        tile = _SMALLER_TILES[max(dims)]
    elif narrow and dims[0] == dims[1] <= 128:
        tile = _NARROW_TILES[dims[0]]
    else:
        tile = _OWN_TILES.get(dims) or _TILES[max(dims)]
    if not fast and (bias_or_dropout or max(dims) > 128):
        return tile._replace(persistent=False, queries=0)
    return tile
