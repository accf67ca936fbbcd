"""The tangent of attention's backward pass: what double backward and Hessian-vector products are made of.

With t the tangent of the logits less that of lse, and a dot for what moves, the backward pass

    dS = P ∘ B,   B = dP − δ − g_H · (S − mean),   dV = Pᵀ dO,   dQ = scale · dS K,   dK = scale · dSᵀ Q

moves by

    dS˙ = P ∘ (t B + B˙),   B˙ = dP˙ − δ˙ − g_H˙·(S − mean) − g_H·(t + u − mean˙),   dP˙ = dO V˙ᵀ + dO˙ Vᵀ
    dV˙ = (P ∘ t)ᵀ dO + Pᵀ dO˙,   dQ˙ = scale · (dS˙ K + dS K˙),   dK˙ = scale · (dS˙ᵀ Q + dSᵀ Q˙)

where u is the tangent of lse. Two kernels, as in the backward pass, without atomics: `keys` and `queries`.
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
    bias_rows,
    drop_keys,
    kept,
    level_of,
    load,
    logits,
    met,
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
def facts(rows, row, i, n, ENTROPY: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr):
    """Of rows i, each [BM]: the level, lse above it in log2 units, δ, δ˙, u; and for the entropy g, g˙, mean, mean˙."""
    if EXACT:
        level = level_of(tl.load(row.row_max + rows + i, mask=i < n, other=float("-inf")), FAST)
        above = tl.load(row.log_row_sum + rows + i, mask=i < n, other=0.0) * LOG2E
    else:  # `row_max` holds lse here
        level = tl.load(row.row_max + rows + i, mask=i < n, other=float("inf"))
        above = level
    d = tl.load(row.delta + rows + i, mask=i < n, other=0.0)
    dd = tl.load(row.delta_dot + rows + i, mask=i < n, other=0.0)
    u = tl.load(row.u + rows + i, mask=i < n, other=0.0)
    g, gg, e, ee = d, d, d, d
    if ENTROPY:
        g = tl.load(row.g + rows + i, mask=i < n, other=0.0)
        gg = tl.load(row.g_dot + rows + i, mask=i < n, other=0.0)
        e = tl.load(row.mean + rows + i, mask=i < n, other=0.0)
        ee = tl.load(row.mean_dot + rows + i, mask=i < n, other=0.0)
    return level, above, d, dd, u, g, gg, e, ee


@triton.jit
def bent(S, T, dP, dPd, raw, show, level, above, d, dd, u, g, gg, e, ee, keep, factor, scale, unit, cap, ENTROPY: tl.constexpr,
         FAST: tl.constexpr, EXACT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr, HIDES: tl.constexpr):
    """P and P ∘ t with dropout, dS of the raw scores and its tangent; the row facts have the shape of S already."""
    X = S * unit - level if FAST else (S - level) * LOG2E  # log2 of the weight, but for the denominator
    if ENTROPY:
        X = tl.maximum(X, DEEP)  # finite, so that P·X is 0 and not NaN
    P = tl.exp2(X - above) if EXACT else tl.exp2(X)
    t_raw = T * scale
    t = t_raw
    th = t
    if CAP:
        th = tanh(raw * scale / cap)
        t = t_raw * (1.0 - th * th)
    if HIDES:
        P = tl.where(show, P, 0.0)
        t = tl.where(show, t, 0.0)
    R = t - u
    Pd, PR = P, P * R
    if DROP:
        Pd = tl.where(keep, P * factor, 0.0)
        PR = tl.where(keep, PR * factor, 0.0)
        dP = tl.where(keep, dP * factor, 0.0)
        dPd = tl.where(keep, dPd * factor, 0.0)
    B = dP - d
    Bd = dPd - dd
    if ENTROPY:
        surprise = X * LN2 - e
        B -= g * surprise
        Bd -= gg * surprise + g * (t - ee)
    dS = P * B
    dSd = P * (R * B + Bd)
    if CAP:
        slope = 1.0 - th * th
        dSd = slope * (dSd - dS * th * t_raw * (2.0 / cap))
        dS = dS * slope
    if HIDES:
        dS = tl.where(show, dS, 0.0)
        dSd = tl.where(show, dSd, 0.0)
    return Pd, PR, dS, dSd


@triton.jit
def rows_step(K, V, dK, dV, q, k, do, Kd, Vd, qd, dod, item, h, strides, moves, grads, i0, j, slot, rows, row, scale, unit, cap, bias, where, drop,
              heads, n, M,
              D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr,
              DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, MOVES_Q: tl.constexpr, MOVES_K: tl.constexpr,
              MOVES_V: tl.constexpr, MOVES_G: tl.constexpr, MASKED: tl.constexpr):
    """Add to dK˙ and dV˙ [BN, …] what the rows i0 … i0 + BM give; tiles are turned, [BN, BM]."""
    i = i0 + tl.arange(0, BM)
    wide = i.to(tl.int64)
    if TMA:
        Q = q.load([item, h, i0, 0]).reshape(BM, DP)
        dO = do.load([item, h, i0, 0]).reshape(BM, DVP)
    else:
        Q = load(q, wide * strides.q_row, i < n, D, strides.q_dim, DP, True)  # [BM, DP]
        dO = load(do, wide * grads.q_row, i < n, DV, grads.q_dim, DVP, True)  # [BM, DVP]
    Qd, dOd = Q, dO
    if MOVES_Q:
        if TMA:
            Qd = qd.load([item, h, i0, 0]).reshape(BM, DP)
        else:
            Qd = load(qd, wide * moves.q_row, i < n, D, moves.q_dim, DP, True)
    if MOVES_G:
        if TMA:
            dOd = dod.load([item, h, i0, 0]).reshape(BM, DVP)
        else:
            dOd = load(dod, wide * grads.k_row, i < n, DV, grads.k_dim, DVP, True)
    S = tl.dot(K, tl.trans(Q), input_precision=PRECISION)  # [BN, BM]
    T = tl.zeros([BN, BM], tl.float32)
    if MOVES_Q:
        T = tl.dot(K, tl.trans(Qd), T, input_precision=PRECISION)
    if MOVES_K:
        T = tl.dot(Kd, tl.trans(Q), T, input_precision=PRECISION)
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
    level, above, d, dd, u, g, gg, e, ee = facts(rows, row, i, n, ENTROPY, FAST, EXACT)
    if HIDES:  # a row that sees nothing leaves no trace, not even a NaN
        Q = tl.where((level < float("inf"))[:, None], Q, 0.0)
        Qd = tl.where((level < float("inf"))[:, None], Qd, 0.0)
    keep = j
    if DROP:
        low, high = drop_keys(drop, item, h, heads, i, n)
        keep = tl.trans(kept(low, high, j, drop.bound))
    dP = tl.dot(V, tl.trans(dO), input_precision=PRECISION)  # [BN, BM]
    dPd = tl.zeros([BN, BM], tl.float32)
    if MOVES_V:
        dPd = tl.dot(Vd, tl.trans(dO), dPd, input_precision=PRECISION)
    if MOVES_G:
        dPd = tl.dot(V, tl.trans(dOd), dPd, input_precision=PRECISION)
    P, PR, dS, dSd = bent(S, T, dP, dPd, raw, show, level[None, :], above[None, :], d[None, :], dd[None, :], u[None, :], g[None, :], gg[None, :],
                          e[None, :], ee[None, :], keep, drop.factor, scale, unit, cap, ENTROPY, FAST, EXACT, CAP, DROP, HIDES)
    dV = tl.dot(PR.to(dO.dtype), dO, dV, input_precision=PRECISION)  # [BN, DVP]
    if MOVES_G:
        dV = tl.dot(P.to(dO.dtype), dOd, dV, input_precision=PRECISION)
    dK = tl.dot(dSd.to(Q.dtype), Q, dK, input_precision=PRECISION)  # [BN, DP]
    if MOVES_Q:
        dK = tl.dot(dS.to(Q.dtype), Qd, dK, input_precision=PRECISION)
    return dK, dV


@triton.jit(do_not_specialize=["n", "M", "where", "drop", "heads", "groups"])
def keys(q, k, v, do, qd, kd, vd, dod, dk, dv, row, strides, moves, grads, scale, cap, bias, where, drop, n, M, heads, groups,
         D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr,
         DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, GROUPED: tl.constexpr, MOVES_Q: tl.constexpr,
         MOVES_K: tl.constexpr, MOVES_V: tl.constexpr, MOVES_G: tl.constexpr):
    """dK˙ and dV˙ of BN keys: program (block of keys, item and key head); its query heads one after the other."""
    block, own = seats(tl.cdiv(M, BN))
    kv_heads = heads // groups
    kv_head = own % kv_heads
    item = own // kv_heads
    j = block * BN + tl.arange(0, BN)  # [BN]
    wide = j.to(tl.int64)
    if TMA:
        K = k.load([item, kv_head, block * BN, 0]).reshape(BN, DP)
        V = v.load([item, kv_head, block * BN, 0]).reshape(BN, DVP)
    else:
        K = load(k + item.to(tl.int64) * strides.k_item + kv_head.to(tl.int64) * strides.k_head, wide * strides.k_row, j < M, D, strides.k_dim, DP, True)
        V = load(v + item.to(tl.int64) * strides.v_item + kv_head.to(tl.int64) * strides.v_head, wide * strides.v_row, j < M, DV, strides.v_dim, DVP, True)
    Kd, Vd = K, V
    if MOVES_K:
        if TMA:
            Kd = kd.load([item, kv_head, block * BN, 0]).reshape(BN, DP)
        else:
            Kd = load(kd + item.to(tl.int64) * moves.k_item + kv_head.to(tl.int64) * moves.k_head, wide * moves.k_row, j < M, D, moves.k_dim, DP, True)
    if MOVES_V:
        if TMA:
            Vd = vd.load([item, kv_head, block * BN, 0]).reshape(BN, DVP)
        else:
            Vd = load(vd + item.to(tl.int64) * moves.v_item + kv_head.to(tl.int64) * moves.v_head, wide * moves.v_row, j < M, DV, moves.v_dim, DVP, True)
    dK = tl.zeros([BN, DP], tl.float32)
    dV = tl.zeros([BN, DVP], tl.float32)
    unit = scale * LOG2E
    for g in range(groups if GROUPED else 1):
        h = kv_head * groups + g
        rows = (item.to(tl.int64) * heads + h) * n
        q_h, do_h, qd_h, dod_h = q, do, qd, dod
        if not TMA:
            q_h = q + item.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head
            do_h = do + item.to(tl.int64) * grads.q_item + h.to(tl.int64) * grads.q_head
            if MOVES_Q:
                qd_h = qd + item.to(tl.int64) * moves.q_item + h.to(tl.int64) * moves.q_head
            if MOVES_G:
                dod_h = dod + item.to(tl.int64) * grads.k_item + h.to(tl.int64) * grads.k_head
        first, full, until, rest = met(where, seat(where, item, h, MASK), block, tl.cdiv(n, BM), tl.cdiv(n, BM), MASK)
        for t in range(full, until):
            b = whole_block(where, t, MASK)
            dK, dV = rows_step(K, V, dK, dV, q_h, k, do_h, Kd, Vd, qd_h, dod_h, item, h, strides, moves, grads, b * BM, j, 0, rows, row, scale, unit,
                               cap, bias, where, drop, heads, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST, EXACT, ENTROPY, DROP, TMA,
                               PRECISION, MOVES_Q, MOVES_K, MOVES_V, MOVES_G, False)
        if MASK != _NONE:
            for t in range(rest):
                b, slot = partial(where, t, first, full, until, MASK)
                dK, dV = rows_step(K, V, dK, dV, q_h, k, do_h, Kd, Vd, qd_h, dod_h, item, h, strides, moves, grads, b * BM, j, slot, rows, row, scale,
                                   unit, cap, bias, where, drop, heads, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST, EXACT, ENTROPY, DROP,
                                   TMA, PRECISION, MOVES_Q, MOVES_K, MOVES_V, MOVES_G, True)
    dK *= scale
    d = tl.arange(0, DP)
    at = ((item.to(tl.int64) * kv_heads + kv_head) * M + wide)[:, None] * D + d[None, :]
    tl.store(dk + at, dK.to(dk.dtype.element_ty), mask=(j < M)[:, None] & (d < D)[None, :])
    d = tl.arange(0, DVP)
    at = ((item.to(tl.int64) * kv_heads + kv_head) * M + wide)[:, None] * DV + d[None, :]
    tl.store(dv + at, dV.to(dv.dtype.element_ty), mask=(j < M)[:, None] & (d < DV)[None, :])


@triton.jit
def keys_step(Q, dO, Qd, dOd, dQ, k, v, kd, vd, item, h, kv_head, strides, moves, i, j0, lo, hi, slot, at, halves, level, above, d, dd, u, g, gg, e, ee,
              scale, unit, cap, bias, where, drop, n, M,
              D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr,
              DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, MOVES_Q: tl.constexpr, MOVES_K: tl.constexpr,
              MOVES_V: tl.constexpr, MOVES_G: tl.constexpr, MASKED: tl.constexpr):
    """Add to dQ˙ [BM, DP] what the keys j0 … j0 + BN give."""
    j = j0 + tl.arange(0, BN)
    wide = j.to(tl.int64)
    if TMA:
        K = k.load([item, kv_head, j0, 0]).reshape(BN, DP)
        V = v.load([item, kv_head, j0, 0]).reshape(BN, DVP)
    else:
        K = load(k, wide * strides.k_row, j < M, D, strides.k_dim, DP, MASKED)  # [BN, DP]
        V = load(v, wide * strides.v_row, j < M, DV, strides.v_dim, DVP, MASKED)  # [BN, DVP]
    Kd, Vd = K, V
    if MOVES_K:
        if TMA:
            Kd = kd.load([item, kv_head, j0, 0]).reshape(BN, DP)
        else:
            Kd = load(kd, wide * moves.k_row, j < M, D, moves.k_dim, DP, MASKED)
    if MOVES_V:
        if TMA:
            Vd = vd.load([item, kv_head, j0, 0]).reshape(BN, DVP)
        else:
            Vd = load(vd, wide * moves.v_row, j < M, DV, moves.v_dim, DVP, MASKED)
    S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)  # [BM, BN]
    T = tl.zeros([BM, BN], tl.float32)
    if MOVES_Q:
        T = tl.dot(Qd, tl.trans(K), T, input_precision=PRECISION)
    if MOVES_K:
        T = tl.dot(Q, tl.trans(Kd), T, input_precision=PRECISION)
    raw = S
    HIDES: tl.constexpr = MASKED or BIAS != _PLAIN
    show = j
    if not FAST:
        S, show = logits(S, scale, cap, bias, at, i, j, n, M, CAP, BIAS)
    if MASKED:
        masked = (S != float("-inf")) & shown(where, lo, hi, slot, i, j, MASK)
        show = masked if BIAS == _PLAIN else show & masked
    if HIDES:
        K = visible_keys(K, show, where, item, h, j, M, MASK, BIAS)
        Kd = visible_keys(Kd, show, where, item, h, j, M, MASK, BIAS)
    keep = j
    if DROP:
        keep = kept(halves[0], halves[1], j, drop.bound)
    dP = tl.dot(dO, tl.trans(V), input_precision=PRECISION)  # [BM, BN]
    dPd = tl.zeros([BM, BN], tl.float32)
    if MOVES_V:
        dPd = tl.dot(dO, tl.trans(Vd), dPd, input_precision=PRECISION)
    if MOVES_G:
        dPd = tl.dot(dOd, tl.trans(V), dPd, input_precision=PRECISION)
    P, PR, dS, dSd = bent(S, T, dP, dPd, raw, show, level[:, None], above[:, None], d[:, None], dd[:, None], u[:, None], g[:, None], gg[:, None],
                          e[:, None], ee[:, None], keep, drop.factor, scale, unit, cap, ENTROPY, FAST, EXACT, CAP, DROP, HIDES)
    dQ = tl.dot(dSd.to(K.dtype), K, dQ, input_precision=PRECISION)  # [BM, DP]
    if MOVES_K:
        dQ = tl.dot(dS.to(K.dtype), Kd, dQ, input_precision=PRECISION)
    return dQ


@triton.jit(do_not_specialize=["n", "M", "where", "drop", "blocks", "heads", "groups"])
def queries(q, k, v, do, qd, kd, vd, dod, dq, row, strides, moves, grads, scale, cap, bias, where, drop, n, M, blocks, heads, groups,
            D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr,
            DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, MOVES_Q: tl.constexpr, MOVES_K: tl.constexpr,
            MOVES_V: tl.constexpr, MOVES_G: tl.constexpr):
    """dQ˙ of BM rows: program (block of rows, item and head)."""
    block, own = seats(blocks)
    block = blocks - 1 - block
    h = own % heads
    item = own // heads
    kv_head = h // groups
    i = block * BM + tl.arange(0, BM)  # [BM]
    wide = i.to(tl.int64)
    unit = scale * LOG2E
    if TMA:
        Q = q.load([item, h, block * BM, 0]).reshape(BM, DP)
        dO = do.load([item, h, block * BM, 0]).reshape(BM, DVP)
    else:
        Q = load(q + item.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head, wide * strides.q_row, i < n, D, strides.q_dim, DP, True)
        dO = load(do + item.to(tl.int64) * grads.q_item + h.to(tl.int64) * grads.q_head, wide * grads.q_row, i < n, DV, grads.q_dim, DVP, True)
        k = k + item.to(tl.int64) * strides.k_item + kv_head.to(tl.int64) * strides.k_head
        v = v + item.to(tl.int64) * strides.v_item + kv_head.to(tl.int64) * strides.v_head
        if MOVES_K:
            kd = kd + item.to(tl.int64) * moves.k_item + kv_head.to(tl.int64) * moves.k_head
        if MOVES_V:
            vd = vd + item.to(tl.int64) * moves.v_item + kv_head.to(tl.int64) * moves.v_head
    Qd, dOd = Q, dO
    if MOVES_Q:
        if TMA:
            Qd = qd.load([item, h, block * BM, 0]).reshape(BM, DP)
        else:
            Qd = load(qd + item.to(tl.int64) * moves.q_item + h.to(tl.int64) * moves.q_head, wide * moves.q_row, i < n, D, moves.q_dim, DP, True)
    if MOVES_G:
        if TMA:
            dOd = dod.load([item, h, block * BM, 0]).reshape(BM, DVP)
        else:
            dOd = load(dod + item.to(tl.int64) * grads.k_item + h.to(tl.int64) * grads.k_head, wide * grads.k_row, i < n, DV, grads.k_dim, DVP, True)
    rows = (item.to(tl.int64) * heads + h) * n
    level, above, d, dd, u, g, gg, e, ee = facts(rows, row, i, n, ENTROPY, FAST, EXACT)
    at = bias_rows(bias, item, h, i, BIAS)
    lo, hi = span_rows(where, item, h, i, n, M, MASK)
    halves = (i, i)
    if DROP:
        halves = drop_keys(drop, item, h, heads, i, n)
    dQ = tl.zeros([BM, DP], tl.float32)
    first, full, until, rest = met(where, seat(where, item, h, MASK), block, tl.cdiv(M, BN), M // BN, MASK)
    for t in range(full, until):
        b = whole_block(where, t, MASK)
        dQ = keys_step(Q, dO, Qd, dOd, dQ, k, v, kd, vd, item, h, kv_head, strides, moves, i, b * BN, lo, hi, 0, at, halves, level, above, d, dd, u, g, gg,
                       e, ee, scale, unit, cap, bias, where, drop, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST, EXACT, ENTROPY, DROP, TMA,
                       PRECISION, MOVES_Q, MOVES_K, MOVES_V, MOVES_G, False)
    for t in range(rest):
        b, slot = partial(where, t, first, full, until, MASK)
        dQ = keys_step(Q, dO, Qd, dOd, dQ, k, v, kd, vd, item, h, kv_head, strides, moves, i, b * BN, lo, hi, slot, at, halves, level, above, d, dd, u, g,
                       gg, e, ee, scale, unit, cap, bias, where, drop, n, M, D, DV, DP, DVP, BM, BN, MASK, BIAS, CAP, FAST, EXACT, ENTROPY, DROP,
                       TMA, PRECISION, MOVES_Q, MOVES_K, MOVES_V, MOVES_G, True)
    dQ *= scale
    c = tl.arange(0, DP)
    tl.store(dq + (rows + wide)[:, None] * D + c[None, :], dQ.to(dq.dtype.element_ty), mask=(i < n)[:, None] & (c < D)[None, :])
