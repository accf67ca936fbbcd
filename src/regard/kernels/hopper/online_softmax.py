"""The online softmax of a consumer group on Hopper, on a tile of logits: mask, exponentiate, sum, rescale O, pack P."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.tile_ops import (
    _BIAS_ALIBI,
    _BIAS_NONE,
    _BITS,
    _NONE,
    LOG2E,
    add_sink,
    clamp_exponent,
    dropout_keep,
    logits,
)
from . import ptx
from .configs import OUTLIER_BITS
from .tile_scheduler import ROWS

EIGHT = gl.constexpr(8)
WARPS = gl.constexpr(4)
OUTLIER = gl.constexpr((127 + OUTLIER_BITS) << 23)  # 2^OUTLIER_BITS as the bits of float32
ONE = gl.constexpr(127 << 23)  # 1.0 as the bits of float32
MASK_END, MASK_BIT = gl.constexpr(ptx.MASK_END), gl.constexpr(ptx.MASK_BIT)
EXP2, LOG2, TANH = gl.constexpr(ptx.EXP2), gl.constexpr(ptx.LOG2), gl.constexpr(ptx.TANH)
BF16, FP16 = gl.constexpr(ptx.pair("bf16")), gl.constexpr(ptx.pair("f16"))


@gluon.jit
def exp2(X):
    """2^X by the chip's own unit; 0 for −inf."""
    return gl.inline_asm_elementwise(EXP2, "=f,f", [X], gl.float32, True, 1)


@gluon.jit
def log2(X):
    """log2 X by the chip's own unit; −inf for 0."""
    return gl.inline_asm_elementwise(LOG2, "=f,f", [X], gl.float32, True, 1)


@gluon.jit
def capped_tanh(S, scale, cap):
    """tanh(S · scale / cap), by the chip's own units."""
    return gl.inline_asm_elementwise(TANH, "=f,f", [S * (scale / cap * (2 * LOG2E))], gl.float32, True, 1)


@gluon.constexpr_function
def may_hide(BIAS):
    """Whether a bias may be −inf. ALiBi is finite."""
    return BIAS not in (_BIAS_NONE, _BIAS_ALIBI)


@gluon.jit
def distances(i, j0, j):
    """|i − j| in float32 for the keys j from j0 on, [BM, BN]. A thread has two of eight neighbouring keys, so a key is where the thread begins
    plus a constant, and only where it begins is converted: the chip converts as slowly as it exponentiates.
    """
    c = gl.arange(0, j.shape[0], j.type.layout)  # [BN]
    begin = j0 + (c & 6)
    return gl.abs((i[:, None] - begin[None, :]).to(gl.float32) - (c & -7).to(gl.float32)[None, :])


@gluon.jit
def score(S, scale, cap, bias, bias_at, i, j, j0, n, M, CAP: gl.constexpr, BIAS: gl.constexpr):
    """Products to logits: scaled, capped, biased; and which pairs the bias leaves visible, if it may hide some."""
    show = j
    if CAP:
        S = cap * capped_tanh(S, scale, cap)
        scale = 1.0
    if BIAS == _BIAS_ALIBI:
        S = S * scale - gl.load(bias_at) * distances(i + bias.offset, j0, j)
    else:
        S, show = logits(S, scale, cap, bias, bias_at, i, j, n, M, False, BIAS)
    return S, show


