"""What functions generated from expressions are made of, by the rules of torch; numbers may be single or tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import tanh

__all__ = ["entry", "expm1", "floordiv", "log1p", "mod", "nearest", "power", "read_float", "read_int32", "read_int64", "sign", "tanh"]


@triton.jit
def mod(a, b):
    """The remainder of whole numbers, with the sign of the divisor."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def floordiv(a, b):
    """Whole numbers divided, rounded down."""
    return (a - mod(a, b)) // b


@triton.jit
def sign(x):
    """−1, 0 or 1."""
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def nearest(x):
    """The nearest whole number, an even one if there are two."""
    low = tl.floor(x)
    rest = x - low
    odd = low - 2.0 * tl.floor(low * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), low + 1.0, low)


@triton.jit
def power(a, b):
    """a to the b; of a negative a for whole b alone."""
    x = tl.exp2(b * tl.log2(tl.abs(a)))
    odd = b - 2.0 * tl.floor(b * 0.5) == 1.0
    negative = tl.where(tl.floor(b) == b, tl.where(odd, -x, x), float("nan"))
    return tl.where(b == 0.0, 1.0, tl.where(a == 1.0, 1.0, tl.where(a < 0.0, negative, x)))


@triton.jit
def log1p(x):
    """ln(1 + x), to all digits near 0."""
    u = 1.0 + x
    rest = u - 1.0
    return tl.where(rest == 0.0, x, tl.where(u == float("inf"), u, tl.log(u) * (x / tl.where(rest == 0.0, 1.0, rest))))


@triton.jit
def expm1(x):
    """exp(x) − 1, to all digits near 0."""
    u = tl.exp(x)
    series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666667 + x * 0.0083333333))))
    return tl.where(tl.abs(x) < 0.125, series, u - 1.0)


# Tables do not change while a kernel runs. Triton's own loads inside a loop would be staged in shared memory, a tile at a
# time; on NVIDIA a pure instruction is neither staged nor repeated for the same address.
@triton.jit
def read_float(at):
    """The float32 at some addresses."""
    return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def read_int32(at):
    """The int32 at some addresses."""
    return tl.inline_asm_elementwise("ld.global.nc.s32 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def read_int64(at):
    """The int64 at some addresses."""
    return tl.inline_asm_elementwise("ld.global.nc.s64 $0, [$1];", "=l,l", [at.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1)


@triton.jit
def entry(index, size):
    """The place of an index in a dimension: counted from the end if negative, and the nearest if it is beyond."""
    return tl.minimum(tl.maximum(tl.where(index < 0, index + size, index), 0), size - 1)
