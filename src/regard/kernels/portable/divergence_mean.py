"""The divergence between two attentions whose weights are averaged over heads first, what the indexers of sparse attention train on.

With lse of every head known, a tile of mean weights p̄ is a loop over heads: p̄ = Σ_h exp(s_h − lse_h) / H. The derivative by one
head needs p̄ and r̄ of the pair, which needs all heads. So the backward pass takes a strip of rows at a time, writes the derivative of
each of its pairs to a workspace once (`mean_slopes`), and then goes head by head, over rows and over keys:

    dS_h = p_h ∘ (A − Σ p_h·A) / H

The derivative by r̄ may be beyond the range of float32 where r̄ is small; its log is not. So for KL the workspace of r holds
log2(p̄ / r̄), and r_h·B = −exp2(log2 r_h + that). Hidden pairs have −inf there. Masks are the same for all heads.
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
    at_least_zero,
    block_limits,
    finite_lse,
    mixing_floor,
    nats,
    pair_terms,
    slot_at,
    unit_of,
)
from .divergence_backward import capped
from .program import head_at, head_logits, k_at, load_k, load_q, load_row_tile, program_head, q_at, store_rows
from .tile_ops import _BITS, DEEP, mask_tile, program_tile, row_spans, zero_hidden_keys


@triton.jit
def shown_tile(args, batch, sizes, i0, j0, C: tl.constexpr):
    """Which pairs of a tile are visible in all heads: bool [BM, BN]."""
    i, j = i0 + tl.arange(0, C.BM), j0 + tl.arange(0, C.BN)
    head = Head(batch, 0, 0, 0, 0.0, 0.0, args.score, args.blocks, None, sizes)
    lo, hi = row_spans(args.blocks, batch, 0, i, sizes.n, sizes.m, C.MASK)
    slot = slot_at(head, i0, j0, C)
    if C.MASK == _BITS:
        show = mask_tile(args.blocks, lo, hi, tl.maximum(slot, 0), i, j, C.MASK) & (slot >= 0)
    else:
        show = mask_tile(args.blocks, lo, hi, slot, i, j, C.MASK)
    return show


@triton.jit
def head_log_weights(q, k, lse, args, sizes, batch, index, i0, j0, C: tl.constexpr):
    """log2 of the weights [BM, BN] of a head, whatever is hidden."""
    head = Head(*head_at(args, sizes, batch, index, index // sizes.groups, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
    i = i0 + tl.arange(0, C.BM)
    S = tl.dot(load_q(x, head, i0, C), tl.trans(load_k(x, head, j0, C, True)), input_precision=C.PRECISION)
    if not C.FAST:
        S, _ = head_logits(S, load_row_tile(head, i, C, False), j0 + tl.arange(0, C.BN), head, C)
    of_rows = finite_lse(tl.load(lse + head.first_row + i, mask=i < sizes.n, other=float("-inf")))
    return S * unit_of(head, C) - of_rows[:, None]


@triton.jit
def mean_log_weights(q, k, lse, args, sizes, batch, i0, j0, C: tl.constexpr):
    """log2 of the mean weight over heads [BM, BN]; DEEP where all are 0."""
    if C.ONE_HEAD:
        X = head_log_weights(q, k, lse, args, sizes, batch, batch * 0, i0, j0, C)
    else:
        total = tl.zeros([C.BM, C.BN], tl.float32)
        for h in range(sizes.heads):
            total += tl.exp2(head_log_weights(q, k, lse, args, sizes, batch, batch * 0 + h, i0, j0, C))
        none = total == 0.0
        X = tl.where(none, DEEP, tl.log2(tl.where(none, 1.0, total)) - tl.log2(sizes.heads * 1.0))
    return X


@triton.jit
def exact_log_weights(q, k, lse, args, sizes, batch, i0, j0, C: tl.constexpr):
    """The same where every weight may be too small for float32."""
    top = tl.full([C.BM, C.BN], float("-inf"), tl.float32)
    for h in range(sizes.heads):
        top = tl.maximum(top, head_log_weights(q, k, lse, args, sizes, batch, batch * 0 + h, i0, j0, C))
    total = tl.zeros([C.BM, C.BN], tl.float32)
    for h in range(sizes.heads):
        total += tl.exp2(head_log_weights(q, k, lse, args, sizes, batch, batch * 0 + h, i0, j0, C) - top)
    return top + tl.log2(total) - tl.log2(sizes.heads * 1.0)


@triton.jit
def any_of(show):
    """Whether one of the pairs of a tile is visible."""
    return tl.max(tl.max(show.to(tl.int32), 1), 0) > 0


@triton.jit
def mean_tiles(
    q_p, k_p, q_r, k_r, rows, args_p, args_r, sizes_p, sizes_r, shows, batch, i0, j0, P: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """log2 of the mean weights [BM, BN] of both sides; DEEP where hidden."""
    show_p, show_r = shows
    X_p = tl.where(show_p, mean_log_weights(q_p, k_p, rows.lse_p, args_p, sizes_p, batch, i0, j0, P), DEEP)
    X_r = tl.where(show_r, mean_log_weights(q_r, k_r, rows.lse_r, args_r, sizes_r, batch, i0, j0, R), DEEP)
    if C.KIND == _KL and not R.ONE_HEAD:
        if any_of(show_r & (X_r < -100.0) & (tl.exp2(X_p) > 0.0)):
            X_r = tl.where(show_r, exact_log_weights(q_r, k_r, rows.lse_r, args_r, sizes_r, batch, i0, j0, R), DEEP)
    return X_p, X_r


@triton.jit(do_not_specialize=["n", "m", "heads_p", "heads_r", "groups_p", "groups_r", "batches", "row_blocks", "split"])
def divergence_mean(
    q_p, k_p, q_r, k_r, out, rows, args_p, args_r, mix, n, m, heads_p, heads_r, groups_p, groups_r, batches, row_blocks, split,
    P: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What `split` blocks of keys add to the divergence of BM rows: program (block of rows, batch item, split)."""
    block, owner = program_tile(row_blocks)
    block = row_blocks - 1 - block
    batch = owner % batches
    sizes_p, sizes_r = Sizes(n, m, heads_p, groups_p), Sizes(n, m, heads_r, groups_r)
    i0 = block * P.BM
    i = i0 + tl.arange(0, P.BM)
    floor = tl.zeros([P.BM], tl.float32)
    if C.KIND == _EPSILON:
        floor = mixing_floor(tl.load(mix.floor + batch.to(tl.int64) * n + i, mask=i < n, other=0.0), C)
    total = tl.zeros([P.BM], tl.float32)
    first = owner // batches * split
    for b in range(first, tl.minimum(first + split, tl.cdiv(m, P.BN))):
        j0 = b * P.BN
        show_p, show_r = shown_tile(args_p, batch, sizes_p, i0, j0, P), shown_tile(args_r, batch, sizes_r, i0, j0, R)
        if any_of(show_p | show_r):
            X_p, X_r = mean_tiles(q_p, k_p, q_r, k_r, rows, args_p, args_r, sizes_p, sizes_r, (show_p, show_r), batch, i0, j0, P, R, C)
            found = pair_terms(X_p, X_r, floor[:, None], mix.kept, C)
            total += tl.sum(found.p * found.A, 1) * nats(C)
            if C.KIND == _JS:
                total += tl.sum(found.rB, 1) * nats(C)
            if C.KIND == _KL:
                lost = tl.max((show_p & (found.p > 0.0) & (X_r == DEEP)).to(tl.int32), 1)
                total += tl.where(lost > 0, float("inf"), 0.0)
    if C.KIND == _JS:  # the terms of a key are not below 0 together
        total = at_least_zero(total)
    tl.store(out + owner.to(tl.int64) * n + i, total, mask=i < n)


