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
    program_head,
    q_at,
    raw_scores,
    raw_scores_transposed,
    scores_and_slope,
    store_rows,
    v_at,
    visible_logits,
    visible_logits_transposed,
)
from .tile_ops import (
    _BIAS_NONE,
    LN2,
    LOG2E,
    PACK,
    clamp_exponent,
    dropout_keep,
    load_rows,
    program_tile,
    quick_tanh,
    read_four,
    row_offset,
    select_in_spans,
    tanh,
    zero_hidden_keys,
)


@triton.jit(do_not_specialize=["n", "heads"])
def backward_preprocess(do, g_lse, out, delta, lse, empty, strides, n, heads, C: tl.constexpr):
    """δ = Σ dO ∘ O − g_lse, and lse in the units of exponents (+inf where nothing is attended to): [BM] per block of rows.

    Also whether some row of the block attends to nothing.
    """
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
    own = offset + (log_row_sum * LOG2E if C.FAST else log_row_sum)
    tl.store(lse + at, own, mask=i < n)
    tl.store(empty + tl.program_id(0), tl.max((own == float("inf")).to(tl.int32), 0))


@triton.jit
def folded(row, C: tl.constexpr):
    """Row statistics as `softmax_backward` takes them: with δ + g_H · mean for δ, and in log2 units lse and g_H."""
    offset, delta, g_entropy = row.offset, row.delta, row.g_entropy
    if not C.FAST and not C.EXACT:
        offset = offset * LOG2E
    if C.ENTROPY:
        delta = delta - g_entropy * row.mean
        g_entropy = g_entropy * LN2
    return RowStats(offset, row.log_sum, delta, g_entropy, row.mean)


@triton.jit(do_not_specialize=["n"])
def pack_row_stats(stats, out, n, C: tl.constexpr):
    """Folded offset, δ and g_H of each row side by side, since `backward_dkdv` reads them at every step: program (block of rows, head)."""
    block, owner = program_tile(tl.cdiv(n, PACK))
    i = block * PACK + tl.arange(0, PACK)
    at = owner.to(tl.int64) * n + i
    offset = tl.load(stats.row_max + at, mask=i < n, other=float("inf"))
    delta = tl.load(stats.delta + at, mask=i < n, other=0.0)
    g_entropy, mean = delta, delta
    if C.ENTROPY:
        g_entropy = tl.load(stats.g_entropy + at, mask=i < n, other=0.0)
        mean = tl.load(stats.mean + at, mask=i < n, other=0.0)
    row = folded(RowStats(offset, offset, delta, g_entropy, mean), C)
    to = out + (owner.to(tl.int64) * tl.cdiv(n, PACK) * PACK + i) * 4
    tl.store(to, row.offset)
    tl.store(to + 1, row.delta)
    tl.store(to + 2, row.g_entropy)
    tl.store(to + 3, row.g_entropy)


@triton.jit
def load_folded(stats, head, i0, C: tl.constexpr):
    """Folded statistics of the rows i0 … i0 + BM, [BM] each."""
    n = head.sizes.n
    if C.PACKED:
        owner = head.batch.to(tl.int64) * head.sizes.heads + head.index
        at = stats.packed + (owner * tl.cdiv(n, PACK) * PACK + i0) * 4 + tl.arange(0, C.BM) * 4
        offset, delta, g_entropy, _ = read_four(at, True)
        row = RowStats(offset, offset, delta, g_entropy, delta)
    else:
        row = folded(load_row_stats(stats, head, i0 + tl.arange(0, C.BM), C), C)
    return row


@triton.jit
def down_columns(row):
    """Row statistics [BM] as [BM, 1], for tiles [BM, BN]."""
    return RowStats(row.offset[:, None], row.log_sum[:, None], row.delta[:, None], row.g_entropy[:, None], row.mean[:, None])


@triton.jit
def along_rows(row):
    """Row statistics [BM] as [1, BM], for transposed tiles [BN, BM]."""
    return RowStats(row.offset[None, :], row.log_sum[None, :], row.delta[None, :], row.g_entropy[None, :], row.mean[None, :])


