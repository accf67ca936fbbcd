"""Inline PTX: masks, loads of a bias, two numbers in a register, the chip's own functions, and a shared counter."""

from __future__ import annotations

__all__ = ["BROADCAST", "COUNT", "EXP2", "HOLD", "LOAD_BIAS", "LOG2", "MASK_BIT", "MASK_END", "MASK_SPAN", "PREFETCH", "TANH", "pair"]


# $1, or −inf: unless $3 ≤ $2 < $4 (MASK_SPAN); unless $2 < $3 (MASK_END); unless $2 has one of the bits $3 (MASK_BIT).
MASK_SPAN = "{.reg .pred p; setp.lt.s32 p, $2, $3; setp.ge.or.s32 p, $2, $4, p; selp.f32 $0, 0fFF800000, $1, p;}"
MASK_END = "{.reg .pred p; setp.ge.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p;}"
MASK_BIT = "{.reg .pred p; .reg .b32 b; and.b32 b, $2, $3; setp.eq.s32 p, b, 0; selp.f32 $0, 0fFF800000, $1, p;}"

# Number $2 of those at $1, read-only, in float32. The address is added up right before the load.
_LOAD_BIAS = "{{.reg .b64 at; .reg .b16 x; mad.wide.s32 at, $2, {size}, $1; {load}}}"
LOAD_BIAS = {
    "fp32": _LOAD_BIAS.format(size=4, load="ld.global.nc.f32 $0, [at];"),
    "fp16": _LOAD_BIAS.format(size=2, load="ld.global.nc.b16 x, [at]; cvt.f32.f16 $0, x;"),
    "bf16": _LOAD_BIAS.format(size=2, load="ld.global.nc.b16 x, [at]; mov.b32 $0, {0, x};"),
}

# 2^x and log2 x; and tanh(x) from x · 2 log2 e, to 3e−7. `gl.exp2` becomes the same instruction, but only after LLVM has inlined a library
# function with two branches, once for each number of a tile.
EXP2 = "ex2.approx.ftz.f32 $0, $1;"
LOG2 = "lg2.approx.ftz.f32 $0, $1;"
TANH = (
    "{.reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e; fma.rn.f32 $0, e, 0fC0000000, 0f3F800000;}"
)
# Increment a counter, once per warp: its first thread gets the old number when the atomic is done. BROADCAST gives it to all threads.
COUNT = (
    "{.reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.s32 p, lane, 0; mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1;}"
)
# Bring the line of address $1 to L2.
PREFETCH = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
BROADCAST = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
# A register as it is, by an instruction that seems to change it. ctaid.z is 0, since grids have one dimension.
HOLD = "{ .reg .b32 zero; mov.u32 zero, %ctaid.z; or.b32 $0, $1, zero; }"


def pair(dtype: str) -> str:
    """Round two numbers $1 and $2 into the halves of a register."""
    return f"cvt.rn.{dtype}x2.f32 $0, $2, $1;"
