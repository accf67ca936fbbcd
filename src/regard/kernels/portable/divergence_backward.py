"""The backward pass of a divergence between two attentions p and r, by recomputation, without atomics: the same bits every time.

    dS_p = g · p ∘ (A − Σ p·A)        dS_r = g · (r∘B − r · Σ r·B)

where A and B are the derivatives of the divergence by p and r, as `pair_terms` has them: for KL, A = ln p − ln r and r∘B = −p.
`divergence_dq` holds rows and goes over keys, `divergence_dk` holds keys and goes over rows; both have both sides at once.
Before them `pack_rows` writes what they know of a row side by side, since a kernel that goes over rows reads it at every step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import Sizes
from .aggregates import Head, Matrices
from .divergence import (
    _EPSILON,
    _JS,
    _KL,
    FAR,
    SMALLEST,
    PairRows,
    Side,
    Sums,
    finite_lse,
    mixing_floor,
    nats,
    over_both,
    pair_terms,
    quick_log2,
    side_logits,
    side_tile,
    unit_of,
)
from .program import (
    head_at,
    k_at,
    load_k,
    load_q,
    load_row_tile,
    over_keys,
    over_rows,
    program_head,
    q_at,
    store_rows,
)
from .tile_ops import DEEP, LOG2E, PACK, program_tile, read_four, select_in_spans, tanh, zero_hidden_keys


@triton.jit(do_not_specialize=["n"])
def pack_rows(rows, g, floors, out, n, C: tl.constexpr):
    """lse of both sides, g and Σ p·A in the units of A; unless it is KL, then Σ r·B, and the floor: program (block of rows, head).

    An infinite row has no gradient. For KL Σ r·B = −Σ p = −1.
    """
    block, owner = program_tile(tl.cdiv(n, PACK))
    i = block * PACK + tl.arange(0, PACK)
    at = owner.to(tl.int64) * n + i
    lse_p = tl.load(rows.lse_p + at, mask=i < n, other=float("-inf"))
    lse_r = tl.load(rows.lse_r + at, mask=i < n, other=float("-inf"))
    g = tl.load(g + at, mask=i < n, other=0.0)
    to = out + (owner.to(tl.int64) * tl.cdiv(n, PACK) * PACK + i) * C.WIDTH
    if C.KIND == _KL:
        p_delta = tl.load(rows.value + at, mask=i < n, other=0.0)
        g = tl.where((p_delta == float("inf")) | (lse_p == float("-inf")), 0.0, g)
        p_delta = tl.where(p_delta == float("inf"), 0.0, p_delta)
    else:
        p_delta = tl.load(rows.delta_p + at, mask=i < n, other=0.0)
        r_delta = tl.load(rows.delta_r + at, mask=i < n, other=0.0)
        tl.store(to + 4, r_delta / nats(C) if C.KIND == _JS else r_delta)
        if C.KIND == _EPSILON:
            tl.store(to + 5, mixing_floor(tl.load(floors + at, mask=i < n, other=0.0), C))
    tl.store(to, finite_lse(lse_p))
    tl.store(to + 1, finite_lse(lse_r))
    tl.store(to + 2, g * nats(C))
    tl.store(to + 3, p_delta / nats(C))


@triton.jit
def load_pair_rows(stats, owner, i0, n, BM: tl.constexpr, C: tl.constexpr):
    """What the backward pass knows of the rows i0 … i0 + BM of a batch item and head, [BM, 1] each."""
    at = stats.packed + (owner.to(tl.int64) * tl.cdiv(n, PACK) * PACK + i0) * C.WIDTH + tl.arange(0, BM) * C.WIDTH
    lse_p, lse_r, g, p_delta = read_four(at, C.PTX)
    r_delta, floor = g, g
    if C.KIND != _KL:
        r_delta, floor, _, _ = read_four(at + 4, C.PTX)
    return PairRows(lse_p[:, None], lse_r[:, None], g[:, None], p_delta[:, None], r_delta[:, None], floor[:, None])


@triton.jit
def capped(dS, raw, head, C: tl.constexpr):
    """The derivative of the raw products, from that of the logits."""
    if C.CAP:
        t = tanh(raw * head.scale / head.score.cap)
        dS = dS * (1.0 - t * t)
    return dS


@triton.jit
def shifted(row):
    """For JS: rows by which a tile has dS up to a factor of each row and side, and these factors.

    With x̃ = x − Σ p·A in place of the log weight, dS_p is the factor times 2^x̃ · (x̃ − log m), two operations less for each pair.
    """
    a, b = tl.exp2(row.p_delta), tl.exp2(row.r_delta)
    by = PairRows(row.lse_p + row.p_delta, row.lse_r + row.r_delta, row.g, 0.5 * a, 0.5 * b, row.floor)
    return by, row.g * a, row.g * b


@triton.jit
def pair_backward(
    S_p, S_r, show_p, show_r, row, mix, p, r,
    P: tl.constexpr, R: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """dS of both sides, for row statistics that are broadcast to the tile; anything where hidden. For KL that of r is times ln 2.

    SHIFTED rows are those of `shifted`.
    """
    X_p, X_r = S_p * unit_of(p.head, P) - row.lse_p, S_r * unit_of(r.head, R) - row.lse_r
    if MASKED and not P.LISTED:  # where one side alone is hidden, the other has a derivative
        X_p, X_r = tl.where(show_p, X_p, DEEP), tl.where(show_r, X_r, DEEP)
    if C.KIND == _KL:
        weight = tl.exp2(X_p)
        dS_p = weight * (row.g * (X_p - X_r) - row.g * row.p_delta)
        dS_r = row.g * (tl.exp2(X_r) - weight)
    elif SHIFTED:
        p, r = tl.exp2(X_p), tl.exp2(X_r)
        log_m = quick_log2(p * row.p_delta + (r * row.r_delta + SMALLEST), C)
        dS_p, dS_r = p * (X_p - log_m), r * (X_r - log_m)
    else:
        found = pair_terms(X_p, X_r, row.floor, mix.kept, C)
        dS_p = found.p * (row.g * found.A - row.g * row.p_delta)
        if C.KIND == _JS:
            dS_r = found.r * (row.g * found.B - row.g * row.r_delta)
        else:
            g = row.g * LOG2E
            dS_r = g * found.rB - (g * row.r_delta) * found.r
    return dS_p, dS_r


@triton.jit
def scale_of_r(scale, C: tl.constexpr):
    """What the sums of dS_r are multiplied by."""
    return scale * LOG2E if C.KIND == _KL else scale


@triton.jit
def add_dq(dQ, dS, show, K, b, head, C: tl.constexpr, MASKED: tl.constexpr):
    """dQ of a side with what block b of its keys contributes."""
    if MASKED:
        j = b * C.BN + tl.arange(0, C.BN)
        K = zero_hidden_keys(K, show, head.blocks, head.batch, head.index, j, head.sizes.m, C.MASK, C.BIAS)
    return tl.dot(dS.to(K.dtype), K, dQ, input_precision=C.PRECISION)


@triton.jit
def dq_step(sums, p, r, row, mix, i0, R: tl.constexpr, C: tl.constexpr, b, slot, P: tl.constexpr, MASKED: tl.constexpr):
    """Add to dQ of both sides what block b of the keys contributes."""
    dQ_p, dQ_r = sums.p, sums.r
    raw_p, S_p, show_p, K_p = side_tile(p, b, i0, slot, P, MASKED)
    raw_r, S_r, show_r, K_r = side_tile(r, b, i0, slot, R, MASKED)
    dS_p, dS_r = pair_backward(S_p, S_r, show_p, show_r, row, mix, p, r, P, R, C, MASKED, C.KIND == _JS and C.QUICK)
    dS_p, dS_r = capped(dS_p, raw_p, p.head, P), capped(dS_r, raw_r, r.head, R)
    if MASKED and P.BY_SPAN:
        j = b * P.BN + tl.arange(0, P.BN)
        dS_p, dS_r = select_in_spans(dS_p, dS_r, j[None, :], p.rows.lo[:, None], p.rows.hi[:, None], 0.0, C.PTX)
    elif MASKED:
        dS_p, dS_r = tl.where(show_p, dS_p, 0.0), tl.where(show_r, dS_r, 0.0)
    if C.NEEDS_P:
        dQ_p = add_dq(dQ_p, dS_p, show_p, K_p, b, p.head, P, MASKED)
    if C.NEEDS_R:
        dQ_r = add_dq(dQ_r, dS_r, show_r, K_r, b, r.head, R, MASKED)
    return Sums(dQ_p, dQ_r)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups_p", "groups_r", "row_blocks"])
def divergence_dq(
    q_p, k_p, q_r, k_r, out, stats, args_p, args_r, n, m, heads, groups_p, groups_r, row_blocks,
    P: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dQ of BM rows of both sides: program (block of rows, batch item and head)."""
    block, owner = program_tile(row_blocks)
    block = row_blocks - 1 - block
    i = block * P.BM + tl.arange(0, P.BM)
    sizes_p, sizes_r = Sizes(n, m, heads, groups_p), Sizes(n, m, heads, groups_r)
    head_p = Head(*program_head(args_p, sizes_p, owner, P), args_p.score, args_p.blocks, None, sizes_p)
    head_r = Head(*program_head(args_r, sizes_r, owner, R), args_r.score, args_r.blocks, None, sizes_r)
    x_p = Matrices(q_at(q_p, head_p, args_p.strides, P), k_at(k_p, head_p, args_p.strides, P), None, None, args_p.strides, None)
    x_r = Matrices(q_at(q_r, head_r, args_r.strides, R), k_at(k_r, head_r, args_r.strides, R), None, None, args_r.strides, None)
    p = Side(load_q(x_p, head_p, block * P.BM, P), x_p, head_p, load_row_tile(head_p, i, P, True))
    r = Side(load_q(x_r, head_r, block * P.BM, R), x_r, head_r, load_row_tile(head_r, i, R, True))
    first_row = p.head.first_row
    row, mix = load_pair_rows(stats, owner, block * P.BM, n, P.BM, C), stats.mix
    dQ_p = tl.zeros([P.BM, P.DP], tl.float32) if C.NEEDS_P else row.g
    dQ_r = tl.zeros([R.BM, R.DP], tl.float32) if C.NEEDS_R else row.g
    sums = Sums(dQ_p, dQ_r)
    scale_p, scale_r = args_p.score.scale, scale_of_r(args_r.score.scale, C)
    if C.KIND == _JS and C.QUICK:
        row, g_p, g_r = shifted(row)
        scale_p, scale_r = scale_p * g_p, scale_r * g_r
    sums = over_both(over_keys, dq_step, sums, (p, r, row, mix, block * P.BM, R, C), p, r, block, tl.cdiv(m, P.BN), P, R)
    if C.NEEDS_P:
        store_rows(out.p, sums.p * scale_p, first_row, i, n, P.D, P.DP)
    if C.NEEDS_R:
        store_rows(out.r, sums.r * scale_r, first_row, i, n, R.D, R.DP)