@triton.jit
def softmax_backward(S, dP, score, slope, show, span, keep, row, head, C: tl.constexpr, HIDES: tl.constexpr):
    """P with dropout applied, and dS of the logits and of the raw scores; the row statistics are folded, and broadcast to S.

    `score` and `slope` are those of `scores_and_slope`. If BY_SPAN, `span` has the keys and the spans instead of `show`.
    """
    # log2 of the weight, but for the denominator
    T = (S - row.offset) * LOG2E if C.EXACT and not C.FAST else S * (head.unit if C.FAST else LOG2E) - row.offset
    if C.ENTROPY:
        T = clamp_exponent(T)  # finite, so that P·T is 0 and not NaN
    P = tl.exp2(T - row.log_sum) if C.EXACT else tl.exp2(T)
    if C.DROP:
        dP = tl.where(keep, dP * head.dropout.factor, 0.0)
    dS = dP - row.delta
    if C.ENTROPY:
        dS -= row.g_entropy * T
    dS = P * dS
    if HIDES and C.BY_SPAN:
        P, dS = select_in_spans(P, dS, *span, 0.0, C.PTX)
    elif HIDES:
        P, dS = tl.where(show, P, 0.0), tl.where(show, dS, 0.0)
    Pd = P
    if C.DROP:
        Pd = tl.where(keep, P * head.dropout.factor, 0.0)
    dRaw = dS
    if C.CAP:
        t = tanh(score / head.score.cap)
        dRaw = dS * (1.0 - t * t)
        if HIDES:
            dRaw = tl.where(dS == 0.0, 0.0, dRaw)
    if C.SLOPED:  # a slope may be inf or NaN where a pair is hidden, or has no weight
        if HIDES or not C.BOUNDED:
            dRaw = tl.where(dRaw == 0.0, 0.0, dRaw * slope)
        else:
            dRaw = dRaw * slope
    return Pd, dS, dRaw


