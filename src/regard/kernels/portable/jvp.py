"""Attention's tangent in one pass with its output: the same running max serves both.

With t = dS the tangent of the logits, and everything relative to the running max m as in the forward pass:

    u = Σ exp(S − m)·t        A = Σ exp(S − m)·(t V + dV)        c = Σ exp(S − m)·t·(S − m)
    d lse = u / l             dO = A / l − (u / l)·O             d entropy = −(c / l − (u / l)·(e / l)) = −Cov_p(t, S)

t = scale·(dQ·K + Q·dK), then through the cap, plus the bias's own tangent. What stands still costs nothing: MOVES says
which of queries, keys, values, scales and bias have a tangent.
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
    bias_rows,
    bias_tile,
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
    tanh,
    visible_keys,
    whole_block,
)


@triton.jit
def moved_logits(raw, T, scale, d_scale, cap, d_bias, d_at, i, j, n, M, SCALES: tl.constexpr, CAP: tl.constexpr, BIAS: tl.constexpr):
    """The tangent t [BM, BN] of the logits, from products `raw` and their tangent T; BIAS is 0 if the bias stands still."""
    t = T * scale
    if SCALES:
        t += raw * d_scale
    if CAP:
        th = tanh(raw * scale / cap)
        t = t * (1.0 - th * th)
    if BIAS != _PLAIN:
        t += bias_tile(d_bias, d_at, i, j, n, M, BIAS)
    return t


@triton.jit
def fold(S, t, show, m, l, e, u, c, unit, ENTROPY: tl.constexpr, FAST: tl.constexpr, HIDES: tl.constexpr):
    """Fold logits S and their tangent t [BM, BN] into m, l, e, u, c [BM]: P, P∘t, and what rescales the past."""
    if HIDES:
        S = tl.where(show, S, float("-inf"))
        t = tl.where(show, t, 0.0)
    if FAST:
        m_new = tl.maximum(m, tl.max(S, 1) * unit)  # [BM] in log2 units
        X = S * unit - m_new[:, None]  # [BM, BN]
        down = m - m_new
    else:
        m_new = tl.maximum(m, tl.max(S, 1))  # [BM] in natural units
        X = (S - m_new[:, None]) * LOG2E
        down = (m - m_new) * LOG2E
    if HIDES:
        X = tl.maximum(X, DEEP)  # finite, so that P·X is 0 and not NaN
    down = tl.maximum(down, DEEP)
    P = tl.exp2(X)  # [BM, BN]
    a = tl.exp2(down)  # [BM]
    Pt = P * t
    if ENTROPY:
        e = a * (e + down * l) + tl.sum(P * X, 1)
        c = a * (c + down * u) + tl.sum(Pt * X, 1)
    l = a * l + tl.sum(P, 1)
    u = a * u + tl.sum(Pt, 1)
    return P, Pt, m_new, l, e, u, c, a


@triton.jit
def meet(Q, dQ, k, v, dk, dv, item, h, kv_head, strides, moves, O, A, m, l, e, u, c, i, j0, lo, hi, slot, at, d_at, keys, scale, d_scale,
         unit, cap, bias, d_bias, where, drop, n, M,
         D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, ENTROPY: tl.constexpr,
         DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, MOVES_Q: tl.constexpr, MOVES_K: tl.constexpr,
         MOVES_V: tl.constexpr, MOVES_SCALES: tl.constexpr, MOVES_BIAS: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys, j0 … j0 + BN."""
    j = j0 + tl.arange(0, BN)  # [BN]
    wide = j.to(tl.int64)
    there = j < M
    if TMA:
        K = k.load([item, kv_head, j0, 0]).reshape(BN, DP)
    else:
        K = load(k, wide * strides.k_row, there, D, strides.k_dim, DP, MASKED)  # [BN, DP]
    S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)  # [BM, BN]
    T = tl.zeros([BM, BN], tl.float32)
    if MOVES_Q:
        T = tl.dot(dQ, tl.trans(K), T, input_precision=PRECISION)
    if MOVES_K:
        if TMA:
            dK = dk.load([item, kv_head, j0, 0]).reshape(BN, DP)
        else:
            dK = load(dk, wide * moves.k_row, there, D, moves.k_dim, DP, MASKED)
        T = tl.dot(Q, tl.trans(dK), T, input_precision=PRECISION)
    HIDES: tl.constexpr = MASKED or BIAS != _PLAIN
    show = j
    t = moved_logits(S, T, scale, d_scale, cap, d_bias, d_at, i, j, n, M, MOVES_SCALES, CAP, MOVES_BIAS)
    if not FAST:
        S, show = logits(S, scale, cap, bias, at, i, j, n, M, CAP, BIAS)
    if MASKED:
        masked = (S != float("-inf")) & shown(where, lo, hi, slot, i, j, MASK)
        show = masked if BIAS == _PLAIN else show & masked
    P, Pt, m, l, e, u, c, a = fold(S, t, show, m, l, e, u, c, unit, ENTROPY, FAST, HIDES)
    O = O * a[:, None]
    A = A * a[:, None]
    if DROP:
        keep = kept(keys[0], keys[1], j, drop.bound)
        P = tl.where(keep, P, 0.0)
        Pt = tl.where(keep, Pt, 0.0)
    if TMA:
        V = v.load([item, kv_head, j0, 0]).reshape(BN, DVP)
    else:
        V = load(v, wide * strides.v_row, there, DV, strides.v_dim, DVP, MASKED)  # [BN, DVP]
    if HIDES:
        V = visible_keys(V, show, where, item, h, j, M, MASK, BIAS)
    P = P.to(V.dtype)
    O = tl.dot(P, V, O, input_precision=PRECISION)
    A = tl.dot(Pt.to(V.dtype), V, A, input_precision=PRECISION)
    if MOVES_V:
        if TMA:
            dV = dv.load([item, kv_head, j0, 0]).reshape(BN, DVP)
        else:
            dV = load(dv, wide * moves.v_row, there, DV, moves.v_dim, DVP, MASKED)
        if HIDES:
            dV = visible_keys(dV, show, where, item, h, j, M, MASK, BIAS)
        A = tl.dot(P, dV, A, input_precision=PRECISION)
    return O, A, m, l, e, u, c


