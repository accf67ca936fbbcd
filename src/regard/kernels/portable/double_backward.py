"""The tangent of attention's backward pass, from which double backward and Hessian-vector products are made.

With t the tangent of the logits less that of lse, and a dot for tangents, the backward pass

    dS = P ∘ B,   B = dP − δ − g_H · (S − mean),   dV = Pᵀ dO,   dQ = scale · dS K,   dK = scale · dSᵀ Q

has the tangent

    dS˙ = P ∘ (t B + B˙),   B˙ = dP˙ − δ˙ − g_H˙·(S − mean) − g_H·(t + u − mean˙),   dP˙ = dO V˙ᵀ + dO˙ Vᵀ
    dV˙ = (P ∘ t)ᵀ dO + Pᵀ dO˙,   dQ˙ = scale · (dS˙ K + dS K˙),   dK˙ = scale · (dS˙ᵀ Q + dSᵀ Q˙)

where u is the tangent of lse. Two kernels, as in the backward pass, without atomics. The tangents of q, k, v and dO are
None where there is none, which saves their products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import Sizes
from .aggregates import Head, Matrices, RowStatsDot
from .backward import along_rows, down_columns, store_dkdv
from .program import (
    do_at,
    head_at,
    k_at,
    load_do,
    load_k,
    load_q,
    load_row_stats,
    load_row_tile,
    load_v,
    over_keys,
    over_rows,
    pointwise,
    program_head,
    q_at,
    scores_and_slope,
    store_rows,
    v_at,
    visible_logits,
    visible_logits_transposed,
)
from .tile_ops import _BIAS_NONE, LN2, LOG2E, clamp_exponent, dropout_keep, program_tile, tanh, zero_hidden_keys


@triton.jit
def load_row_stats_dot(stats, head, i, C: tl.constexpr):
    """The tangents of what is known of rows i: RowStatsDot, [BM] each."""
    n = head.sizes.n
    first = head.first_row
    delta = tl.load(stats.delta_dot + first + i, mask=i < n, other=0.0)
    lse = tl.load(stats.lse_dot + first + i, mask=i < n, other=0.0)
    g_entropy, mean = delta, delta
    if C.ENTROPY:
        g_entropy = tl.load(stats.g_entropy_dot + first + i, mask=i < n, other=0.0)
        mean = tl.load(stats.mean_dot + first + i, mask=i < n, other=0.0)
    return RowStatsDot(delta, lse, g_entropy, mean)


@triton.jit
def scores_slope_and_curve(raw, i, j, head, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    """What `scores_and_slope` gives, and the second derivative of the function."""
    score, slope = scores_and_slope(raw, i, j, head, C, TRANSPOSED)
    curve = slope
    if C.CURVED:
        curve = pointwise(C.CURVE, raw * head.scale, i, j, head, C, TRANSPOSED)
    return score, slope, curve


@triton.jit
def softmax_double_backward(S, T, dP, dPd, chain, show, keep, row, dot, head, C: tl.constexpr, HIDES: tl.constexpr):
    """P and P ∘ t with dropout, dS of the raw scores and its tangent; the row statistics broadcast to S.

    `chain` has the scores before the cap, and slope and curvature of the function that gave them.
    """
    score, slope_of, curve = chain
    X = S * head.unit - row.offset if C.FAST else (S - row.offset) * LOG2E  # log2 of the weight, but for the denominator
    if C.ENTROPY:
        X = clamp_exponent(X)  # finite, so that P·X is 0 and not NaN
    P = tl.exp2(X - row.log_sum) if C.EXACT else tl.exp2(X)
    cap = head.score.cap
    t_raw = T * head.scale
    t_score = t_raw
    if C.SLOPED:
        t_score = t_raw * slope_of
    t = t_score
    th = t
    if C.CAP:
        th = tanh(score / cap)
        t = t_score * (1.0 - th * th)
    if HIDES:
        P = tl.where(show, P, 0.0)
        t = tl.where(show, t, 0.0)
    R = t - dot.lse
    Pd, PR = P, P * R
    if C.DROP:
        factor = head.dropout.factor
        Pd = tl.where(keep, P * factor, 0.0)
        PR = tl.where(keep, PR * factor, 0.0)
        dP = tl.where(keep, dP * factor, 0.0)
        dPd = tl.where(keep, dPd * factor, 0.0)
    B = dP - row.delta
    Bd = dPd - dot.delta
    if C.ENTROPY:
        surprise = X * LN2 - row.mean
        B -= row.g_entropy * surprise
        Bd -= dot.g_entropy * surprise + row.g_entropy * (t - dot.mean)
    dS = P * B
    dSd = P * (R * B + Bd)
    if C.CAP:
        slope = 1.0 - th * th
        dSd = slope * (dSd - dS * th * t_score * (2.0 / cap))
        dS = dS * slope
    if C.SLOPED:
        dSd = tl.where(dSd == 0.0, 0.0, dSd * slope_of)
        if C.CURVED:
            dSd += tl.where(dS == 0.0, 0.0, dS * curve * t_raw)
        dS = tl.where(dS == 0.0, 0.0, dS * slope_of)
    if HIDES:
        dS = tl.where(show, dS, 0.0)
        dSd = tl.where(show, dSd, 0.0)
    return Pd, PR, dS, dSd


@triton.jit
def dkdv_dot_step(sums, K, V, Kd, Vd, x, xd, head, stats, j, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add to dK˙ and dV˙ [BN, …] what block b of the rows contributes; tiles are transposed, [BN, BM]."""
    dK, dV = sums
    i = b * C.BM + tl.arange(0, C.BM)
    rows = load_row_tile(head, i, C, MASKED)
    Q, dO = load_q(x, head, b * C.BM, C), load_do(x, head, b * C.BM, C)
    Qd, dOd = load_q(xd, head, b * C.BM, C), load_do(xd, head, b * C.BM, C)
    S = tl.dot(K, tl.trans(Q), input_precision=C.PRECISION)  # [BN, BM]
    T = tl.zeros([C.BN, C.BM], tl.float32)
    if xd.q is not None:
        T = tl.dot(K, tl.trans(Qd), T, input_precision=C.PRECISION)
    if xd.k is not None:
        T = tl.dot(Kd, tl.trans(Q), T, input_precision=C.PRECISION)
    raw = S
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    S, show = visible_logits_transposed(S, rows, j, slot, head, C, MASKED)
    row = load_row_stats(stats, head, i, C)
    dot = load_row_stats_dot(stats, head, i, C)
    if HIDES:  # a row that attends to nothing leaves no trace, not even a NaN
        Q = tl.where((row.offset < float("inf"))[:, None], Q, 0.0)
        Qd = tl.where((row.offset < float("inf"))[:, None], Qd, 0.0)
    keep = j
    if C.DROP:
        keep = tl.trans(dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound))
    dP = tl.dot(V, tl.trans(dO), input_precision=C.PRECISION)  # [BN, BM]
    dPd = tl.zeros([C.BN, C.BM], tl.float32)
    if xd.v is not None:
        dPd = tl.dot(Vd, tl.trans(dO), dPd, input_precision=C.PRECISION)
    if xd.do is not None:
        dPd = tl.dot(V, tl.trans(dOd), dPd, input_precision=C.PRECISION)
    dot = RowStatsDot(dot.delta[None, :], dot.lse[None, :], dot.g_entropy[None, :], dot.mean[None, :])
    chain = scores_slope_and_curve(raw, i, j, head, C, True)
    P, PR, dS, dSd = softmax_double_backward(S, T, dP, dPd, chain, show, keep, along_rows(row), dot, head, C, HIDES)
    dV = tl.dot(PR.to(dO.dtype), dO, dV, input_precision=C.PRECISION)  # [BN, DVP]
    if xd.do is not None:
        dV = tl.dot(P.to(dO.dtype), dOd, dV, input_precision=C.PRECISION)
    dK = tl.dot(dSd.to(Q.dtype), Q, dK, input_precision=C.PRECISION)  # [BN, DP]
    if xd.q is not None:
        dK = tl.dot(dS.to(Q.dtype), Qd, dK, input_precision=C.PRECISION)
    return dK, dV