@triton.jit
def dkdv_step(sums, K, V, x, head, stats, j, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add to dK and dV [BN, …] what block b of the rows contributes."""
    dK, dV = sums
    n, m = head.sizes.n, head.sizes.m
    i = b * C.BM + tl.arange(0, C.BM)
    rows = load_row_tile(head, i, C, MASKED)
    row = load_folded(stats, head, b * C.BM, C)
    dO = load_do(x, head, b * C.BM, C)
    Q = load_q(x, head, b * C.BM, C)
    raw = raw_scores_transposed(Q, K, x, head, i, j, C)  # [BN, BM]
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    S, show = visible_logits_transposed(raw, rows, j, slot, head, C, MASKED and not C.BY_SPAN)
    if HIDES and C.HIDDEN_DIM == 0:  # a row that attends to nothing leaves no trace, not even a NaN
        Q = tl.where((row.offset < float("inf"))[:, None], Q, 0.0)
    keep = j
    if C.DROP:
        keep = tl.trans(dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound))
    dP = tl.dot(V, tl.trans(dO), input_precision=C.PRECISION)  # [BN, BM]
    score, slope = scores_and_slope(raw, i, j, head, C, True)
    span = (j[:, None], rows.lo[None, :], rows.hi[None, :])
    P, dS, dRaw = softmax_backward(S, dP, score, slope, show, span, keep, along_rows(row), head, C, HIDES)
    if C.WANTS_DV:
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
    elif C.WANTS_DK:
        if C.SCALES:  # by head
            dRaw *= head.scale
        dK = tl.dot(dRaw.to(Q.dtype), Q, dK, input_precision=C.PRECISION)  # [BN, DP]
    return dK, dV


@triton.jit
def store_dkdv(out, dK, dV, batch, kv_index, kv_heads, j, m, C: tl.constexpr):
    """Store dK and dV of the keys j."""
    first = (batch.to(tl.int64) * kv_heads + kv_index) * m
    if C.WANTS_DK:
        store_rows(out.dk, dK, first, j, m, C.D, C.DP)
    if C.WANTS_DV:
        store_rows(out.dv, dV, first, j, m, C.DV, C.DVP)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups"])
def backward_dkdv(q, k, v, do, out, stats, args, n, m, heads, groups, C: tl.constexpr):
    """dK and dV of BN keys, or one of them: program (block of keys, batch item and key head); its query heads one after the other."""
    strides, sizes = args.strides, Sizes(n, m, heads, groups)
    block, owner = program_tile(tl.cdiv(m, C.BN))
    kv_heads = heads // groups
    batch, kv_index = owner // kv_heads, owner % kv_heads
    head = Head(*head_at(args, sizes, batch, kv_index * groups, kv_index, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(None, k_at(k, head, strides.x, C), v_at(v, head, strides.x, C), None, strides.x, None)
    j = block * C.BN + tl.arange(0, C.BN)  # [BN]
    K = load_k(x, head, block * C.BN, C, True)
    V = load_v(x, head, block * C.BN, C, True)
    dK, dV = 0.0, 0.0
    if C.WANTS_DK:
        dK = tl.zeros([C.BN, C.DP], tl.float32)
    if C.WANTS_DV:
        dV = tl.zeros([C.BN, C.DVP], tl.float32)
    for g in range(groups if C.GROUPED else 1):
        head_g = Head(*head_at(args, sizes, batch, kv_index * groups + g, kv_index, C), args.score, args.blocks, args.dropout, sizes)
        x_g = Matrices(q_at(q, head_g, strides.x, C), k_at(k, head_g, strides.x, C), v_at(v, head_g, strides.x, C), do_at(do, head_g, strides.do, C), strides.x, strides.do)
        dK, dV = over_rows(dkdv_step, (dK, dV), (K, V, x_g, head_g, stats, j), head_g, block, C)
    if C.WANTS_DK and C.HIDDEN_DIM == 0 and not C.SCALES:
        dK *= args.score.scale
    store_dkdv(out, dK, dV, batch, kv_index, kv_heads, j, m, C)


@triton.jit
def dq_step(sums, Q, dO, x, head, rows, row, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add to dQ [BM, DP] what block b of the keys contributes; for the additive score to dW too."""
    dQ, dW = sums
    n, m = head.sizes.n, head.sizes.m
    i = rows.i
    j = b * C.BN + tl.arange(0, C.BN)
    K = load_k(x, head, b * C.BN, C, MASKED)
    raw = raw_scores(Q, K, x, head, i, j, C)  # [BM, BN]
    V = load_v(x, head, b * C.BN, C, MASKED)
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    S, show = visible_logits(raw, rows, j, slot, head, C, MASKED and not C.BY_SPAN)
    if HIDES and C.HIDDEN_DIM == 0:
        K = zero_hidden_keys(K, show, head.blocks, head.batch, head.index, j, m, C.MASK, C.BIAS)
    keep = j
    if C.DROP:
        keep = dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound)
    dP = tl.dot(dO, tl.trans(V), input_precision=C.PRECISION)  # [BM, BN]
    score, slope = scores_and_slope(raw, i, j, head, C, False)
    span = (j[None, :], rows.lo[:, None], rows.hi[:, None])
    P, dS, dRaw = softmax_backward(S, dP, score, slope, show, span, keep, down_columns(row), head, C, HIDES)
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
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(row_blocks)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    block = row_blocks - 1 - block
    x = Matrices(q_at(q, head, args.strides.x, C), k_at(k, head, args.strides.x, C), v_at(v, head, args.strides.x, C), do_at(do, head, args.strides.do, C), args.strides.x, args.strides.do)
    i = block * C.BM + tl.arange(0, C.BM)  # [BM]
    Q = load_q(x, head, block * C.BM, C)
    dO = load_do(x, head, block * C.BM, C)
    row = folded(load_row_stats(stats, head, i, C), C)
    rows = load_row_tile(head, i, C, True)
    dQ = tl.zeros([C.BM, C.DP], tl.float32)
    dW = dQ if C.HIDDEN_DIM > 0 else row.delta
    dQ, dW = over_keys(dq_step, (dQ, dW), (Q, dO, x, head, rows, row), head, block, C)
    if C.HIDDEN_DIM == 0 and not C.SCALES:  # with a tensor of scales it stays raw, for their derivative
        dQ *= head.scale
    store_rows(out.dq, dQ, head.first_row, i, n, C.D, C.DP)
    if C.HIDDEN_DIM > 0:
        store_rows(out.vector, dW, head.first_row, i, n, C.D, C.DP)