@triton.jit(do_not_specialize=["n", "M", "where", "drop", "blocks", "heads", "groups"])
def push(q, k, v, dq, dk, dv, o, lse, row_max, log_row_sum, entropy, d_o, d_lse, d_entropy, strides, moves, scale, scales, d_scales, cap, bias, d_bias,
         where, drop, n, M, blocks, heads, groups,
         D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, ENTROPY: tl.constexpr,
         DROP: tl.constexpr, SCALES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, MOVES_Q: tl.constexpr,
         MOVES_K: tl.constexpr, MOVES_V: tl.constexpr, MOVES_SCALES: tl.constexpr, MOVES_BIAS: tl.constexpr):
    """Program (block of rows, item and head), as in the forward pass; a sink is not seen here."""
    block, own = seats(blocks)
    block = blocks - 1 - block
    h = own % heads
    item = own // heads
    kv_head = h // groups
    i = block * BM + tl.arange(0, BM)  # [BM]
    wide = i.to(tl.int64)
    d_scale = scale * 0.0
    if SCALES:
        scale = tl.load(scales + h)
    if MOVES_SCALES:
        d_scale = tl.load(d_scales + h)
    unit = scale * LOG2E
    if TMA:
        Q = q.load([item, h, block * BM, 0]).reshape(BM, DP)
        dQ = Q
        if MOVES_Q:
            dQ = dq.load([item, h, block * BM, 0]).reshape(BM, DP)
    else:
        q = q + item.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head
        k = k + item.to(tl.int64) * strides.k_item + kv_head.to(tl.int64) * strides.k_head
        v = v + item.to(tl.int64) * strides.v_item + kv_head.to(tl.int64) * strides.v_head
        Q = load(q, wide * strides.q_row, i < n, D, strides.q_dim, DP, True)  # [BM, DP]
        dQ = Q
        if MOVES_Q:
            dq = dq + item.to(tl.int64) * moves.q_item + h.to(tl.int64) * moves.q_head
            dQ = load(dq, wide * moves.q_row, i < n, D, moves.q_dim, DP, True)
        if MOVES_K:
            dk = dk + item.to(tl.int64) * moves.k_item + kv_head.to(tl.int64) * moves.k_head
        if MOVES_V:
            dv = dv + item.to(tl.int64) * moves.v_item + kv_head.to(tl.int64) * moves.v_head
    at = bias_rows(bias, item, h, i, BIAS)
    d_at = bias_rows(d_bias, item, h, i, MOVES_BIAS)
    lo, hi = span_rows(where, item, h, i, n, M, MASK)
    keys = (i, i)
    if DROP:
        keys = drop_keys(drop, item, h, heads, i, n)
    first, full, until, rest = met(where, seat(where, item, h, MASK), block, tl.cdiv(M, BN), M // BN, MASK)
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    e, u, c = l, l, l
    O = tl.zeros([BM, DVP], tl.float32)
    A = tl.zeros([BM, DVP], tl.float32)
    for b_at in range(full, until):
        b = whole_block(where, b_at, MASK)
        O, A, m, l, e, u, c = meet(Q, dQ, k, v, dk, dv, item, h, kv_head, strides, moves, O, A, m, l, e, u, c, i, b * BN, lo, hi, 0, at, d_at, keys,
                                   scale, d_scale, unit, cap, bias, d_bias, where, drop, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST,
                                   ENTROPY, DROP, TMA, PRECISION, MOVES_Q, MOVES_K, MOVES_V, MOVES_SCALES, MOVES_BIAS, False)
    for b_at in range(rest):
        b, slot = partial(where, b_at, first, full, until, MASK)
        O, A, m, l, e, u, c = meet(Q, dQ, k, v, dk, dv, item, h, kv_head, strides, moves, O, A, m, l, e, u, c, i, b * BN, lo, hi, slot, at, d_at, keys,
                                   scale, d_scale, unit, cap, bias, d_bias, where, drop, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST,
                                   ENTROPY, DROP, TMA, PRECISION, MOVES_Q, MOVES_K, MOVES_V, MOVES_SCALES, MOVES_BIAS, True)

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    top = m * LN2 if FAST else m  # [BM] natural units
    u = u / l
    factor = drop.factor / l if DROP else 1.0 / l
    O = O * factor[:, None]
    A = A * factor[:, None] - u[:, None] * O
    d = tl.arange(0, DVP)
    here = (i < n)[:, None] & (d < DV)[None, :]
    to = item.to(tl.int64) * strides.o_item + h.to(tl.int64) * strides.o_head + wide[:, None] * strides.o_row + d[None, :]
    tl.store(o + to, O.to(o.dtype.element_ty), mask=here)
    tl.store(d_o + to, A.to(d_o.dtype.element_ty), mask=here)
    row = (item.to(tl.int64) * heads + h) * n + i
    ln_l = tl.log2(l) * LN2
    above = ln_l + off_by(m, top, empty, FAST)
    tl.store(lse + row, tl.where(empty, float("-inf"), top + above), mask=i < n)
    tl.store(row_max + row, tl.where(empty, float("-inf"), top), mask=i < n)
    tl.store(log_row_sum + row, above, mask=i < n)
    tl.store(d_lse + row, u, mask=i < n)
    if ENTROPY:
        tl.store(entropy + row, ln_l - e / l * LN2, mask=i < n)
        tl.store(d_entropy + row, (u * e - c) / l * LN2, mask=i < n)
