"""Attention's forward pass: output, lse, largest logit and entropy of every row, in one walk over the keys.

    S = Q Kᵀ · scale        m: running max      l = Σ exp(S − m)      e = Σ exp(S − m)·(S − m)
    O = Σ exp(S − m) V      lse = m + ln l      entropy = ln l − e / l

One program holds BM rows of one head. It meets first the blocks that all of its rows see whole, then the others with
their mask. Exponentials are taken by exp2. FAST keeps S as raw products and multiplies once, inside the exponent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    _PLAIN,
    DEEP,
    LN2,
    LOG2E,
    LOWEST,
    additive,
    bias_rows,
    drop_keys,
    kept,
    load,
    logits,
    met,
    off_by,
    partial,
    seat,
    seats,
    shown,
    span_rows,
    visible_keys,
    whole_block,
)


@triton.jit
def fold(S, show, m, l, e, unit, ENTROPY: tl.constexpr, FAST: tl.constexpr, HIDES: tl.constexpr):
    """Fold logits S [BM, BN] into m, l, e [BM]: the weights P relative to the new max, and what rescales the past."""
    if HIDES:
        S = tl.where(show, S, float("-inf"))
    if FAST:
        m_new = tl.maximum(m, tl.max(S, 1) * unit)  # [BM] in log2 units
        T = S * unit - m_new[:, None]  # [BM, BN]
        down = m - m_new  # [BM]
    else:
        m_new = tl.maximum(m, tl.max(S, 1))  # [BM] in natural units
        T = (S - m_new[:, None]) * LOG2E
        down = (m - m_new) * LOG2E
    if HIDES:
        T = tl.maximum(T, DEEP)  # finite, so that P·T is 0 and not NaN
    down = tl.maximum(down, DEEP)
    P = tl.exp2(T)  # [BM, BN]
    a = tl.exp2(down)  # [BM]
    if ENTROPY:
        e = a * (e + down * l) + tl.sum(P * T, 1)
    l = a * l + tl.sum(P, 1)
    return P, m_new, l, e, a


@triton.jit
def meet(Q, q, k, v, item, h, kv_head, strides, O, m, l, e, i, j0, lo, hi, slot, at, keys, scale, unit, cap, bias, where, drop, vector, n, M,
         D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, ENTROPY: tl.constexpr,
         DROP: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
         PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys, j0 … j0 + BN."""
    j = j0 + tl.arange(0, BN)  # [BN]
    there = j < M
    if HIDDEN > 0:
        S = additive(q, k, vector, i, j, n, M, strides.q_row, strides.q_dim, strides.k_row, strides.k_dim, BM, BN, HIDDEN, APPROXIMATE)
    else:
        if TMA:
            K = k.load([item, kv_head, j0, 0]).reshape(BN, DP)
        else:
            K = load(k, j.to(tl.int64) * strides.k_row, there, D, strides.k_dim, DP, MASKED)  # [BN, DP]
        S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)  # [BM, BN]
    HIDES: tl.constexpr = MASKED or BIAS != _PLAIN
    show = j
    if not FAST:
        S, show = logits(S, scale, cap, bias, at, i, j, n, M, CAP, BIAS)
    if MASKED:
        # Asking S as well keeps the compiler from holding the mask of a whole tile while S is still being multiplied.
        masked = (S != float("-inf")) & shown(where, lo, hi, slot, i, j, MASK)
        show = masked if BIAS == _PLAIN else show & masked
    P, m, l, e, a = fold(S, show, m, l, e, unit, ENTROPY, FAST, HIDES)
    O = O * a[:, None]
    if DROP:
        P = tl.where(kept(keys[0], keys[1], j, drop.bound), P, 0.0)
    if TMA:
        V = v.load([item, kv_head, j0, 0]).reshape(BN, DVP)
    else:
        V = load(v, j.to(tl.int64) * strides.v_row, there, DV, strides.v_dim, DVP, MASKED)  # [BN, DVP]
    if HIDES:
        V = visible_keys(V, show, where, item, h, j, M, MASK, BIAS)
    O = tl.dot(P.to(V.dtype), V, O, input_precision=PRECISION)
    return O, m, l, e


