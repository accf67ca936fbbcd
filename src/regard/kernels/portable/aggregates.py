"""What the functions of a kernel share, in few parameters: its constants, and the matrices, head and rows of a program.

Kernels and their functions take the constants as `C`. The other classes are tuples, which Triton's compiler takes apart.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton.language as tl

__all__ = ["Constants", "Head", "Matrices", "RowStats", "RowStatsDot", "RowTile", "constants"]


class Constants:
    """What a kernel is compiled for, by name. It holds no more than these, since Triton's cache does not know its code.

    D, DV          dims of keys and values; DP, DVP: padded to powers of two
    DR             the dims of keys beyond DP, padded to a power of two; 0 for none
    BM, BN         rows and keys of a tile
    MASK, BIAS     their kinds
    POINTWISE      whether a generated function, VALUE, changes the scores
    SLOPED         whether its derivative, SLOPE, is not 1 everywhere
    BOUNDED        whether that is finite for every finite score
    CURVED         double backward: whether its second derivative, CURVE, is not 0 everywhere
    MIXED_HEADS    whether rows of a tile belong to several heads
    CAP, SCALES    whether there is a soft cap, a tensor of scales
    HIDDEN_DIM     the hidden dim of the additive score; 0 for products
    APPROXIMATE    whether its tanh may be the hardware's
    PRECISION      how float32 is multiplied
    FAST           whether logits are products times one positive number, which then stay raw
    EXACT          whether exponents keep all digits of float32
    ENTROPY, DROP, SINK    whether there is one
    BY_SPAN        whether tiles are masked by the spans of their rows alone, in one go
    PTX            whether kernels may have instructions of NVIDIA's
    PACKED         dkdv: whether what it reads of rows is packed
    TMA            whether matrices are TMA descriptors
    GROUPED        whether query heads share keys
    PARTS          forward: of the values' columns, DVP each, for which programs are apart
    WANTS_DK, WANTS_DV     dkdv: which of them a program computes
    BIAS_DOT       jvp: the kind of the bias's tangent
    MODE           bias gradient: PAIRS, ROWS, KEYS or TABLE
    KP, SPLITS     top, decode: places per row and splits, padded to powers of two

    >>> constants(BN=128, FAST=True)
    Constants(BN=128, FAST=True)
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update((name, tl.constexpr(value)) for name, value in values.items())
        self._text = f"Constants({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


constants = lru_cache(maxsize=4096)(Constants)  # the same object every time: a launch looks it up by its hash


class Matrices(NamedTuple):
    """Queries, keys, values and dO: pointers to those of a head, or TMA descriptors of all; None where there is none."""

    q: Any
    k: Any
    v: Any
    do: Any
    strides: Any  # of q, k and v
    do_strides: Any


class Head(NamedTuple):
    """A head of a batch item: which it is, what its logits are made of, and its mask."""

    batch: Any
    index: Any  # of the query head
    kv_index: Any
    first_row: Any  # its first row in (L, H, N) tensors, int64
    scale: Any
    unit: Any  # the scale in log2 units
    score: Any  # ScoreArgs
    blocks: Any  # BlockLists
    dropout: Any
    sizes: Any


class RowTile(NamedTuple):
    """Rows of a head, [BM] each: their numbers, their spans of keys, pointers to their biases, their dropout keys."""

    i: Any
    lo: Any
    hi: Any
    bias: Any
    low_key: Any
    high_key: Any


class RowStats(NamedTuple):
    """What a backward pass knows of rows, in registers."""

    offset: Any  # what is subtracted from logits: the row max if EXACT, else lse
    log_sum: Any  # lse above the offset, in log2 units
    delta: Any
    g_entropy: Any
    mean: Any  # E[S] above the offset


class RowStatsDot(NamedTuple):
    """Tangents of what a backward pass knows of rows, in registers."""

    delta: Any
    lse: Any
    g_entropy: Any
    mean: Any
