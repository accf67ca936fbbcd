"""Attention's backward pass, by recomputation, without atomics: the same bits every time.

With P = exp(S − lse), dP = dO Vᵀ and δ = Σ dO ∘ O − g_lse of each row, the derivatives through output, lse and entropy
fold into one matrix:

    dS = P ∘ (dP − δ − g_H · (S − mean)),   dV = Pᵀ dO,   dQ = scale · dS K,   dK = scale · dSᵀ Q

where mean = E_p[S] (less the sink's share). `backward_dkdv` holds BN keys and goes over rows; `backward_dq` holds BM rows
and goes over keys. Tiles of `backward_dkdv` are transposed, Sᵀ [BN, BM], so that Pᵀ and dSᵀ multiply from registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import Sizes
from .aggregates import Head, Matrices, RowStats
from .program import (
    additive_scores,
    at_head,
    head_scale,
    load_do,
    load_k,
    load_q,
    load_row_stats,
    load_row_tile,
    load_v,
    needed_blocks,
    visible_logits,
    visible_logits_transposed,
)
from .tile_ops import (
    _BIAS_NONE,
    _NONE,
    DEEP,
    LN2,
    LOG2E,
    dropout_keep,
    full_block,
    load_rows,
    partial_block,
    program_tile,
    quick_tanh,
    row_offset,
    tanh,
    zero_hidden_keys,
)


@triton.jit(do_not_specialize=["n", "heads"])
def backward_preprocess(do, g_lse, out, delta, lse, strides, n, heads, C: tl.constexpr):
    """δ = Σ dO ∘ O − g_lse, and lse in the units of exponents (+inf where nothing is attended to): [BM] per block of rows."""
    do_strides = strides.do
    block, owner = program_tile(tl.cdiv(n, C.BM))
    index = owner % heads
    batch = owner // heads
    i = block * C.BM + tl.arange(0, C.BM)
    wide = i.to(tl.int64)
    o = out.output + batch.to(tl.int64) * strides.x.o_batch + index.to(tl.int64) * strides.x.o_head
    O = load_rows(o, wide * strides.x.o_row, i < n, C.DV, 1, C.DVP, True)
    do = do + batch.to(tl.int64) * do_strides.batch + index.to(tl.int64) * do_strides.head
    dO = load_rows(do, wide * do_strides.row, i < n, C.DV, do_strides.dim, C.DVP, True)
    d = tl.sum(O.to(tl.float32) * dO.to(tl.float32), 1)  # [BM]
    at = (batch.to(tl.int64) * heads + index) * n + i
    if g_lse is not None:
        d -= tl.load(g_lse + at, mask=i < n, other=0.0)
    tl.store(delta + at, d, mask=i < n)
    offset = row_offset(tl.load(out.max_logit + at, mask=i < n, other=0.0), C.FAST)
    log_row_sum = tl.load(out.log_row_sum + at, mask=i < n, other=0.0)
    tl.store(lse + at, offset + (log_row_sum * LOG2E if C.FAST else log_row_sum), mask=i < n)


@triton.jit
def down_columns(row):
    """Row statistics [BM] as [BM, 1], for tiles [BM, BN]."""
    return RowStats(row.offset[:, None], row.log_sum[:, None], row.delta[:, None], row.g_entropy[:, None], row.mean[:, None])


@triton.jit
def along_rows(row):
    """Row statistics [BM] as [1, BM], for transposed tiles [BN, BM]."""
    return RowStats(row.offset[None, :], row.log_sum[None, :], row.delta[None, :], row.g_entropy[None, :], row.mean[None, :])


@triton.jit
def softmax_backward(S, dP, raw, show, keep, row, head, C: tl.constexpr, HIDES: tl.constexpr):
    """P with dropout applied, and dS of the logits and of the raw scores; the row statistics broadcast to S."""
    T = S * head.unit - row.offset if C.FAST else (S - row.offset) * LOG2E  # log2 of the weight, but for the denominator
    if C.ENTROPY:
        T = tl.maximum(T, DEEP)  # finite, so that P·T is 0 and not NaN
    P = tl.exp2(T - row.log_sum) if C.EXACT else tl.exp2(T)
    if HIDES:
        P = tl.where(show, P, 0.0)
    Pd = P
    if C.DROP:
        Pd = tl.where(keep, P * head.dropout.factor, 0.0)
        dP = tl.where(keep, dP * head.dropout.factor, 0.0)
    dS = dP - row.delta
    if C.ENTROPY:
        dS -= row.g_entropy * (T * LN2 - row.mean)
    dS = P * dS
    if HIDES:
        dS = tl.where(show, dS, 0.0)
    dRaw = dS
    if C.CAP:
        t = tanh(raw * head.scale / head.score.cap)
        dRaw = dS * (1.0 - t * t)
        if HIDES:
            dRaw = tl.where(show, dRaw, 0.0)
    return Pd, dS, dRaw


@triton.jit
def dkdv_step(dK, dV, K, V, x, head, stats, j, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add to dK and dV [BN, …] what block b of the rows contributes."""
    n, m = head.sizes.n, head.sizes.m
    i = b * C.BM + tl.arange(0, C.BM)
    rows = load_row_tile(head, i, C, MASKED)
    dO = load_do(x, head, b * C.BM, C)
    Q = dO
    if C.HIDDEN_DIM > 0:
        S = tl.trans(additive_scores(x, head, i, j, C))
    else:
        Q = load_q(x, head, b * C.BM, C)
        S = tl.dot(K, tl.trans(Q), input_precision=C.PRECISION)  # [BN, BM]
    raw = S
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    S, show = visible_logits_transposed(S, rows, j, slot, head, C, MASKED)
    row = load_row_stats(stats, head, i, C)
    if HIDES and C.HIDDEN_DIM == 0:  # a row that attends to nothing leaves no trace, not even a NaN
        Q = tl.where((row.offset < float("inf"))[:, None], Q, 0.0)
    keep = j
    if C.DROP:
        keep = tl.trans(dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound))
    dP = tl.dot(V, tl.trans(dO), input_precision=C.PRECISION)  # [BN, BM]
    P, dS, dRaw = softmax_backward(S, dP, raw, show, keep, along_rows(row), head, C, HIDES)
    dV = tl.dot(P.to(dO.dtype), dO, dV, input_precision=C.PRECISION)  # [BN, DVP]
    if C.HIDDEN_DIM > 0:
        channel = tl.arange(0, C.DP)
        for c in range(C.HIDDEN_DIM):
            a = tl.load(x.q + i.to(tl.int64) * x.strides.q_row + c * x.strides.q_dim, mask=i < n, other=0.0)  # [BM]
            b_c = tl.load(x.k + j.to(tl.int64) * x.strides.k_row + c * x.strides.k_dim, mask=j < m, other=0.0)  # [BN]
            t = quick_tanh(b_c[:, None] + a[None, :], C.APPROXIMATE)  # [BN, BM]
            if HIDES:
                t = tl.where(show, t, 0.0)
            g_c = tl.sum(dRaw * (1.0 - t * t), 1) * tl.load(head.score.vector + c)  # [BN]
            dK = tl.where((channel == c)[None, :], dK + g_c[:, None], dK)
    else:
        if not C.FAST:  # heads may have different scales
            dRaw *= head.scale
        dK = tl.dot(dRaw.to(Q.dtype), Q, dK, input_precision=C.PRECISION)  # [BN, DP]
    return dK, dV


