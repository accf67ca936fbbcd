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
from .program import head_logits, k_at, load_k, load_k_rest, load_row_tile, load_v, store_statistics, v_at
from .tile_ops import (
    _BIAS_NONE,
    _NONE,
    LN2,
    LOG2E,
    LOWEST,
    clamp_exponent,
    dropout_keep,
    program_tile,
    unaligned_mask_tile,
)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "length", "count", "key_blocks"])
def decode_split(q, k, v, partials, args, n, m, heads, groups, length, count, key_blocks, C: tl.constexpr):
    """Program (split, tile of rows, batch item and key head): row r is query r % n of the key head's (r // n)-th query head.

    `partials.stats` holds m, l and e of all rows one after the other, `count` numbers each.
    """
    strides, score, blocks, dropout = args.strides, args.score, args.blocks, args.dropout
    sizes = Sizes(n, m, heads, groups)
    splits = tl.cdiv(m, length)
    part, owner = program_tile(splits)
    tiles = tl.cdiv(groups * n, C.BM)
    tile, owner = owner % tiles, owner // tiles
    kv_heads = heads // groups
    kv_index = owner % kv_heads
    batch = owner // kv_heads
    r = tile * C.BM + tl.arange(0, C.BM)
    valid = r < groups * n
    i = tl.where(valid, r % n, n)  # [BM]
    index = kv_index * groups + tl.minimum(r // n, groups - 1)  # [BM]
    wide = batch.to(tl.int64)
    rows_of = q + wide * strides.q_batch + index.to(tl.int64) * strides.q_head
    d = tl.arange(0, C.DP)
    Q = tl.load(rows_of[:, None] + i[:, None] * strides.q_row + d[None, :] * strides.q_dim, mask=valid[:, None] & (d < C.D)[None, :], other=0.0)
    QR = Q
    if C.DR > 0:
        d = C.DP + tl.arange(0, C.DR)
        QR = tl.load(rows_of[:, None] + i[:, None] * strides.q_row + d[None, :] * strides.q_dim, mask=valid[:, None] & (d < C.D)[None, :], other=0.0)
    scale = score.scale
    if C.SCALES:
        scale = tl.load(score.scales + index)[:, None]  # [BM, 1]
    first_row = (wide * heads + index) * n  # [BM]
    head = Head(batch, index, kv_index, first_row, scale, scale * LOG2E, score, blocks, dropout, sizes)
    rows = load_row_tile(head, i, C, True)
    x = Matrices(None, k_at(k, head, strides, C), v_at(v, head, strides, C), None, strides, None)
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
        K = load_k(x, head, j0, C, True)
        S = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)  # [BM, BN]
        if C.DR > 0:
            S = tl.dot(QR, tl.trans(load_k_rest(x, j, m, C)), S, input_precision=C.PRECISION)
        show = unaligned_mask_tile(blocks, batch, index, rows.lo, rows.hi, i, j, key_blocks, C.MASK)
        if not C.FAST:
            S, biased = head_logits(S, rows, j, head, C)
            if C.BIAS != _BIAS_NONE:
                show = show & biased
        P, row_max, l, e, a, _, _ = online_softmax(S, show, row_max, l, e, head.unit, C, True)
        O = O * a[:, None]
        if C.DROP:
            P = tl.where(dropout_keep(rows.low_key, rows.high_key, j, dropout.bound), P, 0.0)
        V = load_v(x, head, j0, C, True)
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
    shift = clamp_exponent((m - m_all) * UNIT)  # [SPLITS]
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
    e = l_all
    if C.ENTROPY:
        e = tl.load(partials.stats + 2 * count + at, mask=s < splits, other=0.0)
        e = tl.sum(a * (e + shift * l), 0)
    store_statistics(out, (wide * heads + index) * n + i, None, m_all, row_max, l_all, e, empty, sinks, index, C)
