"""Dropout on Hopper: which weights of a transposed tile are kept, one bit each.

A thread has 32 weights of a tile [BM, ROWS], so one register holds all of its bits. They are computed before the weights, while
the tensor cores are busy.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.tile_ops import dropout_keep, dropout_row_keys
from .register_layouts import transposed_layout
from .tile_scheduler import ROWS


@gluon.jit
def split_by_thread(X, BM: gl.constexpr):
    """X [BM, ROWS] split by register, lane and warp: (registers, lanes, registers) of the rows, (warps, registers, lanes) of the keys."""
    return X.reshape([BM // 8, 4, 2, ROWS // 16, 2, 8])


@gluon.jit
def bit_of_weight(BM: gl.constexpr):
    """The bit of each weight, [BM, ROWS]: the weights of a thread have different ones."""
    TL: gl.constexpr = transposed_layout(BM)
    r = gl.arange(0, BM, gl.SliceLayout(1, TL))
    j = gl.arange(0, ROWS, gl.SliceLayout(0, TL))
    return 1 << ((r // 8 * 4 + r % 2 * 2)[:, None] + (j // 8 % 2)[None, :])


@gluon.jit
def keep_bits(tile, params, BM: gl.constexpr):
    """Which weights of a tile are kept, one register of bits per thread."""
    gl.static_assert(BM <= 64, "a thread has 32 weights at most")
    i = tile.b * BM + gl.arange(0, BM, gl.SliceLayout(1, transposed_layout(BM)))  # [BM]
    low, high = dropout_row_keys(params.drop, tile.batch, tile.h, params.num_heads, i, params.n)
    bits = gl.where(dropout_keep(low, high, tile.j, params.drop.bound), bit_of_weight(BM), 0)
    return gl.sum(gl.sum(gl.sum(split_by_thread(bits, BM), 4), 2), 0)


@gluon.jit
def keep_mask(bits, BM: gl.constexpr):
    """Which weights [BM, ROWS] are kept, from their bits."""
    of_weight = split_by_thread(bit_of_weight(BM), BM)
    each = gl.expand_dims(gl.expand_dims(gl.expand_dims(bits, 0), 2), 4)
    return gl.convert_layout((each & of_weight).reshape([BM, ROWS]), transposed_layout(BM), assert_trivial=True) != 0


@gluon.jit
def dropout_backward(P, dP, delta, drop):
    """|P|, and dP − δ after dropout [BM, ROWS]; a negative P means that the weight was dropped."""
    return gl.abs(P), gl.where(P > 0.0, dP * drop.factor, 0.0) - delta[:, None]