@triton.jit
def add_dk(dK, dS, Q, lse, C: tl.constexpr, MASKED: tl.constexpr):
    """dK of a side with what a block of its rows contributes."""
    if MASKED:  # a row that attends to nothing leaves no trace, not even a NaN
        Q = tl.where(lse != FAR, Q, 0.0)
    return tl.dot(tl.trans(dS.to(Q.dtype)), Q, dK, input_precision=C.PRECISION)


@triton.jit
def dk_step(sums, p, r, stats, j0, R: tl.constexpr, C: tl.constexpr, b, slot, P: tl.constexpr, MASKED: tl.constexpr):
    """Add to dK of both sides what block b of the rows contributes.

    Tiles have rows first, so that a thread knows two rows and not sixteen. dS goes to shared memory, from which products read it
    in either order.
    """
    dK_p, dK_r = sums.p, sums.r
    i0 = b * P.BM
    i = i0 + tl.arange(0, P.BM)
    row = load_pair_rows(stats, p.head.batch * p.head.sizes.heads + p.head.index, i0, p.head.sizes.n, P.BM, C)
    Q_p, Q_r = load_q(p.x, p.head, i0, P), load_q(r.x, r.head, i0, R)
    K_p, K_r = p.Q, r.Q
    p = Side(Q_p, p.x, p.head, load_row_tile(p.head, i, P, MASKED))
    r = Side(Q_r, r.x, r.head, load_row_tile(r.head, i, R, MASKED))
    raw_p, S_p, show_p = side_logits(Q_p, K_p, p, i0, j0, slot, P, MASKED)
    raw_r, S_r, show_r = side_logits(Q_r, K_r, r, i0, j0, slot, R, MASKED)
    dS_p, dS_r = pair_backward(S_p, S_r, show_p, show_r, row, stats.mix, p, r, P, R, C, MASKED, False)
    dS_p, dS_r = capped(dS_p, raw_p, p.head, P), capped(dS_r, raw_r, r.head, R)
    if MASKED and P.BY_SPAN:
        j = j0 + tl.arange(0, P.BN)
        dS_p, dS_r = select_in_spans(dS_p, dS_r, j[None, :], p.rows.lo[:, None], p.rows.hi[:, None], 0.0, C.PTX)
    elif MASKED:
        dS_p, dS_r = tl.where(show_p, dS_p, 0.0), tl.where(show_r, dS_r, 0.0)
    if C.NEEDS_P:
        dK_p = add_dk(dK_p, dS_p, Q_p, row.lse_p, P, MASKED)
    if C.NEEDS_R:
        dK_r = add_dk(dK_r, dS_r, Q_r, row.lse_r, R, MASKED)
    return Sums(dK_p, dK_r)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups_p", "groups_r", "groups"])
