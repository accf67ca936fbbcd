"""What all kernels do to a tile of logits S [BM, BN]: scale, cap, bias, mask, dropout. In Triton; shapes in brackets."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import BIAS_ALIBI, BIAS_NONE, BIAS_TENSOR
from ..block_lists import BITS, MULTIPLE, NONE, SPANS

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
DEEP = tl.constexpr(-1e4)  # exp2(−1e4) is 0, and products with it stay finite
PACK = tl.constexpr(128)  # rows that a program packs; packed heads are padded to a multiple, so that no reader asks where rows end
_NONE, _SPANS, _BITS, _MULTIPLE = tl.constexpr(NONE), tl.constexpr(SPANS), tl.constexpr(BITS), tl.constexpr(MULTIPLE)
_BIAS_NONE, _BIAS_TENSOR, _BIAS_ALIBI = tl.constexpr(BIAS_NONE), tl.constexpr(BIAS_TENSOR), tl.constexpr(BIAS_ALIBI)


@triton.jit
def clamp_exponent(x):
    """Exponents of 2, at least DEEP, where exp2 is 0; NaN stays NaN, so that one that a row sees reaches its results."""
    return tl.maximum(x, DEEP, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def program_tile(count):
    """Which of `count` blocks a program has, and which batch item and head."""
    return tl.program_id(0) % count, tl.program_id(0) // count


@triton.jit
def load_rows(x, at, valid, width: tl.constexpr, stride, PADDED: tl.constexpr, GUARDED: tl.constexpr):
    """The rows of a matrix at offsets `at` [R]: [R, PADDED], with zeros for rows that are not valid and beyond `width`."""
    d = tl.arange(0, PADDED).to(tl.int64)
    at = x + at[:, None] + d[None, :] * stride  # [R, PADDED]
    if PADDED != width:
        X = tl.load(at, mask=valid[:, None] & (d < width)[None, :], other=0.0)
    elif GUARDED:
        X = tl.load(at, mask=valid[:, None], other=0.0)
    else:
        X = tl.load(at)
    return X


@triton.jit
def read_four(at, PTX: tl.constexpr):
    """The four float32 from each address on, which is a multiple of 16. No kernel writes them while it runs.

    Triton stages loads of a loop in shared memory, each thread all that it needs itself; an instruction of its own reads four at once.
    """
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [at.to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return a, b, c, d


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
def bias_row_pointers(bias, batch, head, i, BIAS: tl.constexpr):
    """Pointers [BM] to the biases of each row; for a structured bias one to its slope or table, unless rows differ in head."""
    at = i
    if BIAS != _BIAS_NONE:
        at = bias.at + head.to(tl.int64) * bias.head + batch.to(tl.int64) * bias.item
    if BIAS == _BIAS_TENSOR:
        at += i.to(tl.int64) * bias.row
    return at


@triton.jit
def bias_tile(bias, at, i, j, n, m, BIAS: tl.constexpr):
    """What a bias adds to the logits, [BM, BN]."""
    if BIAS == _BIAS_TENSOR:
        added = tl.load(at[:, None] + j[None, :].to(tl.int64) * bias.key, mask=(i < n)[:, None] & (j < m)[None, :], other=0.0).to(tl.float32)
    elif BIAS == _BIAS_ALIBI:
        slope = tl.load(at) + (i * 0).to(tl.float32)  # [BM]
        added = -slope[:, None] * tl.abs(i[:, None] + bias.offset - j[None, :]).to(tl.float32)
    else:
        ahead = j[None, :] - (i[:, None] + bias.offset)
        added = tl.load((at + i * 0)[:, None] + tl.minimum(tl.maximum(ahead, -bias.reach), bias.reach) + bias.reach)
    return added


@triton.jit
def logits(S, scale, cap, bias, at, i, j, n, m, CAP: tl.constexpr, BIAS: tl.constexpr):
    """Scale, cap and bias products [BM, BN]; and which pairs the bias leaves visible, if there is one."""
    S = S * scale
    if CAP:
        S = cap * tanh(S / cap)
    show = i
    if BIAS != _BIAS_NONE:
        added = bias_tile(bias, at, i, j, n, m, BIAS)
        S += added
        show = (added != float("-inf")) & (i < n)[:, None]  # by the bias and not by S, which a hidden key may make NaN
    return S, show


@triton.jit
def mask_item(blocks, batch):
    """Which item of the mask a batch item has."""
    return batch // (blocks.inner // _MULTIPLE)


@triton.jit
def row_spans(blocks, batch, head, i, n, m, MASK: tl.constexpr):
    """The spans of keys [BM] that rows i attend to; no keys for rows beyond the last."""
    if MASK == _SPANS:
        at = mask_item(blocks, batch).to(tl.int64) * blocks.item + head * blocks.head + i
        lo, hi = tl.load(blocks.lo + at, mask=i < n, other=0), tl.load(blocks.hi + at, mask=i < n, other=0)
    else:
        lo, hi = i * 0, tl.where(i < n, m, 0)
    return lo, hi


@triton.jit
def mask_tile(blocks, lo, hi, slot, i, j, MASK: tl.constexpr):
    """Which pairs of a tile the mask shows: bool [BM, BN]. `slot` is that of the bits of its block."""
    if MASK == _BITS:
        at = blocks.bits + slot.to(tl.int64) * 512 + (i % 128) * 4  # [BM]
        which = ((j % 128) // 32)[None, :]  # [1, BN]: the word of its row that holds a key's bit
        low = tl.where(which == 0, tl.load(at)[:, None], tl.load(at + 1)[:, None])
        high = tl.where(which == 2, tl.load(at + 2)[:, None], tl.load(at + 3)[:, None])
        show = ((tl.where(which < 2, low, high) >> (j % 32)[None, :]) & 1) != 0  # [BM, BN]
    else:
        show = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
    return show


@triton.jit
def select_in_spans(a, b, j, lo, hi, other, PTX: tl.constexpr):
    """Two tiles, with `other` where a key j is not in its row's span; all broadcast to one another.

    A mask that is a tensor takes the compiler a register per pair to hold, or several instructions to pack.
    """
    if PTX:
        a, b = tl.inline_asm_elementwise(
            "{ .reg .pred in; setp.ge.s32 in, $4, $5; setp.lt.and.s32 in, $4, $6, in; selp.f32 $0, $2, $7, in; selp.f32 $1, $3, $7, in; }",
            "=&f,=&f,f,f,r,r,r,f", [a, b, j, lo, hi, other], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        inside = (j >= lo) & (j < hi)
        a, b = tl.where(inside, a, other), tl.where(inside, b, other)
    return a, b


@triton.jit
def unaligned_mask_tile(blocks, batch, head, lo, hi, i, j, key_blocks, MASK: tl.constexpr):
    """Which pairs the mask shows, for tiles that are not aligned to the blocks of the lists: bool [BM, BN]."""
    if MASK == _BITS:
        at = mask_item(blocks, batch).to(tl.int64) * blocks.table_item + head * blocks.table_head + (i // 128) * key_blocks  # [BM]
        inside = (hi > 0)[:, None] & (j < key_blocks * 128)[None, :]
        slot = tl.load(blocks.table + at[:, None] + (j // 128)[None, :], mask=inside, other=-1)  # [BM, BN]
        at = tl.maximum(slot, 0).to(tl.int64) * 512 + (i % 128)[:, None] * 4 + ((j % 128) // 32)[None, :]
        show = (((tl.load(blocks.bits + at) >> (j % 32)[None, :]) & 1) != 0) & (slot >= 0)
    else:
        show = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
    return show


@triton.jit
def zero_hidden_keys(X, show, blocks, batch, head, j, m, MASK: tl.constexpr, BIAS: tl.constexpr):
    """Keys or values X [BN, …] of a tile, with zeros for those that no row may attend to, which may be NaN.

    A mask says so for all rows; with a bias, whose −inf hide too, the rows of the tile do.
    """
    if BIAS != _BIAS_NONE:
        X = tl.where((tl.max(show.to(tl.int32), 0) > 0)[:, None], X, 0.0)
    elif MASK != _NONE:
        at = mask_item(blocks, batch).to(tl.int64) * blocks.seen_item + head * blocks.seen_head
        X = tl.where((tl.load(blocks.seen + at + j, mask=j < m, other=0) != 0)[:, None], X, 0.0)
    return X


@triton.jit
def block_list_start(blocks, batch, head, MASK: tl.constexpr):
    """Where the lists of a batch item and head begin in `bounds` or `start`."""
    at = 0
    if MASK != _NONE:
        at = mask_item(blocks, batch) * blocks.block_item + head * blocks.block_head
    return at


@triton.jit
def block_range(blocks, at, block, count, whole, MASK: tl.constexpr):
    """The blocks that a block needs: (first partial, first full, end of the full, number of partial).

    Without a mask the first `whole` of `count` are full. With lists, the numbers are places in these.
    """
    if MASK == _NONE:
        first, full, full_end, partials = 0, 0, whole, count - whole
    elif MASK == _SPANS:
        at = blocks.bounds + at + block * 4
        first, full, full_end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        partials = tl.load(at + 3) - first - (full_end - full)
    else:
        at += block
        first = tl.load(blocks.start + at)
        full, full_end, partials = tl.load(blocks.full_start + at), tl.load(blocks.full_start + at + 1), tl.load(blocks.start + at + 1) - first
    return first, full, full_end, partials


@triton.jit
def full_block(blocks, t, MASK: tl.constexpr):
    """The t-th full block."""
    b = t
    if MASK == _BITS:
        b = tl.load(blocks.full_entry + t)
    return b


@triton.jit
def partial_block(blocks, t, first, full, full_end, MASK: tl.constexpr):
    """The t-th partial block, and the slot of its bits."""
    if MASK == _BITS:
        block, slot = tl.load(blocks.entry + first + t), tl.load(blocks.slot + first + t)
    else:
        block, slot = tl.where(t < full - first, first + t, full_end + t - (full - first)), 0
    return block, slot


@triton.jit
def add_sink(sink, lse, entropy, log_row_sum, empty):
    """lse, entropy and log row sum of rows with one more logit in the denominator; a row without a key has the sink alone."""
    above = sink - lse
    left = -tl.maximum(above, 0.0) - tl.log2(1.0 + tl.exp2(-tl.abs(above) * LOG2E)) * LN2  # the log of the keys' share
    lse = tl.where(empty, sink, lse - left)
    entropy = tl.where(empty, 0.0, tl.exp2(left * LOG2E) * (entropy - left))
    return lse, entropy, tl.where(empty, 0.0, log_row_sum - left)


@triton.jit
def row_max_residual(m, row_max, empty, FAST: tl.constexpr):
    """By how much the m of a kernel exceeds the row max that it stores, [BM] in natural units: by rounding, or if m is lazy.

    Readers take row_max · log2 e, rounded, for m, so the stored log row sum is relative to that. The select keeps a
    compiler from fusing the product with the difference, which would leave it unrounded.
    """
    rest = m * 0.0
    if FAST:
        stored = tl.where(empty, m, row_max * LOG2E)
        rest = (m - stored) * LN2
    return rest


@triton.jit
def row_offset(row_max, FAST: tl.constexpr):
    """What is subtracted from the logits of rows [BM], in their units: +inf for a row that attends to nothing."""
    offset = row_max * LOG2E if FAST else row_max
    return tl.where(row_max == float("-inf"), float("inf"), offset)


@triton.jit
def dropout_keep(low, high, j, bound):
    """Which weights dropout keeps, as in regard.core.dropout.keep: bool [BM, BN] for row keys [BM]."""
    x = low[:, None] + (j.to(tl.uint32) * 0x9E3779B1)[None, :]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x + high[:, None]
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) * 0x7FEB352D
    return x.to(tl.int32, bitcast=True) >= bound


@triton.jit
def dropout_row_keys(dropout, batch, head, heads, i, n):
    """The two halves of each row's key [BM], uint32."""
    key = tl.load(dropout.keys + (batch.to(tl.int64) * heads + head) * n + i, mask=i < n, other=0)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)
