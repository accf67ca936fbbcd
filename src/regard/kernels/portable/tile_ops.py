"""What all kernels do to a tile of logits S [BM, BN]: scale, cap, bias, mask, dropout. In Triton; shapes in brackets."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import ALIBI, PLAIN, TENSOR
from ..block_lists import BITS, NONE, SPANS

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
DEEP = tl.constexpr(-1e4)  # exp2(−1e4) is 0, and products with it stay finite
_NONE, _SPANS, _BITS = tl.constexpr(NONE), tl.constexpr(SPANS), tl.constexpr(BITS)
_PLAIN, _TENSOR, _ALIBI = tl.constexpr(PLAIN), tl.constexpr(TENSOR), tl.constexpr(ALIBI)


@triton.jit
def seats(count):
    """Which of `count` blocks a program has, and which item and head."""
    return tl.program_id(0) % count, tl.program_id(0) // count


@triton.jit
def load(x, at, there, width: tl.constexpr, stride, PADDED: tl.constexpr, GUARDED: tl.constexpr):
    """Rows `at` [R] (pointers' offsets) of a matrix, [R, PADDED]; zeros where not `there` and beyond `width`."""
    d = tl.arange(0, PADDED).to(tl.int64)
    at = x + at[:, None] + d[None, :] * stride  # [R, PADDED]
    if PADDED != width:
        X = tl.load(at, mask=there[:, None] & (d < width)[None, :], other=0.0)
    elif GUARDED:
        X = tl.load(at, mask=there[:, None], other=0.0)
    else:
        X = tl.load(at)
    return X


@triton.jit
def tanh(x):
    """tanh to float32's rounding: by exp away from 0, by its series near it."""
    y = x * x
    series = x * (1.0 + y * (-0.33333333 + y * (0.13333333 - y * 0.053968254)))
    return tl.where(tl.abs(x) < 0.1, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def quick_tanh(x, APPROXIMATE: tl.constexpr):
    """tanh for the additive score: the hardware's own (2⁻¹¹) for half precision on NVIDIA, else by exp."""
    if APPROXIMATE:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return y


@triton.jit
def additive(q, k, vector, i, j, n, m, q_row, q_dim, k_row, k_dim, BM: tl.constexpr, BN: tl.constexpr,
             HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Σ_c vector[c] · tanh(q[i, c] + k[j, c]): [BM, BN]."""
    S = tl.zeros([BM, BN], tl.float32)
    q, k = q + i.to(tl.int64) * q_row, k + j.to(tl.int64) * k_row
    WHOLE: tl.constexpr = HIDDEN // 4 * 4
    for c in range(0, WHOLE, 4):
        for u in tl.static_range(4):  # four units together, so that their loads are in flight together
            a = tl.load(q + (c + u) * q_dim, mask=i < n, other=0.0)  # [BM]
            b = tl.load(k + (c + u) * k_dim, mask=j < m, other=0.0)  # [BN]
            S += tl.load(vector + c + u) * quick_tanh(a[:, None] + b[None, :], APPROXIMATE)
    for c in range(WHOLE, HIDDEN):
        a = tl.load(q + c * q_dim, mask=i < n, other=0.0)
        b = tl.load(k + c * k_dim, mask=j < m, other=0.0)
        S += tl.load(vector + c) * quick_tanh(a[:, None] + b[None, :], APPROXIMATE)
    return S


@triton.jit
def bias_rows(bias, l, h, i, BIAS: tl.constexpr):
    """Pointers [BM] to each row's biases; one to the slope or table of a structured bias, unless rows have heads of their own."""
    at = i
    if BIAS != _PLAIN:
        at = bias.at + h.to(tl.int64) * bias.head + l.to(tl.int64) * bias.item
    if BIAS == _TENSOR:
        at += i.to(tl.int64) * bias.row
    return at


@triton.jit
def bias_tile(bias, at, i, j, n, m, BIAS: tl.constexpr):
    """What a bias adds to the logits, [BM, BN]."""
    if BIAS == _TENSOR:
        added = tl.load(at[:, None] + j[None, :].to(tl.int64) * bias.key, mask=(i < n)[:, None] & (j < m)[None, :], other=0.0).to(tl.float32)
    elif BIAS == _ALIBI:
        slope = tl.load(at) + (i * 0).to(tl.float32)  # [BM]
        added = -slope[:, None] * tl.abs(i[:, None] + bias.offset - j[None, :]).to(tl.float32)
    else:
        ahead = j[None, :] - (i[:, None] + bias.offset)
        added = tl.load((at + i * 0)[:, None] + tl.minimum(tl.maximum(ahead, -bias.reach), bias.reach) + bias.reach)
    return added


@triton.jit
def logits(S, scale, cap, bias, at, i, j, n, m, CAP: tl.constexpr, BIAS: tl.constexpr):
    """Products [BM, BN] to logits: scaled, capped, biased; and which pairs the bias leaves visible, if there is one."""
    S = S * scale
    if CAP:
        S = cap * tanh(S / cap)
    show = i
    if BIAS != _PLAIN:
        added = bias_tile(bias, at, i, j, n, m, BIAS)
        S += added
        show = (added != float("-inf")) & (i < n)[:, None]  # by the bias and not by S, which a hidden key may make NaN
    return S, show


@triton.jit
def span_rows(where, l, h, i, n, m, MASK: tl.constexpr):
    """The spans [BM] of rows i; no keys for rows beyond the last."""
    if MASK == _SPANS:
        at = (l // tl.load(where.inner)).to(tl.int64) * where.item + h * where.head + i
        lo, hi = tl.load(where.lo + at, mask=i < n, other=0), tl.load(where.hi + at, mask=i < n, other=0)
    else:
        lo, hi = i * 0, tl.where(i < n, m, 0)
    return lo, hi


@triton.jit
def shown(where, lo, hi, slot, i, j, MASK: tl.constexpr):
    """Which pairs the mask shows: bool [BM, BN]."""
    if MASK == _BITS:
        at = where.bits + slot.to(tl.int64) * 512 + (i % 128) * 4  # [BM]
        which = ((j % 128) // 32)[None, :]  # [1, BN]: the word of its row that holds a key's bit
        low = tl.where(which == 0, tl.load(at)[:, None], tl.load(at + 1)[:, None])
        high = tl.where(which == 2, tl.load(at + 2)[:, None], tl.load(at + 3)[:, None])
        show = ((tl.where(which < 2, low, high) >> (j % 32)[None, :]) & 1) != 0  # [BM, BN]
    else:
        show = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
    return show


@triton.jit
def shown_anywhere(where, l, h, lo, hi, i, j, key_blocks, MASK: tl.constexpr):
    """Which pairs the mask shows, for tiles that fit no block of the lists: bool [BM, BN]."""
    if MASK == _BITS:
        at = (l // tl.load(where.inner)).to(tl.int64) * where.table_item + h * where.table_head + (i // 128) * key_blocks  # [BM]
        inside = (hi > 0)[:, None] & (j < key_blocks * 128)[None, :]
        slot = tl.load(where.table + at[:, None] + (j // 128)[None, :], mask=inside, other=-1)  # [BM, BN]
        at = tl.maximum(slot, 0).to(tl.int64) * 512 + (i % 128)[:, None] * 4 + ((j % 128) // 32)[None, :]
        show = (((tl.load(where.bits + at) >> (j % 32)[None, :]) & 1) != 0) & (slot >= 0)
    else:
        show = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
    return show


@triton.jit
def visible_keys(X, show, where, l, h, j, m, MASK: tl.constexpr, BIAS: tl.constexpr):
    """Keys or values X [BN, …] of a tile, zeros for those that no row may attend, which may be NaN.

    A mask tells it for all rows; with a bias, whose −inf hide too, the rows of the tile do.
    """
    if BIAS != _PLAIN:
        X = tl.where((tl.max(show.to(tl.int32), 0) > 0)[:, None], X, 0.0)
    elif MASK != _NONE:
        at = (l // tl.load(where.inner)).to(tl.int64) * where.seen_item + h * where.seen_head
        X = tl.where((tl.load(where.seen + at + j, mask=j < m, other=0) != 0)[:, None], X, 0.0)
    return X


@triton.jit
def seat(where, l, h, MASK: tl.constexpr):
    """Where the blocks of an item and head begin in `bounds` or `start`."""
    at = 0
    if MASK != _NONE:
        at = (l // tl.load(where.inner)) * where.block_item + h * where.block_head
    return at


@triton.jit
def met(where, at, block, count, whole, MASK: tl.constexpr):
    """The blocks that a block meets: (first partial, first full, behind the full, how many partial).

    Without a mask the first `whole` of `count` are full. With lists, the numbers are places in these.
    """
    if MASK == _NONE:
        first, full, until, rest = 0, 0, whole, count - whole
    elif MASK == _SPANS:
        at = where.bounds + at + block * 4
        first, full, until = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        rest = tl.load(at + 3) - first - (until - full)
    else:
        at += block
        first = tl.load(where.start + at)
        full, until, rest = tl.load(where.full_start + at), tl.load(where.full_start + at + 1), tl.load(where.start + at + 1) - first
    return first, full, until, rest


@triton.jit
def whole_block(where, t, MASK: tl.constexpr):
    """The t-th full block."""
    b = t
    if MASK == _BITS:
        b = tl.load(where.full_entry + t)
    return b


@triton.jit
def partial(where, t, first, full, until, MASK: tl.constexpr):
    """The t-th partial block, and the slot of its bits."""
    if MASK == _BITS:
        block, slot = tl.load(where.entry + first + t), tl.load(where.slot + first + t)
    else:
        block, slot = tl.where(t < full - first, first + t, until + t - (full - first)), 0
    return block, slot


@triton.jit
def off_by(m, top, empty, FAST: tl.constexpr):
    """What m has above the largest logit `top` as it is written down, [BM] in natural units: by rounding, or as a level below it.

    Readers take top · log2 e for the level, rounded; so the spread is told from that. The select keeps a compiler from
    fusing the product with the difference, which would leave it unrounded.
    """
    rest = m * 0.0
    if FAST:
        level = tl.where(empty, m, top * LOG2E)
        rest = (m - level) * LN2
    return rest


@triton.jit
def level_of(top, FAST: tl.constexpr):
    """The level [BM] from which the exponents of rows are told: +inf for a row that sees nothing."""
    level = top * LOG2E if FAST else top
    return tl.where(top == float("-inf"), float("inf"), level)


@triton.jit
def kept(low, high, j, bound):
    """Which weights survive dropout, as regard.dropout.keep has it: bool [BM, BN] for row keys [BM]."""
    x = low[:, None] + (j.to(tl.uint32) * 0x9E3779B1)[None, :]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x + high[:, None]
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) * 0x7FEB352D
    return x.to(tl.int32, bitcast=True) >= bound


@triton.jit
def drop_keys(drop, l, h, heads, i, n):
    """The two halves of each row's key [BM], uint32."""
    key = tl.load(drop.keys + (l.to(tl.int64) * heads + h) * n + i, mask=i < n, other=0)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)
