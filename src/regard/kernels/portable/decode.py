"""Few queries against many keys: all rows that share a key head in one tile, the keys split over the chip, then merged.

Each split leaves (m, l, e, O) of its keys; the merge rescales them to the common max, which is exact. The length of a
split depends on the number of keys alone, so a sequence's result does not depend on its batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import Sizes
from .aggregates import Head, Matrices
from .forward import online_softmax
from .program import at_head, head_logits, load_k, load_row_tile, load_v
from .tile_ops import (
    _BIAS_NONE,
    _NONE,
    DEEP,
    LN2,
    LOG2E,
    LOWEST,
    add_sink,
    dropout_keep,
    program_tile,
    row_max_residual,
    unaligned_mask_tile,
)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "length", "count", "key_blocks"])
def decode_split(q, k, v, partials, args, n, m, heads, groups, length, count, key_blocks, C: tl.constexpr):
    """Program (split, batch item and key head): row r of its tile is query r % n of the head's (r // n)-th query head.

    `partials.stats` holds m, l and e of all rows one after the other, `count` numbers each.
    """
    strides, score, blocks, dropout = args.strides, args.score, args.blocks, args.dropout
    sizes = Sizes(n, m, heads, groups)
    splits = tl.cdiv(m, length)
    part, owner = program_tile(splits)
    kv_heads = heads // groups
    kv_index = owner % kv_heads
    batch = owner // kv_heads
    r = tl.arange(0, C.BM)
    valid = r < groups * n
    i = tl.where(valid, r % n, n)  # [BM]
    index = kv_index * groups + tl.minimum(r // n, groups - 1)  # [BM]
    wide = batch.to(tl.int64)
    rows_of = q + wide * strides.q_batch + index.to(tl.int64) * strides.q_head
    d = tl.arange(0, C.DP)
    Q = tl.load(rows_of[:, None] + i[:, None] * strides.q_row + d[None, :] * strides.q_dim, mask=valid[:, None] & (d < C.D)[None, :], other=0.0)
    scale = score.scale
    if C.SCALES:
        scale = tl.load(score.scales + index)[:, None]  # [BM, 1]
    first_row = (wide * heads + index) * n  # [BM]
    head = Head(batch, index, kv_index, first_row, scale, scale * LOG2E, score, blocks, dropout, sizes)
    rows = load_row_tile(head, i, C, True)
    k = at_head(k, batch, kv_index, strides.k_batch, strides.k_head, C)
    v = at_head(v, batch, kv_index, strides.v_batch, strides.v_head, C)
    x = Matrices(q, k, v, None, strides, None)
    row_max = tl.full([C.BM], LOWEST, tl.float32)
    l = tl.zeros([C.BM], tl.float32)
    e = tl.zeros([C.BM], tl.float32)
    O = tl.zeros([C.BM, C.DVP], tl.float32)
    start = part * length
    stop = tl.minimum(start + length, m)
    if C.MASK != _NONE:
        some = rows.hi > rows.lo
        start = tl.maximum(start, tl.min(tl.where(some, rows.lo, m), 0) // C.BN * C.BN)
        stop = tl.minimum(stop, tl.max(tl.where(some, rows.hi, 0), 0))
    for j0 in range(start, stop, C.BN):
        j = j0 + tl.arange(0, C.BN)
        K = load_k(x, batch, kv_index, j0, m, C, True)
        S = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)  # [BM, BN]
        show = unaligned_mask_tile(blocks, batch, index, rows.lo, rows.hi, i, j, key_blocks, C.MASK)
        if not C.FAST:
            S, biased = head_logits(S, rows, j, head, C)
            if C.BIAS != _BIAS_NONE:
                show = show & biased
        P, row_max, l, e, a = online_softmax(S, show, row_max, l, e, head.unit, C, True)
        O = O * a[:, None]
        if C.DROP:
            P = tl.where(dropout_keep(rows.low_key, rows.high_key, j, dropout.bound), P, 0.0)
        V = load_v(x, batch, kv_index, j0, m, C, True)
        if C.MASK != _NONE or C.BIAS != _BIAS_NONE:  # a key that no row here attends to leaves no trace, not even a NaN
            V = tl.where((tl.max(show.to(tl.int32), 0) > 0)[:, None], V, 0.0)
        O = tl.dot(P.to(V.dtype), V, O, input_precision=C.PRECISION)
    at = ((wide * splits + part) * heads + index) * n + i  # [BM] of (L, splits, H, n)
    tl.store(partials.stats + at, row_max, mask=valid)
    tl.store(partials.stats + count + at, l, mask=valid)
    tl.store(partials.stats + 2 * count + at, e, mask=valid)
    d = tl.arange(0, C.DVP)
    tl.store(partials.output + at[:, None] * C.DV + d[None, :], O, mask=valid[:, None] & (d < C.DV)[None, :])


@triton.jit(do_not_specialize=["n", "heads", "splits", "count"])
def decode_merge(partials, out, strides, sinks, dropout, n, heads, splits, count, C: tl.constexpr):
    """One row: program (query, batch item and head)."""
    i, owner = program_tile(n)
    index = owner % heads
    batch = owner // heads
    wide = batch.to(tl.int64)
    s = tl.arange(0, C.SPLITS)
    UNIT: tl.constexpr = 1.0 if C.FAST else LOG2E
    at = ((wide * splits + s) * heads + index) * n + i  # [SPLITS]
    m = tl.load(partials.stats + at, mask=s < splits, other=LOWEST)
    l = tl.load(partials.stats + count + at, mask=s < splits, other=0.0)
    m_all = tl.max(m, 0)
    shift = tl.maximum((m - m_all) * UNIT, DEEP)  # [SPLITS]
    a = tl.exp2(shift)
    l_all = tl.sum(a * l, 0)
    empty = l_all == 0.0
    l_all = tl.where(empty, 1.0, l_all)
    row_max = m_all * LN2 if C.FAST else m_all
    d = tl.arange(0, C.DVP)
    O = tl.zeros([C.DVP], tl.float32)
    for t in range(splits):
        one = ((wide * splits + t) * heads + index) * n + i
        share = tl.sum(tl.where(s == t, a, 0.0), 0)
        O += share * tl.load(partials.output + one * C.DV + d, mask=d < C.DV, other=0.0)
    denominator = l_all
    if C.SINK:
        denominator = l_all + tl.exp2((tl.load(sinks + index) - row_max) * LOG2E)
    O = O * (dropout.factor / denominator)
    to = wide * strides.o_batch + index.to(tl.int64) * strides.o_head + i.to(tl.int64) * strides.o_row
    tl.store(out.output + to + d, O.to(out.output.dtype.element_ty), mask=d < C.DV)
    row = (wide * heads + index) * n + i
    ln_l = tl.log2(l_all) * LN2
    log_row_sum = ln_l + row_max_residual(m_all, row_max, empty, C.FAST)
    lse = tl.where(empty, float("-inf"), row_max + log_row_sum)
    entropy = ln_l
    if C.ENTROPY:
        e = tl.load(partials.stats + 2 * count + at, mask=s < splits, other=0.0)
        entropy = ln_l - tl.sum(a * (e + shift * l), 0) / l_all * LN2
    if C.SINK:
        lse, entropy, log_row_sum = add_sink(tl.load(sinks + index), lse, entropy, log_row_sum, empty)
    tl.store(out.lse + row, lse)
    tl.store(out.max_logit + row, tl.where(empty, float("-inf"), row_max))
    tl.store(out.log_row_sum + row, log_row_sum)
    if C.ENTROPY:
        tl.store(out.entropy + row, entropy)