@triton.jit
def store_dkdv(out, dK, dV, batch, kv_index, kv_heads, j, m, C: tl.constexpr):
    """Store dK and dV of the keys j."""
    at = (batch.to(tl.int64) * kv_heads + kv_index) * m + j.to(tl.int64)
    d = tl.arange(0, C.DP)
    tl.store(out.dk + (at[:, None] * C.D + d[None, :]), dK.to(out.dk.dtype.element_ty), mask=(j < m)[:, None] & (d < C.D)[None, :])
    d = tl.arange(0, C.DVP)
    tl.store(out.dv + (at[:, None] * C.DV + d[None, :]), dV.to(out.dv.dtype.element_ty), mask=(j < m)[:, None] & (d < C.DV)[None, :])


@triton.jit(do_not_specialize=["n", "m", "heads", "groups"])
def backward_dkdv(q, k, v, do, out, stats, args, n, m, heads, groups, C: tl.constexpr):
    """dK and dV of BN keys: program (block of keys, batch item and key head); its query heads one after the other."""
    strides, do_strides = args.strides.x, args.strides.do
    score, blocks, dropout = args.score, args.blocks, args.dropout
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(tl.cdiv(m, C.BN))
    kv_heads = heads // groups
    kv_index = owner % kv_heads
    batch = owner // kv_heads
    k = at_head(k, batch, kv_index, strides.k_batch, strides.k_head, C)
    v = at_head(v, batch, kv_index, strides.v_batch, strides.v_head, C)
    x = Matrices(q, k, v, do, strides, do_strides)
    j = block * C.BN + tl.arange(0, C.BN)  # [BN]
    K = j
    if C.HIDDEN_DIM == 0:
        K = load_k(x, batch, kv_index, block * C.BN, m, C, True)
    V = load_v(x, batch, kv_index, block * C.BN, m, C, True)
    dK = tl.zeros([C.BN, C.DP], tl.float32)
    dV = tl.zeros([C.BN, C.DVP], tl.float32)
    for g in range(groups if C.GROUPED else 1):
        index = kv_index * groups + g
        scale = head_scale(score, index, C)
        first_row = (batch.to(tl.int64) * heads + index) * n
        head = Head(batch, index, kv_index, first_row, scale, scale * LOG2E, score, blocks, dropout, sizes)
        q_g = at_head(q, batch, index, strides.q_batch, strides.q_head, C)
        do_g = at_head(do, batch, index, do_strides.batch, do_strides.head, C)
        x_g = Matrices(q_g, k, v, do_g, strides, do_strides)
        first, full, full_end, partials = needed_blocks(head, block, tl.cdiv(n, C.BM), tl.cdiv(n, C.BM), C)
        for t in range(full, full_end):
            dK, dV = dkdv_step(dK, dV, K, V, x_g, head, stats, j, full_block(blocks, t, C.MASK), 0, C, False)
        if C.MASK != _NONE:
            for t in range(partials):
                b, slot = partial_block(blocks, t, first, full, full_end, C.MASK)
                dK, dV = dkdv_step(dK, dV, K, V, x_g, head, stats, j, b, slot, C, True)
    if C.FAST:
        dK *= score.scale
    store_dkdv(out, dK, dV, batch, kv_index, kv_heads, j, m, C)