@triton.jit(do_not_specialize=["n", "m", "heads", "groups"])
def double_backward_dkdv(q, k, v, do, qd, kd, vd, dod, out, stats, args, n, m, heads, groups, C: tl.constexpr):
    """dK˙ and dV˙ of BN keys: program (block of keys, batch item and key head); its query heads one after the other."""
    strides, sizes = args.strides, Sizes(n, m, heads, groups)
    block, owner = program_tile(tl.cdiv(m, C.BN))
    kv_heads = heads // groups
    batch, kv_index = owner // kv_heads, owner % kv_heads
    head = Head(*head_at(args, sizes, batch, kv_index * groups, kv_index, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(None, k_at(k, head, strides.x, C), v_at(v, head, strides.x, C), None, strides.x, None)
    xd = Matrices(None, None if kd is None else k_at(kd, head, strides.x_dot, C), None if vd is None else v_at(vd, head, strides.x_dot, C), None, strides.x_dot, None)
    j = block * C.BN + tl.arange(0, C.BN)  # [BN]
    K, V = load_k(x, head, block * C.BN, C, True), load_v(x, head, block * C.BN, C, True)
    Kd, Vd = load_k(xd, head, block * C.BN, C, True), load_v(xd, head, block * C.BN, C, True)
    dK = tl.zeros([C.BN, C.DP], tl.float32)
    dV = tl.zeros([C.BN, C.DVP], tl.float32)
    for g in range(groups if C.GROUPED else 1):
        head_g = Head(*head_at(args, sizes, batch, kv_index * groups + g, kv_index, C), args.score, args.blocks, args.dropout, sizes)
        x_g = Matrices(q_at(q, head_g, strides.x, C), k_at(k, head_g, strides.x, C), v_at(v, head_g, strides.x, C), do_at(do, head_g, strides.do, C), strides.x, strides.do)
        xd_g = Matrices(None if qd is None else q_at(qd, head_g, strides.x_dot, C), None if kd is None else k_at(kd, head_g, strides.x_dot, C), None if vd is None else v_at(vd, head_g, strides.x_dot, C), None if dod is None else do_at(dod, head_g, strides.do_dot, C), strides.x_dot, strides.do_dot)
        dK, dV = over_rows(dkdv_dot_step, (dK, dV), (K, V, Kd, Vd, x_g, xd_g, head_g, stats, j), head_g, block, C)
    dK *= args.score.scale
    store_dkdv(out, dK, dV, batch, kv_index, kv_heads, j, m, C)


@triton.jit
def dq_dot_step(dQ, Q, dO, Qd, dOd, x, xd, head, rows, row, dot, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add to dQ˙ [BM, DP] what block b of the keys contributes."""
    m = head.sizes.m
    j = b * C.BN + tl.arange(0, C.BN)
    K, V = load_k(x, head, b * C.BN, C, MASKED), load_v(x, head, b * C.BN, C, MASKED)
    Kd, Vd = load_k(xd, head, b * C.BN, C, MASKED), load_v(xd, head, b * C.BN, C, MASKED)
    S = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)  # [BM, BN]
    T = tl.zeros([C.BM, C.BN], tl.float32)
    if xd.q is not None:
        T = tl.dot(Qd, tl.trans(K), T, input_precision=C.PRECISION)
    if xd.k is not None:
        T = tl.dot(Q, tl.trans(Kd), T, input_precision=C.PRECISION)
    raw = S
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    S, show = visible_logits(S, rows, j, slot, head, C, MASKED)
    if HIDES:
        K = zero_hidden_keys(K, show, head.blocks, head.batch, head.index, j, m, C.MASK, C.BIAS)
        Kd = zero_hidden_keys(Kd, show, head.blocks, head.batch, head.index, j, m, C.MASK, C.BIAS)
    keep = j
    if C.DROP:
        keep = dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound)
    dP = tl.dot(dO, tl.trans(V), input_precision=C.PRECISION)  # [BM, BN]
    dPd = tl.zeros([C.BM, C.BN], tl.float32)
    if xd.v is not None:
        dPd = tl.dot(dO, tl.trans(Vd), dPd, input_precision=C.PRECISION)
    if xd.do is not None:
        dPd = tl.dot(dOd, tl.trans(V), dPd, input_precision=C.PRECISION)
    dot = RowStatsDot(dot.delta[:, None], dot.lse[:, None], dot.g_entropy[:, None], dot.mean[:, None])
    chain = scores_slope_and_curve(raw, rows.i, j, head, C, False)
    P, PR, dS, dSd = softmax_double_backward(S, T, dP, dPd, chain, show, keep, down_columns(row), dot, head, C, HIDES)
    dQ = tl.dot(dSd.to(K.dtype), K, dQ, input_precision=C.PRECISION)  # [BM, DP]
    if xd.k is not None:
        dQ = tl.dot(dS.to(K.dtype), Kd, dQ, input_precision=C.PRECISION)
    return dQ


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "row_blocks"])
def double_backward_dq(q, k, v, do, qd, kd, vd, dod, out, stats, args, n, m, heads, groups, row_blocks, C: tl.constexpr):
    """dQ˙ of BM rows: program (block of rows, batch item and head)."""
    strides = args.strides
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(row_blocks)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    block = row_blocks - 1 - block
    x = Matrices(q_at(q, head, strides.x, C), k_at(k, head, strides.x, C), v_at(v, head, strides.x, C), do_at(do, head, strides.do, C), strides.x, strides.do)
    xd = Matrices(None if qd is None else q_at(qd, head, strides.x_dot, C), None if kd is None else k_at(kd, head, strides.x_dot, C), None if vd is None else v_at(vd, head, strides.x_dot, C), None if dod is None else do_at(dod, head, strides.do_dot, C), strides.x_dot, strides.do_dot)
    i = block * C.BM + tl.arange(0, C.BM)  # [BM]
    Q, dO = load_q(x, head, block * C.BM, C), load_do(x, head, block * C.BM, C)
    Qd, dOd = load_q(xd, head, block * C.BM, C), load_do(xd, head, block * C.BM, C)
    row = load_row_stats(stats, head, i, C)
    dot = load_row_stats_dot(stats, head, i, C)
    rows = load_row_tile(head, i, C, True)
    dQ = tl.zeros([C.BM, C.DP], tl.float32)
    dQ = over_keys(dq_dot_step, dQ, (Q, dO, Qd, dOd, x, xd, head, rows, row, dot), head, block, C)
    store_rows(out.dq, dQ * head.scale, head.first_row, i, n, C.D, C.DP)
