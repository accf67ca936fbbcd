"""What a warp group does to a tile of logits and to what it has of its rows: hide, exponentiate, fold, rescale, pack."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.tile_ops import _BITS, _NONE, DEEP, LOG2E, dropout_keep, logits
from . import ptx
from .configs import MUCH
from .tile_scheduler import ROWS

EIGHT = gl.constexpr(8)
WARPS = gl.constexpr(4)
MUCH_BITS = gl.constexpr((127 + MUCH) << 23)  # of 2^MUCH
ONE_BITS = gl.constexpr(127 << 23)
BEHIND, UNSET = gl.constexpr(ptx.BEHIND), gl.constexpr(ptx.UNSET)
LOG2, TANH = gl.constexpr(ptx.LOG2), gl.constexpr(ptx.TANH)
BF16, FP16 = gl.constexpr(ptx.pair("bf16")), gl.constexpr(ptx.pair("f16"))


@gluon.jit
def log2(X):
    """log2 X by the chip's own unit; −inf of 0."""
    return gl.inline_asm_elementwise(LOG2, "=f,f", [X], gl.float32, True, 1)


@gluon.jit
def saturation(S, scale, cap):
    """tanh(S · scale / cap), by the chip's own units."""
    return gl.inline_asm_elementwise(TANH, "=f,f", [S * (scale / cap * (2 * LOG2E))], gl.float32, True, 1)


@gluon.jit
def scored(S, scale, cap, bias, at, i, j, n, M, CAP: gl.constexpr, BIAS: gl.constexpr):
    """Products to logits: scaled, capped, biased; and which pairs the bias leaves visible, if there is one."""
    if CAP:
        S = cap * saturation(S, scale, cap)
        scale = 1.0
    return logits(S, scale, cap, bias, at, i, j, n, M, False, BIAS)


