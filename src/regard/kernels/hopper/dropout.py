"""Dropout on Hopper: which weights of a transposed tile survive, a bit each.

A thread has 32 weights of a tile [BM, ROWS], so a register says it of all. It is found before the weights are there, while
the tensor cores are at work.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.tile_ops import dropout_keep, dropout_row_keys
from .tile_scheduler import ROWS


@gluon.jit
def pieces(X, BM: gl.constexpr):
    """X [BM, ROWS] by who has it: (registers, lanes, registers) of the rows, (warps, registers, lanes) of the keys."""
    return X.reshape([BM // 8, 4, 2, ROWS // 16, 2, 8])


@gluon.jit
def own_bits(BM: gl.constexpr, TL: gl.constexpr):
    """The bit of each weight, [BM, ROWS]: a thread's have different ones."""
    r = gl.arange(0, BM, gl.SliceLayout(1, TL))
    j = gl.arange(0, ROWS, gl.SliceLayout(0, TL))
    return 1 << ((r // 8 * 4 + r % 2 * 2)[:, None] + (j // 8 % 2)[None, :])


@gluon.jit
def survivors(task, item, h, b, j, BM: gl.constexpr, TL: gl.constexpr):
    """A bit for each weight of a block's rows and keys j, a register a thread."""
    gl.static_assert(BM <= 64, "a thread has 32 weights at most")
    i = b * BM + gl.arange(0, BM, gl.SliceLayout(1, TL))  # [BM]
    low, high = dropout_row_keys(task.drop, item, h, task.heads, i, task.n)
    bits = gl.where(dropout_keep(low, high, j, task.drop.bound), own_bits(BM, TL), 0)
    return gl.sum(gl.sum(gl.sum(pieces(bits, BM), 4), 2), 0)


@gluon.jit
def survive(bits, BM: gl.constexpr, TL: gl.constexpr):
    """Which weights [BM, ROWS] survive, from their bits."""
    own = pieces(own_bits(BM, TL), BM)
    each = gl.expand_dims(gl.expand_dims(gl.expand_dims(bits, 0), 2), 4)
    return gl.convert_layout((each & own).reshape([BM, ROWS]), TL, assert_trivial=True) != 0


@gluon.jit
def dropped(P, dP, delta, drop):
    """|P|, and dP − δ after dropout [BM, ROWS], where P is negative if it was dropped."""
    return gl.abs(P), gl.where(P > 0.0, dP * drop.factor, 0.0) - delta[:, None]