@triton.jit
def dq_step(dQ, dW, Q, dO, x, head, rows, row, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add to dQ [BM, DP] what block b of the keys contributes; for the additive score to dW too."""
    n, m = head.sizes.n, head.sizes.m
    i = rows.i
    j = b * C.BN + tl.arange(0, C.BN)
    K = j
    if C.HIDDEN_DIM > 0:
        S = additive_scores(x, head, i, j, C)
    else:
        K = load_k(x, head.batch, head.kv_index, b * C.BN, m, C, MASKED)
        S = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)  # [BM, BN]
    V = load_v(x, head.batch, head.kv_index, b * C.BN, m, C, MASKED)
    raw = S
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    S, show = visible_logits(S, rows, j, slot, head, C, MASKED)
    if HIDES and C.HIDDEN_DIM == 0:
        K = zero_hidden_keys(K, show, head.blocks, head.batch, head.index, j, m, C.MASK, C.BIAS)
    keep = j
    if C.DROP:
        keep = dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound)
    dP = tl.dot(dO, tl.trans(V), input_precision=C.PRECISION)  # [BM, BN]
    P, dS, dRaw = softmax_backward(S, dP, raw, show, keep, down_columns(row), head, C, HIDES)
    if C.HIDDEN_DIM > 0:
        channel = tl.arange(0, C.DP)
        for c in range(C.HIDDEN_DIM):
            a = tl.load(x.q + i.to(tl.int64) * x.strides.q_row + c * x.strides.q_dim, mask=i < n, other=0.0)  # [BM]
            b_c = tl.load(x.k + j.to(tl.int64) * x.strides.k_row + c * x.strides.k_dim, mask=j < m, other=0.0)  # [BN]
            t = quick_tanh(a[:, None] + b_c[None, :], C.APPROXIMATE)  # [BM, BN]
            if HIDES:
                t = tl.where(show, t, 0.0)
            g_c = tl.sum(dRaw * (1.0 - t * t), 1) * tl.load(head.score.vector + c)  # [BM]
            dQ = tl.where((channel == c)[None, :], dQ + g_c[:, None], dQ)
            dW = tl.where((channel == c)[None, :], dW + tl.sum(dRaw * t, 1)[:, None], dW)
    else:
        dQ = tl.dot(dRaw.to(K.dtype), K, dQ, input_precision=C.PRECISION)  # [BM, DP]
    return dQ, dW


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "row_blocks"])
def backward_dq(q, k, v, do, out, stats, args, n, m, heads, groups, row_blocks, C: tl.constexpr):
    """dQ of BM rows: program (block of rows, batch item and head); for the additive score each row's share of d vector too."""
    strides, do_strides = args.strides.x, args.strides.do
    score, blocks, dropout = args.score, args.blocks, args.dropout
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(row_blocks)
    block = row_blocks - 1 - block
    batch, index = owner // heads, owner % heads
    kv_index = index // groups
    scale = head_scale(score, index, C)
    first_row = (batch.to(tl.int64) * heads + index) * n
    head = Head(batch, index, kv_index, first_row, scale, scale * LOG2E, score, blocks, dropout, sizes)
    q = at_head(q, batch, index, strides.q_batch, strides.q_head, C)
    k = at_head(k, batch, kv_index, strides.k_batch, strides.k_head, C)
    v = at_head(v, batch, kv_index, strides.v_batch, strides.v_head, C)
    do = at_head(do, batch, index, do_strides.batch, do_strides.head, C)
    x = Matrices(q, k, v, do, strides, do_strides)
    i = block * C.BM + tl.arange(0, C.BM)  # [BM]
    Q = i
    if C.HIDDEN_DIM == 0:
        Q = load_q(x, head, block * C.BM, C)
    dO = load_do(x, head, block * C.BM, C)
    row = load_row_stats(stats, head, i, C)
    rows = load_row_tile(head, i, C, True)
    dQ = tl.zeros([C.BM, C.DP], tl.float32)
    dW = dQ if C.HIDDEN_DIM > 0 else row.delta
    first, full, full_end, partials = needed_blocks(head, block, tl.cdiv(m, C.BN), m // C.BN, C)
    for t in range(full, full_end):
        dQ, dW = dq_step(dQ, dW, Q, dO, x, head, rows, row, full_block(blocks, t, C.MASK), 0, C, False)
    for t in range(partials):
        b, slot = partial_block(blocks, t, first, full, full_end, C.MASK)
        dQ, dW = dq_step(dQ, dW, Q, dO, x, head, rows, row, b, slot, C, True)
    if C.HIDDEN_DIM == 0:
        if not C.SCALES:  # with a tensor of scales it stays raw, for their derivative
            dQ *= scale
    d = tl.arange(0, C.DP)
    at = (first_row + i.to(tl.int64))[:, None] * C.D + d[None, :]
    tl.store(out.dq + at, dQ.to(out.dq.dtype.element_ty), mask=(i < n)[:, None] & (d < C.D)[None, :])
    if C.HIDDEN_DIM > 0:
        tl.store(out.vector + at, dW, mask=(i < n)[:, None] & (d < C.D)[None, :])