@triton.jit(do_not_specialize=["n", "m", "heads_p", "heads_r", "groups_p", "groups_r", "strip", "width"])
def mean_slopes(
    q_p, k_p, q_r, k_r, out, start, rows, args_p, args_r, mix, n, m, heads_p, heads_r, groups_p, groups_r, strip, width,
    P: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The derivatives by the mean weights in a strip of rows: program (block of keys, block of rows, batch item)."""
    block, owner = program_tile(width // P.BN)
    down, batch = owner % (strip // P.BM), owner // (strip // P.BM)
    sizes_p, sizes_r = Sizes(n, m, heads_p, groups_p), Sizes(n, m, heads_r, groups_r)
    row0 = tl.load(start)
    i0, j0 = row0 + down * P.BM, block * P.BN
    i = i0 + tl.arange(0, P.BM)
    show_p, show_r = shown_tile(args_p, batch, sizes_p, i0, j0, P), shown_tile(args_r, batch, sizes_r, i0, j0, R)
    W_p = tl.full([P.BM, P.BN], float("-inf"), tl.float32)
    W_r = W_p
    if any_of(show_p | show_r):
        floor = tl.zeros([P.BM], tl.float32)
        if C.KIND == _EPSILON:
            floor = mixing_floor(tl.load(mix.floor + batch.to(tl.int64) * n + i, mask=i < n, other=0.0), C)
        X_p, X_r = mean_tiles(q_p, k_p, q_r, k_r, rows, args_p, args_r, sizes_p, sizes_r, (show_p, show_r), batch, i0, j0, P, R, C)
        found = pair_terms(X_p, X_r, floor[:, None], mix.kept, C)
        W_p = tl.where(show_p, found.A * nats(C), float("-inf"))
        W_r = tl.where(show_r, found.B * nats(C) if C.KIND == _JS else found.B, float("-inf"))
    at = ((batch.to(tl.int64) * strip + i - row0) * width)[:, None] + (j0 + tl.arange(0, P.BN))[None, :]
    if C.NEEDS_P:
        tl.store(out.p + at, W_p)
    if C.NEEDS_R:
        tl.store(out.r + at, W_r)


@triton.jit
def head_slopes(X, W, g, C: tl.constexpr):
    """The weights of a head and their part of the derivative, from log2 weights and the workspace."""
    show = W != float("-inf")
    p = tl.exp2(tl.where(show, X, DEEP))
    if C.LOGS:
        G = -g * tl.exp2(tl.where(show, X + W, DEEP))
    else:
        G = g * p * tl.where(show, W, 0.0)
    return p, G, show


@triton.jit
def slopes_of_keys(Q, x, head, tile, lse, g, slopes, b, C: tl.constexpr):
    """`head_slopes` [BM, BN] of rows and block b of the keys; before them, these keys and the raw products."""
    j = b * C.BN + tl.arange(0, C.BN)
    K = load_k(x, head, b * C.BN, C, True)
    raw = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)
    S = raw
    if not C.FAST:
        S, _ = head_logits(S, tile, j, head, C)
    p, G, show = head_slopes(S * unit_of(head, C) - lse, tl.load(slopes + j[None, :]), g, C)
    return K, raw, p, G, show


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "strip", "width"])
def mean_dq(q, k, out, start, stats, args, n, m, heads, groups, strip, width, C: tl.constexpr):
    """Σ p·A and dQ of BM rows of a head: program (block of rows of the strip, batch item and head)."""
    sizes = Sizes(n, m, heads, groups)
    down, owner = program_tile(strip // C.BM)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    batch, first_row = head.batch, head.first_row
    x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
    row0 = tl.load(start)
    i0 = row0 + down * C.BM
    i = i0 + tl.arange(0, C.BM)
    Q = load_q(x, head, i0, C)
    tile = load_row_tile(head, i, C, False)
    lse = finite_lse(tl.load(stats.lse + first_row + i, mask=i < n, other=float("-inf")))[:, None]
    g = tl.load(stats.g + batch.to(tl.int64) * n + i, mask=i < n, other=0.0)[:, None]
    slopes = stats.slopes + ((batch.to(tl.int64) * strip + i - row0) * width)[:, None]
    row_block = tl.minimum(i0, n - 1) // C.BM  # the lists end with the last row
    first, end = block_limits(head, row_block, tl.cdiv(m, C.BN), C)
    delta = tl.zeros([C.BM], tl.float32)
    for b in range(first, end):
        _, _, _, G, _ = slopes_of_keys(Q, x, head, tile, lse, g, slopes, b, C)
        delta += tl.sum(G, 1)
    tl.store(stats.delta + first_row + i, delta, mask=i < n)
    dQ = tl.zeros([C.BM, C.DP], tl.float32)
    for b in range(first, end):
        K, raw, p, G, show = slopes_of_keys(Q, x, head, tile, lse, g, slopes, b, C)
        dS = tl.where(show, capped(G - delta[:, None] * p, raw, head, C), 0.0)
        j = b * C.BN + tl.arange(0, C.BN)
        K = zero_hidden_keys(K, show, args.blocks, batch, head.index, j, m, C.MASK, C.BIAS)
        dQ = tl.dot(dS.to(K.dtype), K, dQ, input_precision=C.PRECISION)
    store_rows(out, dQ * (args.score.scale / heads), first_row, i, n, C.D, C.DP)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "strip", "width"])
def mean_dk(q, k, out, start, stats, args, n, m, heads, groups, strip, width, C: tl.constexpr):
    """Add to dK (float32) of BN keys what a strip of rows contributes: program (block of keys, batch item and key head)."""
    block, owner = program_tile(tl.cdiv(m, C.BN))
    kv_heads = heads // groups
    kv_index, batch = owner % kv_heads, owner // kv_heads
    row0 = tl.load(start)
    j = block * C.BN + tl.arange(0, C.BN)
    dK = tl.zeros([C.BN, C.DP], tl.float32)
    for g in range(groups if C.GROUPED else 1):
        sizes = Sizes(n, m, heads, groups)
        head = Head(*head_at(args, sizes, batch, kv_index * groups + g, kv_index, C), args.score, args.blocks, args.dropout, sizes)
        x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
        first_row = head.first_row
        K = load_k(x, head, block * C.BN, C, True)
        first, end = block_limits(head, block, tl.cdiv(n, C.BM), C)
        for b in range(tl.maximum(first, row0 // C.BM), tl.minimum(end, (row0 + strip) // C.BM)):
            i = b * C.BM + tl.arange(0, C.BM)
            Q = load_q(x, head, b * C.BM, C)
            S = tl.dot(K, tl.trans(Q), input_precision=C.PRECISION)  # [BN, BM]
            raw = S
            if not C.FAST:
                S, _ = head_logits(tl.trans(S), load_row_tile(head, i, C, False), j, head, C)
                S = tl.trans(S)
            lse = finite_lse(tl.load(stats.lse + first_row + i, mask=i < n, other=float("-inf")))
            delta = tl.load(stats.delta + first_row + i, mask=i < n, other=0.0)
            of_row = tl.load(stats.g + batch.to(tl.int64) * n + i, mask=i < n, other=0.0)
            W = tl.load(stats.slopes + ((batch.to(tl.int64) * strip + i - row0) * width)[None, :] + j[:, None])
            p, G, show = head_slopes(S * unit_of(head, C) - lse[None, :], W, of_row[None, :], C)
            dS = tl.where(show, capped(G - delta[None, :] * p, raw, head, C), 0.0)
            Q = tl.where((lse != FAR)[:, None], Q, 0.0)
            dK = tl.dot(dS.to(Q.dtype), Q, dK, input_precision=C.PRECISION)
    d = tl.arange(0, C.DP)
    at = ((batch.to(tl.int64) * kv_heads + kv_index) * m + j.to(tl.int64))[:, None] * C.D + d[None, :]
    inside = (j < m)[:, None] & (d < C.D)[None, :]
    tl.store(out + at, tl.load(out + at, mask=inside, other=0.0) + dK * (args.score.scale / heads), mask=inside)
