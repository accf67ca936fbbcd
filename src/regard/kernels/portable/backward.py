"""Attention's backward pass, by recomputation, without atomics: the same bits every time.

With P = exp(S − lse), dP = dO Vᵀ and δ = Σ dO ∘ O − g_lse of each row, the derivatives through output, lse and entropy
fold into one matrix:

    dS = P ∘ (dP − δ − g_H · (S − mean)),   dV = Pᵀ dO,   dQ = scale · dS K,   dK = scale · dSᵀ Q

where mean = E_p[S] (less the sink's share). `keys` holds BN keys and walks over rows; `queries` holds BM rows and walks
over keys. Tiles of `keys` are turned, Sᵀ [BN, BM], so that Pᵀ and dSᵀ multiply from registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    _NONE,
    _PLAIN,
    DEEP,
    LN2,
    LOG2E,
    additive,
    bias_rows,
    drop_keys,
    kept,
    level_of,
    load,
    logits,
    met,
    partial,
    quick_tanh,
    seat,
    seats,
    shown,
    span_rows,
    tanh,
    visible_keys,
    whole_block,
)


@triton.jit(do_not_specialize=["n", "heads"])
def prepare(o, do, g_lse, row_max, log_row_sum, delta, level, strides, do_item, do_head, do_row, do_dim, n, heads,
            DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, LSE: tl.constexpr,
            FAST: tl.constexpr):
    """δ = Σ dO ∘ O − g_lse, and lse as exponents are told from it (+inf where nothing is seen): [BM] for each block of rows."""
    block, own = seats(tl.cdiv(n, BM))
    h = own % heads
    item = own // heads
    i = block * BM + tl.arange(0, BM)
    wide = i.to(tl.int64)
    O = load(o + item.to(tl.int64) * strides.o_item + h.to(tl.int64) * strides.o_head, wide * strides.o_row, i < n, DV, 1, DVP, True)
    dO = load(do + item.to(tl.int64) * do_item + h.to(tl.int64) * do_head, wide * do_row, i < n, DV, do_dim, DVP, True)
    d = tl.sum(O.to(tl.float32) * dO.to(tl.float32), 1)  # [BM]
    row = (item.to(tl.int64) * heads + h) * n + i
    if LSE:
        d -= tl.load(g_lse + row, mask=i < n, other=0.0)
    tl.store(delta + row, d, mask=i < n)
    at = level_of(tl.load(row_max + row, mask=i < n, other=0.0), FAST)
    above = tl.load(log_row_sum + row, mask=i < n, other=0.0)
    tl.store(level + row, at + (above * LOG2E if FAST else above), mask=i < n)


@triton.jit
def row_facts(rows, row_max, log_row_sum, delta, g_entropy, mean, i, n, ENTROPY: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr):
    """The level of rows i, lse above it in log2 units, δ, g_H, and E[S] above the level: each [BM].

    EXACT (float32) tells exponents from the largest logit, then from lse, which keeps all digits; otherwise the level is
    lse at once, which saves an operation and a register for each number.
    """
    if EXACT:
        level = level_of(tl.load(row_max + rows + i, mask=i < n, other=float("-inf")), FAST)
        above = tl.load(log_row_sum + rows + i, mask=i < n, other=0.0) * LOG2E
    else:  # `row_max` holds lse here
        level = tl.load(row_max + rows + i, mask=i < n, other=float("inf"))
        above = level
    d = tl.load(delta + rows + i, mask=i < n, other=0.0)
    g, e = d, d
    if ENTROPY:
        g = tl.load(g_entropy + rows + i, mask=i < n, other=0.0)
        e = tl.load(mean + rows + i, mask=i < n, other=0.0)
    return level, above, d, g, e


@triton.jit
def weights_and_slopes(S, dP, raw, show, level, above, d, g, e, keep, factor, scale, unit, cap, ENTROPY: tl.constexpr,
                       FAST: tl.constexpr, EXACT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr, HIDES: tl.constexpr):
    """P with dropout applied, and dS of the logits and of the raw scores; the row facts have the shape of S already."""
    T = S * unit - level if FAST else (S - level) * LOG2E  # log2 of the weight, but for the denominator
    if ENTROPY:
        T = tl.maximum(T, DEEP)  # finite, so that P·T is 0 and not NaN
    P = tl.exp2(T - above) if EXACT else tl.exp2(T)
    if HIDES:
        P = tl.where(show, P, 0.0)
    Pd = P
    if DROP:
        Pd = tl.where(keep, P * factor, 0.0)
        dP = tl.where(keep, dP * factor, 0.0)
    dS = dP - d
    if ENTROPY:
        dS -= g * (T * LN2 - e)
    dS = P * dS
    if HIDES:
        dS = tl.where(show, dS, 0.0)
    draw = dS
    if CAP:
        t = tanh(raw * scale / cap)
        draw = dS * (1.0 - t * t)
        if HIDES:
            draw = tl.where(show, draw, 0.0)
    return Pd, dS, draw


@triton.jit
def rows_step(K, V, dK, dV, q, k, do, item, h, strides, do_row, do_dim, i0, j, slot, rows, row_max, log_row_sum, delta, g_entropy, mean, scale, unit, cap,
              bias, where, drop, vector, heads, n, M,
              D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr,
              DROP: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
              PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """Add to dK and dV [BN, …] what the rows i0 … i0 + BM give."""
    i = i0 + tl.arange(0, BM)
    wide = i.to(tl.int64)
    if TMA:
        dO = do.load([item, h, i0, 0]).reshape(BM, DVP)
    else:
        dO = load(do, wide * do_row, i < n, DV, do_dim, DVP, True)  # [BM, DVP]
    Q = dO
    if HIDDEN > 0:
        S = tl.trans(additive(q, k, vector, i, j, n, M, strides.q_row, strides.q_dim, strides.k_row, strides.k_dim, BM, BN, HIDDEN, APPROXIMATE))
    else:
        if TMA:
            Q = q.load([item, h, i0, 0]).reshape(BM, DP)
        else:
            Q = load(q, wide * strides.q_row, i < n, D, strides.q_dim, DP, True)  # [BM, DP]
        S = tl.dot(K, tl.trans(Q), input_precision=PRECISION)  # [BN, BM]
    raw = S
    HIDES: tl.constexpr = MASKED or BIAS != _PLAIN
    show = j
    if not FAST:
        S, show = logits(tl.trans(S), scale, cap, bias, bias_rows(bias, item, h, i, BIAS), i, j, n, M, CAP, BIAS)
        S = tl.trans(S)
        if BIAS != _PLAIN:
            show = tl.trans(show)
    if MASKED:
        lo, hi = span_rows(where, item, h, i, n, M, MASK)
        masked = (S != float("-inf")) & tl.trans(shown(where, lo, hi, slot, i, j, MASK))
        show = masked if BIAS == _PLAIN else show & masked
    level, above, d, g, e = row_facts(rows, row_max, log_row_sum, delta, g_entropy, mean, i, n, ENTROPY, FAST, EXACT)
    if HIDES and HIDDEN == 0:  # a row that sees nothing leaves no trace, not even a NaN
        Q = tl.where((level < float("inf"))[:, None], Q, 0.0)
    keep = j
    if DROP:
        low, high = drop_keys(drop, item, h, heads, i, n)
        keep = tl.trans(kept(low, high, j, drop.bound))
    dP = tl.dot(V, tl.trans(dO), input_precision=PRECISION)  # [BN, BM]
    P, dS, draw = weights_and_slopes(S, dP, raw, show, level[None, :], above[None, :], d[None, :], g[None, :], e[None, :], keep,
                                     drop.factor, scale, unit, cap, ENTROPY, FAST, EXACT, CAP, DROP, HIDES)
    dV = tl.dot(P.to(dO.dtype), dO, dV, input_precision=PRECISION)  # [BN, DVP]
    if HIDDEN > 0:
        d_c = tl.arange(0, DP)
        for c in range(HIDDEN):
            a = tl.load(q + wide * strides.q_row + c * strides.q_dim, mask=i < n, other=0.0)  # [BM]
            b = tl.load(k + j.to(tl.int64) * strides.k_row + c * strides.k_dim, mask=j < M, other=0.0)  # [BN]
            t = quick_tanh(b[:, None] + a[None, :], APPROXIMATE)  # [BN, BM]
            if HIDES:
                t = tl.where(show, t, 0.0)
            g_c = tl.sum(draw * (1.0 - t * t), 1) * tl.load(vector + c)  # [BN]
            dK = tl.where((d_c == c)[None, :], dK + g_c[:, None], dK)
    else:
        if not FAST:  # each head may have a scale of its own
            draw *= scale
        dK = tl.dot(draw.to(Q.dtype), Q, dK, input_precision=PRECISION)  # [BN, DP]
    return dK, dV


@triton.jit(do_not_specialize=["n", "M", "where", "drop", "heads", "groups"])
def keys(q, k, v, do, dk, dv, row_max, log_row_sum, delta, g_entropy, mean, strides, do_item, do_head, do_row, do_dim, scale, scales, cap, bias, where, drop,
         vector, n, M, heads, groups,
         D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr,
         DROP: tl.constexpr, SCALES: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
         PRECISION: tl.constexpr, GROUPED: tl.constexpr):
    """dK and dV of BN keys: program (block of keys, item and key head); its query heads one after the other."""
    block, own = seats(tl.cdiv(M, BN))
    kv_heads = heads // groups
    kv_head = own % kv_heads
    item = own // kv_heads
    j = block * BN + tl.arange(0, BN)  # [BN]
    wide = j.to(tl.int64)
    K = j
    if TMA:
        if HIDDEN == 0:
            K = k.load([item, kv_head, block * BN, 0]).reshape(BN, DP)
        V = v.load([item, kv_head, block * BN, 0]).reshape(BN, DVP)
    else:
        k = k + item.to(tl.int64) * strides.k_item + kv_head.to(tl.int64) * strides.k_head
        v = v + item.to(tl.int64) * strides.v_item + kv_head.to(tl.int64) * strides.v_head
        if HIDDEN == 0:
            K = load(k, wide * strides.k_row, j < M, D, strides.k_dim, DP, True)  # [BN, DP]
        V = load(v, wide * strides.v_row, j < M, DV, strides.v_dim, DVP, True)  # [BN, DVP]
    dK = tl.zeros([BN, DP], tl.float32)
    dV = tl.zeros([BN, DVP], tl.float32)
    for g in range(groups if GROUPED else 1):
        h = kv_head * groups + g
        rows = (item.to(tl.int64) * heads + h) * n
        q_h = q
        do_h = do
        if not TMA:
            q_h = q + item.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head
            do_h = do + item.to(tl.int64) * do_item + h.to(tl.int64) * do_head
        if SCALES:
            scale = tl.load(scales + h)
        unit = scale * LOG2E
        first, full, until, rest = met(where, seat(where, item, h, MASK), block, tl.cdiv(n, BM), tl.cdiv(n, BM), MASK)
        for t in range(full, until):
            b = whole_block(where, t, MASK)
            dK, dV = rows_step(K, V, dK, dV, q_h, k, do_h, item, h, strides, do_row, do_dim, b * BM, j, 0, rows, row_max, log_row_sum, delta,
                               g_entropy, mean, scale, unit, cap, bias, where, drop, vector, heads, n, M, D, DV, DP, DVP, BM, BN,
                               MASK, BIAS, CAP, FAST, EXACT, ENTROPY, DROP, TMA, HIDDEN, APPROXIMATE, PRECISION, False)
        if MASK != _NONE:
            for t in range(rest):
                b, slot = partial(where, t, first, full, until, MASK)
                dK, dV = rows_step(K, V, dK, dV, q_h, k, do_h, item, h, strides, do_row, do_dim, b * BM, j, slot, rows, row_max, log_row_sum, delta,
                                   g_entropy, mean, scale, unit, cap, bias, where, drop, vector, heads, n, M, D, DV, DP, DVP, BM, BN,
                                   MASK, BIAS, CAP, FAST, EXACT, ENTROPY, DROP, TMA, HIDDEN, APPROXIMATE, PRECISION, True)
    if FAST:
        dK *= scale
    d = tl.arange(0, DP)
    at = ((item.to(tl.int64) * kv_heads + kv_head) * M + wide)[:, None] * D + d[None, :]
    tl.store(dk + at, dK.to(dk.dtype.element_ty), mask=(j < M)[:, None] & (d < D)[None, :])
    d = tl.arange(0, DVP)
    at = ((item.to(tl.int64) * kv_heads + kv_head) * M + wide)[:, None] * DV + d[None, :]
    tl.store(dv + at, dV.to(dv.dtype.element_ty), mask=(j < M)[:, None] & (d < DV)[None, :])


@triton.jit
def keys_step(Q, dO, dQ, dW, q, k, v, item, h, kv_head, strides, i, j0, lo, hi, slot, at, halves, level, above, d, g, e, scale, unit, cap,
              bias, where, drop, vector, n, M,
              D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr,
              DROP: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
              PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """Add to dQ [BM, DP] what the keys j0 … j0 + BN give."""
    j = j0 + tl.arange(0, BN)
    wide = j.to(tl.int64)
    K = j
    if HIDDEN > 0:
        S = additive(q, k, vector, i, j, n, M, strides.q_row, strides.q_dim, strides.k_row, strides.k_dim, BM, BN, HIDDEN, APPROXIMATE)
    else:
        if TMA:
            K = k.load([item, kv_head, j0, 0]).reshape(BN, DP)
        else:
            K = load(k, wide * strides.k_row, j < M, D, strides.k_dim, DP, MASKED)  # [BN, DP]
        S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)  # [BM, BN]
    if TMA:
        V = v.load([item, kv_head, j0, 0]).reshape(BN, DVP)
    else:
        V = load(v, wide * strides.v_row, j < M, DV, strides.v_dim, DVP, MASKED)  # [BN, DVP]
    raw = S
    HIDES: tl.constexpr = MASKED or BIAS != _PLAIN
    show = j
    if not FAST:
        S, show = logits(S, scale, cap, bias, at, i, j, n, M, CAP, BIAS)
    if MASKED:
        masked = (S != float("-inf")) & shown(where, lo, hi, slot, i, j, MASK)
        show = masked if BIAS == _PLAIN else show & masked
    if HIDES and HIDDEN == 0:
        K = visible_keys(K, show, where, item, h, j, M, MASK, BIAS)
    keep = j
    if DROP:
        keep = kept(halves[0], halves[1], j, drop.bound)
    dP = tl.dot(dO, tl.trans(V), input_precision=PRECISION)  # [BM, BN]
    P, dS, draw = weights_and_slopes(S, dP, raw, show, level[:, None], above[:, None], d[:, None], g[:, None], e[:, None], keep,
                                     drop.factor, scale, unit, cap, ENTROPY, FAST, EXACT, CAP, DROP, HIDES)
    if HIDDEN > 0:
        d_c = tl.arange(0, DP)
        for c in range(HIDDEN):
            a = tl.load(q + i.to(tl.int64) * strides.q_row + c * strides.q_dim, mask=i < n, other=0.0)  # [BM]
            b = tl.load(k + wide * strides.k_row + c * strides.k_dim, mask=j < M, other=0.0)  # [BN]
            t = quick_tanh(a[:, None] + b[None, :], APPROXIMATE)  # [BM, BN]
            if HIDES:
                t = tl.where(show, t, 0.0)
            g_c = tl.sum(draw * (1.0 - t * t), 1) * tl.load(vector + c)  # [BM]
            dQ = tl.where((d_c == c)[None, :], dQ + g_c[:, None], dQ)
            dW = tl.where((d_c == c)[None, :], dW + tl.sum(draw * t, 1)[:, None], dW)
    else:
        dQ = tl.dot(draw.to(K.dtype), K, dQ, input_precision=PRECISION)  # [BM, DP]
    return dQ, dW


@triton.jit(do_not_specialize=["n", "M", "where", "drop", "blocks", "heads", "groups"])
def queries(q, k, v, do, dq, dw, row_max, log_row_sum, delta, g_entropy, mean, strides, do_item, do_head, do_row, do_dim, scale, scales, cap, bias, where,
            drop, vector, n, M, blocks, heads, groups,
            D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr,
            DROP: tl.constexpr, SCALES: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
            PRECISION: tl.constexpr):
    """dQ of BM rows: program (block of rows, item and head); for the additive score each row's share of d vector too."""
    block, own = seats(blocks)
    block = blocks - 1 - block
    h = own % heads
    item = own // heads
    kv_head = h // groups
    i = block * BM + tl.arange(0, BM)  # [BM]
    wide = i.to(tl.int64)
    if SCALES:
        scale = tl.load(scales + h)
    unit = scale * LOG2E
    Q = i
    if TMA:
        Q = q.load([item, h, block * BM, 0]).reshape(BM, DP)
        dO = do.load([item, h, block * BM, 0]).reshape(BM, DVP)
    else:
        q = q + item.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head
        k = k + item.to(tl.int64) * strides.k_item + kv_head.to(tl.int64) * strides.k_head
        v = v + item.to(tl.int64) * strides.v_item + kv_head.to(tl.int64) * strides.v_head
        do = do + item.to(tl.int64) * do_item + h.to(tl.int64) * do_head
        if HIDDEN == 0:
            Q = load(q, wide * strides.q_row, i < n, D, strides.q_dim, DP, True)  # [BM, DP]
        dO = load(do, wide * do_row, i < n, DV, do_dim, DVP, True)  # [BM, DVP]
    rows = (item.to(tl.int64) * heads + h) * n
    level, above, d, g, e = row_facts(rows, row_max, log_row_sum, delta, g_entropy, mean, i, n, ENTROPY, FAST, EXACT)
    at = bias_rows(bias, item, h, i, BIAS)
    lo, hi = span_rows(where, item, h, i, n, M, MASK)
    halves = (i, i)
    if DROP:
        halves = drop_keys(drop, item, h, heads, i, n)
    dQ = tl.zeros([BM, DP], tl.float32)
    dW = dQ if HIDDEN > 0 else d
    first, full, until, rest = met(where, seat(where, item, h, MASK), block, tl.cdiv(M, BN), M // BN, MASK)
    for t in range(full, until):
        b = whole_block(where, t, MASK)
        dQ, dW = keys_step(Q, dO, dQ, dW, q, k, v, item, h, kv_head, strides, i, b * BN, lo, hi, 0, at, halves, level, above, d, g, e,
                           scale, unit, cap, bias, where, drop, vector, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST, EXACT,
                           ENTROPY, DROP, TMA, HIDDEN, APPROXIMATE, PRECISION, False)
    for t in range(rest):
        b, slot = partial(where, t, first, full, until, MASK)
        dQ, dW = keys_step(Q, dO, dQ, dW, q, k, v, item, h, kv_head, strides, i, b * BN, lo, hi, slot, at, halves, level, above, d, g, e,
                           scale, unit, cap, bias, where, drop, vector, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST, EXACT,
                           ENTROPY, DROP, TMA, HIDDEN, APPROXIMATE, PRECISION, True)
    if HIDDEN == 0:
        if not SCALES:  # with a tensor of scales it stays raw, for the derivative of these
            dQ *= scale
    d_all = tl.arange(0, DP)
    at = (rows + wide)[:, None] * D + d_all[None, :]
    tl.store(dq + at, dQ.to(dq.dtype.element_ty), mask=(i < n)[:, None] & (d_all < D)[None, :])
    if HIDDEN > 0:
        tl.store(dw + at, dW, mask=(i < n)[:, None] & (d_all < D)[None, :])
