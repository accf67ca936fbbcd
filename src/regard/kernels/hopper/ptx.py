"""Pieces of PTX: what a mask hides, what a bias adds, two numbers in a register, functions by the chip's own units, a count."""

from __future__ import annotations

__all__ = ["BEHIND", "LENT", "LOG2", "OUTSIDE", "SPREAD", "TAKE", "TANH", "UNSET", "pair"]


# −inf in the place of $1 where key $2 is outside of $3 ≤ j < $4, is behind j < $3, or has none of the bits $3 in $2.
OUTSIDE = "{.reg .pred p; setp.lt.s32 p, $2, $3; setp.ge.or.s32 p, $2, $4, p; selp.f32 $0, 0fFF800000, $1, p;}"
BEHIND = "{.reg .pred p; setp.ge.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p;}"
UNSET = "{.reg .pred p; .reg .b32 b; and.b32 b, $2, $3; setp.eq.s32 p, b, 0; selp.f32 $0, 0fFF800000, $1, p;}"

# Number $2 of those at $1, which nobody writes now, in float32. The address is a sum of its own, made when it is needed.
_LENT = "{{.reg .b64 at; .reg .b16 x; mad.wide.s32 at, $2, {size}, $1; {load}}}"
LENT = {
    "fp32": _LENT.format(size=4, load="ld.global.nc.f32 $0, [at];"),
    "fp16": _LENT.format(size=2, load="ld.global.nc.b16 x, [at]; cvt.f32.f16 $0, x;"),
    "bf16": _LENT.format(size=2, load="ld.global.nc.b16 x, [at]; mov.b32 $0, {0, x};"),
}

# log2 x; and tanh(x) from x · 2 log2 e, to 3e−7.
LOG2 = "lg2.approx.ftz.f32 $0, $1;"
TANH = (
    "{.reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e; fma.rn.f32 $0, e, 0fC0000000, 0f3F800000;}"
)
# Take the next number of a counter for the warp, which its first thread has when it comes; and hand it to all threads.
TAKE = (
    "{.reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.s32 p, lane, 0; mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1;}"
)
SPREAD = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"


def pair(dtype: str) -> str:
    """Two numbers $1 and $2, rounded, in the halves of a register."""
    return f"cvt.rn.{dtype}x2.f32 $0, $2, $1;"