@triton.jit
def walk(Q, q, k, v, item, h, kv_head, strides, i, lo, hi, at, keys, scale, unit, cap, bias, where, drop, vector, n, M, blocks_met,
         D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, ENTROPY: tl.constexpr,
         DROP: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr):
    """First the blocks that all rows see whole, then the partial ones."""
    first, full, until, rest = blocks_met
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    e = tl.zeros([BM], tl.float32)
    O = tl.zeros([BM, DVP], tl.float32)
    for t in range(full, until):
        b = whole_block(where, t, MASK)
        O, m, l, e = meet(Q, q, k, v, item, h, kv_head, strides, O, m, l, e, i, b * BN, lo, hi, 0, at, keys, scale, unit, cap, bias, where,
                          drop, vector, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST, ENTROPY, DROP, TMA, HIDDEN, APPROXIMATE,
                          PRECISION, False)
    for t in range(rest):
        b, slot = partial(where, t, first, full, until, MASK)
        O, m, l, e = meet(Q, q, k, v, item, h, kv_head, strides, O, m, l, e, i, b * BN, lo, hi, slot, at, keys, scale, unit, cap, bias, where,
                          drop, vector, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST, ENTROPY, DROP, TMA, HIDDEN, APPROXIMATE,
                          PRECISION, True)
    return O, m, l, e


@triton.jit(do_not_specialize=["n", "M", "where", "drop", "blocks", "heads", "groups"])
def forward(q, k, v, o, lse, row_max, log_row_sum, entropy, strides, scale, scales, cap, sinks, bias, where, drop, vector,
            n, M, blocks, heads, groups,
            D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, ENTROPY: tl.constexpr,
            DROP: tl.constexpr, SINK: tl.constexpr, SCALES: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr,
            APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr):
    """Program (block of rows, item and head); the last rows first, which under a causal mask have most to do."""
    block, own = seats(blocks)
    block = blocks - 1 - block
    h = own % heads
    item = own // heads
    kv_head = h // groups
    i = block * BM + tl.arange(0, BM)  # [BM]
    if SCALES:
        scale = tl.load(scales + h)
    unit = scale * LOG2E

    Q = i
    if TMA:
        Q = q.load([item, h, block * BM, 0]).reshape(BM, DP)
    else:
        q = q + item.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head
        k = k + item.to(tl.int64) * strides.k_item + kv_head.to(tl.int64) * strides.k_head
        v = v + item.to(tl.int64) * strides.v_item + kv_head.to(tl.int64) * strides.v_head
        if HIDDEN == 0:
            Q = load(q, i.to(tl.int64) * strides.q_row, i < n, D, strides.q_dim, DP, True)  # [BM, DP]

    at = bias_rows(bias, item, h, i, BIAS)
    lo, hi = span_rows(where, item, h, i, n, M, MASK)
    keys = (i, i)
    if DROP:
        keys = drop_keys(drop, item, h, heads, i, n)
    blocks_met = met(where, seat(where, item, h, MASK), block, tl.cdiv(M, BN), M // BN, MASK)
    O, m, l, e = walk(Q, q, k, v, item, h, kv_head, strides, i, lo, hi, at, keys, scale, unit, cap, bias, where, drop, vector, n, M,
                      blocks_met, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST, ENTROPY, DROP, TMA, HIDDEN, APPROXIMATE, PRECISION)

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    top = m * LN2 if FAST else m  # [BM] natural units
    whole = l
    if SINK:
        whole = l + tl.exp2((tl.load(sinks + h) - top) * LOG2E)  # the sink's share of the denominator
    O = O * (drop.factor / whole)[:, None] if DROP else O * (1.0 / whole)[:, None]
    d = tl.arange(0, DVP)
    out = o + item.to(tl.int64) * strides.o_item + h.to(tl.int64) * strides.o_head + i.to(tl.int64)[:, None] * strides.o_row + d[None, :]
    tl.store(out, O.to(o.dtype.element_ty), mask=(i < n)[:, None] & (d < DV)[None, :])
    row = (item.to(tl.int64) * heads + h) * n + i
    ln_l = tl.log2(l) * LN2
    above = ln_l + off_by(m, top, empty, FAST)
    tl.store(lse + row, tl.where(empty, float("-inf"), top + above), mask=i < n)
    tl.store(row_max + row, tl.where(empty, float("-inf"), top), mask=i < n)
    tl.store(log_row_sum + row, above, mask=i < n)
    if ENTROPY:
        tl.store(entropy + row, ln_l - e / l * LN2, mask=i < n)
