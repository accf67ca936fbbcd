"""Few queries against many keys: all rows that share a key head in one tile, the keys split over the chip, then merged.

Each split leaves (m, l, e, O) of its keys; the merge rescales them to the common max, which is exact. The length of a
split follows the number of keys alone, so a sequence's result does not depend on its batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import fold
from .tile_ops import (
    _NONE,
    _PLAIN,
    DEEP,
    LN2,
    LOG2E,
    LOWEST,
    bias_rows,
    drop_keys,
    kept,
    load,
    logits,
    off_by,
    seats,
    shown_anywhere,
    span_rows,
)


@triton.jit(do_not_specialize=["n", "M", "length", "count", "key_blocks", "where", "drop", "heads", "groups"])
def split(q, k, v, parts, facts, strides, scale, scales, cap, bias, where, drop, n, M, length, count, key_blocks, heads, groups,
          D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
          MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, ENTROPY: tl.constexpr,
          DROP: tl.constexpr, SCALES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):
    """Program (split, item and key head): row r of its tile is query r % n of the head's (r // n)-th query head.

    `facts` holds m, l and e of all rows one after the other, `count` numbers each.
    """
    splits = tl.cdiv(M, length)
    part, own = seats(splits)
    kv_heads = heads // groups
    kv_head = own % kv_heads
    item = own // kv_heads
    r = tl.arange(0, BM)
    ours = r < groups * n
    i = tl.where(ours, r % n, n)  # [BM]
    h = kv_head * groups + tl.minimum(r // n, groups - 1)  # [BM]
    wide = item.to(tl.int64)
    rows = q + wide * strides.q_item + h.to(tl.int64) * strides.q_head
    d = tl.arange(0, DP)
    Q = tl.load(rows[:, None] + i[:, None] * strides.q_row + d[None, :] * strides.q_dim, mask=ours[:, None] & (d < D)[None, :], other=0.0)
    if SCALES:
        scale = tl.load(scales + h)[:, None]  # [BM, 1]
    unit = scale * LOG2E
    at = bias_rows(bias, item, h, i, BIAS)
    lo, hi = span_rows(where, item, h, i, n, M, MASK)
    keys = (i, i)
    if DROP:
        keys = drop_keys(drop, item, h, heads, i, n)
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    e = tl.zeros([BM], tl.float32)
    O = tl.zeros([BM, DVP], tl.float32)
    if not TMA:
        k += wide * strides.k_item + kv_head.to(tl.int64) * strides.k_head
        v += wide * strides.v_item + kv_head.to(tl.int64) * strides.v_head
    start = part * length
    stop = tl.minimum(start + length, M)
    if MASK != _NONE:
        some = hi > lo
        start = tl.maximum(start, tl.min(tl.where(some, lo, M), 0) // BN * BN)
        stop = tl.minimum(stop, tl.max(tl.where(some, hi, 0), 0))
    for j0 in range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        if TMA:
            K = k.load([item, kv_head, j0, 0]).reshape(BN, DP)
        else:
            K = load(k, j.to(tl.int64) * strides.k_row, j < M, D, strides.k_dim, DP, True)  # [BN, DP]
        S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)  # [BM, BN]
        show = shown_anywhere(where, item, h, lo, hi, i, j, key_blocks, MASK)
        if not FAST:
            S, biased = logits(S, scale, cap, bias, at, i, j, n, M, CAP, BIAS)
            if BIAS != _PLAIN:
                show = show & biased
        P, m, l, e, a = fold(S, show, m, l, e, unit, ENTROPY, FAST, True)
        O = O * a[:, None]
        if DROP:
            P = tl.where(kept(keys[0], keys[1], j, drop.bound), P, 0.0)
        if TMA:
            V = v.load([item, kv_head, j0, 0]).reshape(BN, DVP)
        else:
            V = load(v, j.to(tl.int64) * strides.v_row, j < M, DV, strides.v_dim, DVP, True)  # [BN, DVP]
        if MASK != _NONE or BIAS != _PLAIN:  # a key that no row here sees leaves no trace, not even a NaN
            V = tl.where((tl.max(show.to(tl.int32), 0) > 0)[:, None], V, 0.0)
        O = tl.dot(P.to(V.dtype), V, O, input_precision=PRECISION)
    row = ((wide * splits + part) * heads + h) * n + i  # [BM] of (L, splits, H, n)
    tl.store(facts + row, m, mask=ours)
    tl.store(facts + count + row, l, mask=ours)
    tl.store(facts + 2 * count + row, e, mask=ours)
    d = tl.arange(0, DVP)
    tl.store(parts + row[:, None] * DV + d[None, :], O, mask=ours[:, None] & (d < DV)[None, :])


@triton.jit(do_not_specialize=["n", "splits", "count", "drop", "heads"])
def merge(parts, facts, o, lse, row_max, log_row_sum, entropy, strides, sinks, drop, n, splits, count, heads,
          DV: tl.constexpr, DVP: tl.constexpr, SP: tl.constexpr, FAST: tl.constexpr, ENTROPY: tl.constexpr,
          DROP: tl.constexpr, SINK: tl.constexpr):
    """One row: program (query, item and head)."""
    i, own = seats(n)
    h = own % heads
    item = own // heads
    s = tl.arange(0, SP)
    UNIT: tl.constexpr = 1.0 if FAST else LOG2E
    row = ((item.to(tl.int64) * splits + s) * heads + h) * n + i  # [SP]
    m = tl.load(facts + row, mask=s < splits, other=LOWEST)
    l = tl.load(facts + count + row, mask=s < splits, other=0.0)
    m_all = tl.max(m, 0)
    down = tl.maximum((m - m_all) * UNIT, DEEP)  # [SP]
    a = tl.exp2(down)
    l_all = tl.sum(a * l, 0)
    empty = l_all == 0.0
    l_all = tl.where(empty, 1.0, l_all)
    top = m_all * LN2 if FAST else m_all
    d = tl.arange(0, DVP)
    O = tl.zeros([DVP], tl.float32)
    for t in range(splits):
        one = ((item.to(tl.int64) * splits + t) * heads + h) * n + i
        share = tl.sum(tl.where(s == t, a, 0.0), 0)
        O += share * tl.load(parts + one * DV + d, mask=d < DV, other=0.0)
    whole = l_all
    if SINK:
        whole = l_all + tl.exp2((tl.load(sinks + h) - top) * LOG2E)
    O = O * (drop.factor / whole)
    tl.store(o + item.to(tl.int64) * strides.o_item + h.to(tl.int64) * strides.o_head + i.to(tl.int64) * strides.o_row + d, O.to(o.dtype.element_ty), mask=d < DV)
    at = (item.to(tl.int64) * heads + h) * n + i
    ln_l = tl.log2(l_all) * LN2
    above = ln_l + off_by(m_all, top, empty, FAST)
    tl.store(lse + at, tl.where(empty, float("-inf"), top + above))
    tl.store(row_max + at, tl.where(empty, float("-inf"), top))
    tl.store(log_row_sum + at, above)
    if ENTROPY:
        e = tl.load(facts + 2 * count + row, mask=s < splits, other=0.0)
        tl.store(entropy + at, ln_l - tl.sum(a * (e + down * l), 0) / l_all * LN2)