@gluon.jit
def partial_sums(X):
    """Sums of X [ROWS, BN] over every eighth key, [ROWS, 8]: a thread adds up what it holds."""
    return gl.sum(X.reshape([ROWS, X.shape[1] // EIGHT, EIGHT]), 1)


@gluon.jit
def row_sums(X, like):
    """Partial sums X [ROWS, 8] added up by row, in the layout of `like` [ROWS]."""
    return gl.convert_layout(gl.sum(X, 1), like.type.layout)


@gluon.jit
def beside(x, partial):
    """One number per row, x [ROWS], in the layout of partial sums [ROWS, 8]: [ROWS, 1]."""
    return gl.convert_layout(x, gl.SliceLayout(1, partial.type.layout))[:, None]


@gluon.jit
def running_top(top, P):
    """The larger of `top` [ROWS, 8] and the weights P [ROWS, BN] over every eighth key, as the bits of float32.

    Non-negative floats compare like integers, and the chip compares three integers at once.
    """
    bits = P.to(gl.int32, bitcast=True)
    return gl.maximum(top, gl.max(bits.reshape([ROWS, P.shape[1] // EIGHT, EIGHT]), 1))


@gluon.jit
def has_outlier(top):
    """1 if some weight of the group exceeds 2^OUTLIER_BITS, else 0: some logit was that far above its row max."""
    of_warps = gl.max(top.reshape([WARPS, ROWS // WARPS * EIGHT]), 1)
    return (gl.max(of_warps, 0) > OUTLIER).to(gl.int32)


@gluon.jit
def softmax_fixed_max(S, m, l, e, top, unit, ENTROPY: gl.constexpr):
    """Weights P of logits S [ROWS, BN], and l, e, top [ROWS, 8] with them added; the row max m [ROWS] stays as it is."""
    T = S * unit - m[:, None]  # [ROWS, BN]
    P = exp2(T)
    if ENTROPY:
        e = e + partial_sums(P * T)
    return P, l + partial_sums(P), e, running_top(top, P)


@gluon.jit
def online_softmax(S, m, l, e, unit, ENTROPY: gl.constexpr, FAST: gl.constexpr, HIDES: gl.constexpr, LAZY: gl.constexpr):
    """Weights P of logits S [ROWS, BN], −inf where hidden; the new m [ROWS] and l, e [ROWS, 8]; and a [ROWS], which rescales O.

    l and e are partial sums: a thread adds up what it holds, and threads are reduced once, at the end.
    LAZY: m rises only where a weight relative to it exceeds 2^OUTLIER_BITS. For rows where it stays, all bits are those of
    `softmax_fixed_max`.
    """
    high = gl.max(S, 1)  # [ROWS]
    row_max = high
    if FAST:
        row_max = high * unit  # log2 units; else natural ones
    m_new = gl.maximum(m, row_max)
    if LAZY:
        m_new = gl.where(exp2(high * unit - m).to(gl.int32, bitcast=True) > OUTLIER, row_max, m)
    if FAST:
        T = S * unit - m_new[:, None]  # [ROWS, BN]
        down = m - m_new  # [ROWS]
    else:
        T = (S - m_new[:, None]) * LOG2E
        down = (m - m_new) * LOG2E
    if HIDES and ENTROPY:
        T = clamp_exponent(T)  # finite, so that P·T is 0 and not NaN
    down = clamp_exponent(down)
    P = exp2(T)  # [ROWS, BN]
    a = exp2(down)  # [ROWS]
    each = beside(a, l)  # [ROWS, 1]
    if ENTROPY:
        e = each * (e + beside(down, l) * l) + partial_sums(P * T)
    l = each * l + partial_sums(P)
    return P, m_new, l, e, a


@gluon.jit
def rescale_O(O, a):
    """O [ROWS, C] times a [ROWS]."""
    return O * gl.convert_layout(a, gl.SliceLayout(1, O.type.layout))[:, None]


@gluon.jit
def bits_below(x):
    """One bit for each column of a thread that is below column x; a thread has columns 0, 1, 8, 9, 16, …"""
    count = gl.minimum(gl.maximum((x >> 3) * 2 + gl.minimum(x & 7, 2), 0), 32)
    return gl.where(count < 32, (1 << (count & 31)) - 1, -1)


@gluon.jit
def partial_words(lo, hi, S):
    """The keys lo ≤ c < hi of rows, [ROWS] each, as one word of bits for each thread and row: [ROWS, 1, 8], for S as [ROWS, BN / 8, 8]."""
    L: gl.constexpr = gl.SliceLayout(1, S.reshape([ROWS, S.shape[1] // EIGHT, EIGHT]).type.layout)
    R: gl.constexpr = gl.SliceLayout(1, L)
    begin = (gl.arange(0, EIGHT, gl.SliceLayout(0, L)) & 6)[None, :]  # [1, 8]
    word = bits_below(gl.convert_layout(hi, R)[:, None] - begin) & ~bits_below(gl.convert_layout(lo, R)[:, None] - begin)
    return word[:, None, :]


@gluon.jit
def apply_mask(S, lists, lo, hi, slot, i, j0, MASK: gl.constexpr):
    """S [ROWS, BN], −inf where the mask hides; slot −1 hides all.

    A thread has two of eight neighbouring keys. So a key is where the thread begins plus a constant: the end of the keys
    costs a comparison with a constant, and a bit a test with one. For spans, the visible keys of a thread's part of a row
    become one word of bits. The selection is inline PTX, so that the compiler cannot hoist the comparisons of a whole tile.
    """
    BN: gl.constexpr = S.shape[1]
    SL: gl.constexpr = S.type.layout
    c = gl.arange(0, BN, gl.SliceLayout(0, SL))  # [BN]
    begin = j0 + (c & 6)  # [BN]
    c = c & -7  # [BN]
    if MASK == _BITS:
        c = gl.broadcast(S, c[None, :])[1]  # [ROWS, BN]
        row = lists.bits + gl.maximum(slot, 0).to(gl.int64) * 512 + (i % 128) * 4  # [ROWS]
        first = j0 % 128 // 32
        word = c * 0
        for k in gl.static_range(BN // 32):
            w = gl.load(row + first + k)  # [ROWS]
            word = gl.where(c // 32 == k, gl.where(slot >= 0, w, 0)[:, None], word)
        word = word >> (begin % 8)[None, :]
        bit = (c * 0 + 1) << (c % 32)
        S = gl.inline_asm_elementwise(MASK_BIT, "=f,f,r,r", [S, word, bit], gl.float32, True, 1)
    elif MASK == _NONE:
        S = gl.inline_asm_elementwise(MASK_END, "=f,f,r,r", [S, c[None, :], hi[:, None] - begin[None, :]], gl.float32, True, 1)
    else:
        word = partial_words(lo - j0, hi - j0, S)  # [ROWS, 1, 8]
        bit = (c * 0 + 1) << (c // 8 * 2 + c % 2)  # [BN]
        T = S.reshape([ROWS, BN // EIGHT, EIGHT])
        bit = gl.convert_layout(bit.reshape([BN // EIGHT, EIGHT]), gl.SliceLayout(0, T.type.layout))
        T = gl.inline_asm_elementwise(MASK_BIT, "=f,f,r,r", [T, word, bit[None, :, :]], gl.float32, True, 1)
        S = gl.convert_layout(T.reshape([ROWS, BN]), SL, assert_trivial=True)
    return S


@gluon.jit
def pack_P(P, keys, j, drop, dtype, DROP: gl.constexpr):
    """P [ROWS, BN] after dropout, two neighbours in an int32: [ROWS, BN / 2].

    So the loop carries it in the registers that the product reads. Separate halves would be packed in each block.
    """
    if DROP:
        P = gl.where(dropout_keep(keys[0], keys[1], j, drop.bound), P, 0.0)
    even, odd = P.reshape([ROWS, P.shape[1] // 2, 2]).split()  # [ROWS, BN / 2]
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(BF16, "=r,f,f", [even, odd], gl.int32, True, 1)
    else:
        pairs = gl.inline_asm_elementwise(FP16, "=r,f,f", [even, odd], gl.int32, True, 1)
    return pairs


@gluon.jit
def unpack_P(P, dtype: gl.constexpr, PL: gl.constexpr):
    """Packed P as the left operand of a product, [ROWS, BN]; it generates no instruction."""
    even, odd = (P & 0xFFFF).to(gl.int16).to(dtype, bitcast=True), (P >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([ROWS, P.shape[1] * 2]), PL, assert_trivial=True)


@gluon.jit
def store_statistics(outputs, at, valid, row_max, log_row_sum, entropy, empty, sinks, h, SINK: gl.constexpr, ENTROPY: gl.constexpr):
    """Store the statistics of rows, with the share of the sink."""
    lse = gl.where(empty, float("-inf"), row_max + log_row_sum)
    if SINK:
        lse, entropy, log_row_sum = add_sink(gl.load(sinks + h), lse, entropy, log_row_sum, empty)
    gl.store(outputs.lse + at, lse, mask=valid)
    gl.store(outputs.row_max + at, gl.where(empty, float("-inf"), row_max), mask=valid)
    gl.store(outputs.log_row_sum + at, log_row_sum, mask=valid)
    if ENTROPY:
        gl.store(outputs.entropy + at, entropy, mask=valid)