@gluon.jit
def parts(X):
    """Sums of X [ROWS, BN] over every eighth key, [ROWS, 8]: a thread holds all that it adds up."""
    return gl.sum(X.reshape([ROWS, X.shape[1] // EIGHT, EIGHT]), 1)


@gluon.jit
def summed(X, like):
    """The rows of parts X [ROWS, 8], added up as `like` [ROWS] lies."""
    return gl.convert_layout(gl.sum(X, 1), like.type.layout)


@gluon.jit
def beside(x, parts):
    """A number of each row, x [ROWS], as parts [ROWS, 8] lie: [ROWS, 1]."""
    return gl.convert_layout(x, gl.SliceLayout(1, parts.type.layout))[:, None]


@gluon.jit
def higher(top, P):
    """The larger of `top` [ROWS, 8] and of weights P [ROWS, BN] over every eighth key, as the bits of float32.

    The bits of numbers that are not negative have the order of the numbers, and the chip compares three integers at once.
    """
    bits = P.to(gl.int32, bitcast=True)
    return gl.maximum(top, gl.max(bits.reshape([ROWS, P.shape[1] // EIGHT, EIGHT]), 1))


@gluon.jit
def leaped(top):
    """1 if some weight of the group is above 2^MUCH, else 0: a logit was so far above the level of its row."""
    of_warps = gl.max(top.reshape([WARPS, ROWS // WARPS * EIGHT]), 1)
    return (gl.max(of_warps, 0) > MUCH_BITS).to(gl.int32)


@gluon.jit
def weigh(S, m, l, e, top, unit, ENTROPY: gl.constexpr):
    """Fold logits S [ROWS, BN] into l, e and top [ROWS, 8] from a level m [ROWS] that stays, whatever they are: the weights P."""
    T = S * unit - m[:, None]  # [ROWS, BN]
    P = gl.exp2(T)
    if ENTROPY:
        e = e + parts(P * T)
    return P, l + parts(P), e, higher(top, P)


@gluon.jit
def fold(S, m, l, e, unit, ENTROPY: gl.constexpr, FAST: gl.constexpr, HIDES: gl.constexpr, RARELY: gl.constexpr):
    """Fold logits S [ROWS, BN], −inf where hidden, into m [ROWS] and l, e [ROWS, 8]: the weights P, and what rescales the past.

    l and e stay in parts, each the sum over its keys: a thread adds them up by itself, and rows meet once, at the end.
    RARELY: m rises only for a weight above 2^MUCH, told from it. Of rows for which it stays all is to the bit as from `weigh`.
    """
    high = gl.max(S, 1)  # [ROWS]
    row_max = high
    if FAST:
        row_max = high * unit  # log2 units; else natural ones
    m_new = gl.maximum(m, row_max)
    if RARELY:
        m_new = gl.where(gl.exp2(high * unit - m).to(gl.int32, bitcast=True) > MUCH_BITS, row_max, m)
    if FAST:
        T = S * unit - m_new[:, None]  # [ROWS, BN]
        down = m - m_new  # [ROWS]
    else:
        T = (S - m_new[:, None]) * LOG2E
        down = (m - m_new) * LOG2E
    if HIDES and ENTROPY:
        T = gl.maximum(T, DEEP)  # finite, so that P·T is 0 and not NaN
    down = gl.maximum(down, DEEP)
    P = gl.exp2(T)  # [ROWS, BN]
    a = gl.exp2(down)  # [ROWS]
    each = beside(a, l)  # [ROWS, 1]
    if ENTROPY:
        e = each * (e + beside(down, l) * l) + parts(P * T)
    l = each * l + parts(P)
    return P, m_new, l, e, a


@gluon.jit
def shrink(O, a):
    """O [ROWS, C] times a [ROWS]."""
    return O * gl.convert_layout(a, gl.SliceLayout(1, O.type.layout))[:, None]


@gluon.jit
def bits_before(x):
    """The places of a thread that are before place x, as bits; 0, 1, 8, 9, 16, … are its places."""
    count = gl.minimum(gl.maximum((x >> 3) * 2 + gl.minimum(x & 7, 2), 0), 32)
    return gl.where(count < 32, (1 << (count & 31)) - 1, -1)


@gluon.jit
def veil(S, where, lo, hi, slot, i, j0, MASK: gl.constexpr):
    """S [ROWS, BN], −inf where the mask hides; slot −1 hides all.

    A key is its place among the keys of its thread, a constant, and where the thread begins: two of eight keys are a
    thread's. So the end of the keys costs a comparison with a constant, and a bit a test with one; of spans, the keys of a
    row that a thread has are made one word of bits. The selection is one piece of PTX, which the compiler cannot tear
    apart to keep the comparisons of a whole tile.
    """
    BN: gl.constexpr = S.shape[1]
    c = gl.arange(0, BN, gl.SliceLayout(0, S.type.layout))  # [BN]
    begin = j0 + (c & 6)  # [BN]
    c = gl.broadcast(S, (c & -7)[None, :])[1]  # [ROWS, BN]
    if MASK == _BITS:
        row = where.bits + gl.maximum(slot, 0).to(gl.int64) * 512 + (i % 128) * 4  # [ROWS]
        first = j0 % 128 // 32
        word = c * 0
        for k in gl.static_range(BN // 32):
            w = gl.load(row + first + k)  # [ROWS]
            word = gl.where(c // 32 == k, gl.where(slot >= 0, w, 0)[:, None], word)
        word = word >> (begin % 8)[None, :]
        bit = (c * 0 + 1) << (c % 32)
        S = gl.inline_asm_elementwise(UNSET, "=f,f,r,r", [S, word, bit], gl.float32, True, 1)
    elif MASK == _NONE:
        S = gl.inline_asm_elementwise(BEHIND, "=f,f,r,r", [S, c, hi[:, None] - begin[None, :]], gl.float32, True, 1)
    else:
        word = bits_before(hi[:, None] - begin[None, :]) & ~bits_before(lo[:, None] - begin[None, :])  # [ROWS, BN]: one of each row of a thread
        S = gl.inline_asm_elementwise(UNSET, "=f,f,r,r", [S, word, (c * 0 + 1) << (c // 8 * 2 + c % 2)], gl.float32, True, 1)
    return S


@gluon.jit
def packed(P, keys, j, drop, like, DROP: gl.constexpr):
    """P [ROWS, BN] after dropout, two neighbours in an int32: [ROWS, BN / 2].

    So a loop carries it in the registers that a product reads. Halves on their own would be put together in each block.
    """
    if DROP:
        P = gl.where(dropout_keep(keys[0], keys[1], j, drop.bound), P, 0.0)
    even, odd = P.reshape([ROWS, P.shape[1] // 2, 2]).split()  # [ROWS, BN / 2]
    if like == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(BF16, "=r,f,f", [even, odd], gl.int32, True, 1)
    else:
        pairs = gl.inline_asm_elementwise(FP16, "=r,f,f", [even, odd], gl.int32, True, 1)
    return pairs


@gluon.jit
def operand(P, like: gl.constexpr, PL: gl.constexpr):
    """Packed P as the left side of a product, [ROWS, BN]; no instruction comes of it."""
    even, odd = (P & 0xFFFF).to(gl.int16).to(like, bitcast=True), (P >> 16).to(gl.int16).to(like, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([ROWS, P.shape[1] * 2]), PL, assert_trivial=True)