def divergence_dk(
    q_p, k_p, q_r, k_r, out, stats, args_p, args_r, n, m, heads, groups_p, groups_r, groups,
    P: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dK of BN keys: program (block of keys, batch item and key head of `groups` heads); its heads one after the other."""
    block, owner = program_tile(tl.cdiv(m, P.BN))
    kv_heads = heads // groups
    kv_index, batch = owner % kv_heads, owner // kv_heads
    j = block * P.BN + tl.arange(0, P.BN)
    zeros = tl.zeros([P.BN], tl.float32)
    dK_p = tl.zeros([P.BN, P.DP], tl.float32) if C.NEEDS_P else zeros
    dK_r = tl.zeros([R.BN, R.DP], tl.float32) if C.NEEDS_R else zeros
    sums = Sums(dK_p, dK_r)
    for g in range(groups if C.GROUPED else 1):
        index = kv_index * groups + g
        sizes_p, sizes_r = Sizes(n, m, heads, groups_p), Sizes(n, m, heads, groups_r)
        head_p = Head(*head_at(args_p, sizes_p, batch, index, index // groups_p, P), args_p.score, args_p.blocks, None, sizes_p)
        head_r = Head(*head_at(args_r, sizes_r, batch, index, index // groups_r, R), args_r.score, args_r.blocks, None, sizes_r)
        x_p = Matrices(q_at(q_p, head_p, args_p.strides, P), k_at(k_p, head_p, args_p.strides, P), None, None, args_p.strides, None)
        x_r = Matrices(q_at(q_r, head_r, args_r.strides, R), k_at(k_r, head_r, args_r.strides, R), None, None, args_r.strides, None)
        p = Side(load_k(x_p, head_p, block * P.BN, P, True), x_p, head_p, None)
        r = Side(load_k(x_r, head_r, block * R.BN, R, True), x_r, head_r, None)
        sums = over_both(over_rows, dk_step, sums, (p, r, stats, block * P.BN, R, C), p, r, block, tl.cdiv(n, P.BM), P, R)
    first_key = (batch.to(tl.int64) * kv_heads + kv_index) * m
    if C.NEEDS_P:
        store_rows(out.p, sums.p * args_p.score.scale, first_key, j, m, P.D, P.DP)
    if C.NEEDS_R:
        store_rows(out.r, sums.r * scale_of_r(args_r.score.scale, C), first_key, j, m, R.D, R.DP)
