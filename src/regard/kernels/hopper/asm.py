"""Pieces of PTX: what a mask hides, two numbers in a register, a product that a warp skips, functions by the chip's own units, a count."""

from __future__ import annotations

__all__ = ["BEHIND", "LOG2", "OUTSIDE", "SPREAD", "TAKE", "TANH", "UNSET", "exp2", "exp2_constraints", "pair", "rescale", "rescale_constraints"]


# −inf in the place of $1 where key $2 is outside of $3 ≤ j < $4, is behind j < $3, or has none of the bits $3 in $2.
OUTSIDE = "{.reg .pred p; setp.lt.s32 p, $2, $3; setp.ge.or.s32 p, $2, $4, p; selp.f32 $0, 0fFF800000, $1, p;}"
BEHIND = "{.reg .pred p; setp.ge.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p;}"
UNSET = "{.reg .pred p; .reg .b32 b; and.b32 b, $2, $3; setp.eq.s32 p, b, 0; selp.f32 $0, 0fFF800000, $1, p;}"

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


def rescale(count: int) -> str:
    """Multiply `count` numbers of a thread by their factors, unless all factors of the warp are 1.

    The first four factors are those of the thread's two rows.
    """
    lines = ["{", ".reg .pred p;", ".reg .pred q;", f"setp.ne.f32 p, ${2 * count}, 0f3F800000;"]
    lines += [f"setp.ne.or.f32 p, ${2 * count + k}, 0f3F800000, p;" for k in (1, 2, 3)]
    lines += ["vote.sync.any.pred q, p, 0xffffffff;", "@!q bra DONE;"]
    lines += [f"mul.f32 ${k}, ${k}, ${2 * count + k};" for k in range(count)]
    return "\n".join([*lines, "DONE:", "}"])


def rescale_constraints(count: int) -> str:
    """Numbers out, the same registers in, then the factors."""
    return ",".join(["=f"] * count + [str(k) for k in range(count)] + ["f"] * count)


def exp2(count: int, poly: int) -> str:
    """2ˣ of `count` numbers, the first `poly` of them by a polynomial, to 2.8e−6.

    x is split into a whole number, which goes into the exponent, and a rest from −½ to ½, of which the polynomial is
    taken: 1 + 0.6931242 x + 0.2402410 x² + 0.0559064 x³ + 0.0095829 x⁴. Its constant is 1, so that 2^−127 is 0.
    """
    lines = ["{", ".reg .f32 x, r, y;", ".reg .b32 b, z;"]
    for k in range(count):
        if k >= poly:
            lines += [f"ex2.approx.ftz.f32 ${k}, ${count + k};"]
        else:
            lines += [
                f"max.f32 x, ${count + k}, 0fC2FE0000;",
                "add.rn.f32 r, x, 0f4B400000;",  # 1.5 · 2²³: the last bits of the sum are x, rounded
                "sub.rn.f32 y, r, 0f4B400000;",
                "sub.rn.f32 x, x, y;",
                "fma.rn.f32 y, x, 0f3C1D0166, 0f3D64FE23;",
                "fma.rn.f32 y, y, x, 0f3E7601BC;",
                "fma.rn.f32 y, y, x, 0f3F317096;",
                "fma.rn.f32 y, y, x, 0f3F800000;",
                "mov.b32 b, r;",
                "shl.b32 b, b, 23;",
                "mov.b32 z, y;",
                "add.s32 z, z, b;",
                f"mov.b32 ${k}, z;",
            ]
    return "\n".join([*lines, "}"])


def exp2_constraints(count: int) -> str:
    return ",".join(["=f"] * count + ["f"] * count)
