"""What the weights say, from q, k and what the forward pass found: passes that never hold n × m numbers.

P = exp(S − max − spread), with the largest logit and ln of the denominator of each row: exact even where logits are large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import (
    _NONE,
    _PLAIN,
    LOG2E,
    additive,
    bias_rows,
    level_of,
    load,
    logits,
    met,
    partial,
    seat,
    seats,
    shown,
    shown_anywhere,
    span_rows,
    whole_block,
)


@triton.jit
def scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, slot, n, M,
           D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
           CAP: tl.constexpr, FAST: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr,
           MASKED: tl.constexpr):
    """The logits [BM, BN] of rows i and keys j, −inf where hidden; FAST leaves them raw products."""
    if HIDDEN > 0:
        S = additive(q, k, vector, i, j, n, M, strides.q_row, strides.q_dim, strides.k_row, strides.k_dim, BM, BN, HIDDEN, APPROXIMATE)
    else:
        K = load(k, j.to(tl.int64) * strides.k_row, j < M, D, strides.k_dim, DP, True)  # [BN, DP]
        S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
    if not FAST:
        S, show = logits(S, scale, cap, bias, bias_rows(bias, l, h, i, BIAS), i, j, n, M, CAP, BIAS)
        if BIAS != _PLAIN:
            S = tl.where(show, S, float("-inf"))
    if MASKED:
        S = tl.where(shown(where, lo, hi, slot, i, j, MASK), S, float("-inf"))
    return S


@triton.jit
def weights(S, row_max, log_row_sum, rows, i, n, unit, FAST: tl.constexpr):
    """The weights [BM, BN] of logits; 0 in a row that sees nothing."""
    level = level_of(tl.load(row_max + rows + i, mask=i < n, other=float("-inf")), FAST)  # [BM]
    above = tl.load(log_row_sum + rows + i, mask=i < n, other=0.0) * LOG2E
    T = S * unit - level[:, None] if FAST else (S - level[:, None]) * LOG2E
    return tl.exp2(T - above[:, None])


@triton.jit
def queries(q, strides, i, n, D: tl.constexpr, DP: tl.constexpr, HIDDEN: tl.constexpr):
    """The queries of rows i [BM, DP]; the additive score loads its own."""
    Q = i
    if HIDDEN == 0:
        Q = load(q, i.to(tl.int64) * strides.q_row, i < n, D, strides.q_dim, DP, True)
    return Q


@triton.jit
def turned_weights(K, q, k, row_max, log_row_sum, rows, strides, scale, unit, cap, bias, where, vector, l, h, i0, j, slot, n, M,
                   D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
                   CAP: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
                   PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """The weights [BN, BM] of keys j and the rows i0 … i0 + BM."""
    i = i0 + tl.arange(0, BM)
    if HIDDEN > 0:
        S = tl.trans(additive(q, k, vector, i, j, n, M, strides.q_row, strides.q_dim, strides.k_row, strides.k_dim, BM, BN, HIDDEN, APPROXIMATE))
    else:
        if TMA:
            Q = q.load([l, h, i0, 0]).reshape(BM, DP)
        else:
            Q = load(q, i.to(tl.int64) * strides.q_row, i < n, D, strides.q_dim, DP, True)  # [BM, DP]
        S = tl.dot(K, tl.trans(Q), input_precision=PRECISION)  # [BN, BM]
    level = level_of(tl.load(row_max + rows + i, mask=i < n, other=float("-inf")), FAST)  # [BM]
    above = tl.load(log_row_sum + rows + i, mask=i < n, other=0.0) * LOG2E
    if FAST:
        T = S * unit - level[None, :]
    else:
        S, show = logits(tl.trans(S), scale, cap, bias, bias_rows(bias, l, h, i, BIAS), i, j, n, M, CAP, BIAS)
        if BIAS != _PLAIN:
            S = tl.where(show, S, float("-inf"))
        T = (tl.trans(S) - level[None, :]) * LOG2E
    P = tl.exp2(T - above[None, :])
    if MASKED:
        lo, hi = span_rows(where, l, h, i, n, M, MASK)
        P = tl.where(tl.trans(shown(where, lo, hi, slot, i, j, MASK)), P, 0.0)
    return P


@triton.jit(do_not_specialize=["n", "M", "where", "heads", "groups"])
def received(q, k, out, row_max, log_row_sum, strides, scale, scales, cap, bias, where, vector, n, M, heads, groups,
             D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
             CAP: tl.constexpr, SCALES: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr,
             APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr):
    """Σ over rows of the weight of BN keys: program (block of keys, item and query head); summed once, at the end."""
    block, own = seats(tl.cdiv(M, BN))
    h = own % heads
    l = own // heads
    j = block * BN + tl.arange(0, BN)
    K = j
    if TMA:
        K = k.load([l, h // groups, block * BN, 0]).reshape(BN, DP)
    else:
        q += l.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head
        k += l.to(tl.int64) * strides.k_item + (h // groups).to(tl.int64) * strides.k_head
        if HIDDEN == 0:
            K = load(k, j.to(tl.int64) * strides.k_row, j < M, D, strides.k_dim, DP, True)  # [BN, DP]
    if SCALES:
        scale = tl.load(scales + h)
    unit = scale * LOG2E
    rows = (l.to(tl.int64) * heads + h) * n
    total = tl.zeros([BN, BM], tl.float32)
    first, full, until, rest = met(where, seat(where, l, h, MASK), block, tl.cdiv(n, BM), tl.cdiv(n, BM), MASK)
    for t in range(full, until):
        b = whole_block(where, t, MASK)
        total += turned_weights(K, q, k, row_max, log_row_sum, rows, strides, scale, unit, cap, bias, where, vector, l, h, b * BM, j, 0, n, M,
                                D, DP, BM, BN, MASK, BIAS, CAP, FAST, TMA, HIDDEN, APPROXIMATE, PRECISION, False)
    if MASK != _NONE:
        for t in range(rest):
            b, slot = partial(where, t, first, full, until, MASK)
            total += turned_weights(K, q, k, row_max, log_row_sum, rows, strides, scale, unit, cap, bias, where, vector, l, h, b * BM, j, slot, n, M,
                                    D, DP, BM, BN, MASK, BIAS, CAP, FAST, TMA, HIDDEN, APPROXIMATE, PRECISION, True)
    tl.store(out + (l.to(tl.int64) * heads + h) * M + j, tl.sum(total, 1), mask=j < M)


@triton.jit
def apart(i, j, n, M):
    """How far the keys j lie from the rows i [BM, BN], the ends of both aligned."""
    return tl.abs((i + M - n)[:, None] - j[None, :]).to(tl.float32)


@triton.jit(do_not_specialize=["n", "M", "where", "heads", "groups"])
def moments(q, k, health, distance, row_max, log_row_sum, strides, scale, scales, cap, bias, where, vector, n, M, heads, groups,
            D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
            CAP: tl.constexpr, SCALES: tl.constexpr, FAST: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
            PRECISION: tl.constexpr):
    """Σ p (1 − p) and Σ p |i + M − n − j| of BM rows: program (block of rows, item and head)."""
    block, own = seats(tl.cdiv(n, BM))
    h = own % heads
    l = own // heads
    q += l.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head
    k += l.to(tl.int64) * strides.k_item + (h // groups).to(tl.int64) * strides.k_head
    if SCALES:
        scale = tl.load(scales + h)
    i = block * BM + tl.arange(0, BM)
    Q = queries(q, strides, i, n, D, DP, HIDDEN)
    lo, hi = span_rows(where, l, h, i, n, M, MASK)
    rows = (l.to(tl.int64) * heads + h) * n
    free = tl.zeros([BM], tl.float32)
    far = tl.zeros([BM], tl.float32)
    first, full, until, rest = met(where, seat(where, l, h, MASK), block, tl.cdiv(M, BN), M // BN, MASK)
    for t in range(full, until):
        b = whole_block(where, t, MASK)
        j = b * BN + tl.arange(0, BN)
        S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, 0, n, M, D, DP, BM, BN, MASK, BIAS, CAP,
                   FAST, HIDDEN, APPROXIMATE, PRECISION, False)
        P = weights(S, row_max, log_row_sum, rows, i, n, scale * LOG2E, FAST)
        free += tl.sum(P - P * P, 1)
        far += tl.sum(P * apart(i, j, n, M), 1)
    for t in range(rest):
        b, slot = partial(where, t, first, full, until, MASK)
        j = b * BN + tl.arange(0, BN)
        S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, slot, n, M, D, DP, BM, BN, MASK, BIAS, CAP,
                   FAST, HIDDEN, APPROXIMATE, PRECISION, True)
        P = weights(S, row_max, log_row_sum, rows, i, n, scale * LOG2E, FAST)
        free += tl.sum(P - P * P, 1)
        far += tl.sum(P * apart(i, j, n, M), 1)
    tl.store(health + rows + i, free, mask=i < n)
    tl.store(distance + rows + i, far, mask=i < n)


@triton.jit(do_not_specialize=["n", "M", "height", "width", "where", "key_blocks", "heads", "groups"])
def pooled(q, k, out, row_max, log_row_sum, strides, scale, scales, cap, bias, where, vector, n, M, heads, groups, key_blocks, height, width,
           D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
           CAP: tl.constexpr, SCALES: tl.constexpr, FAST: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr):
    """The mean weight of one cell of a grid over n × M: program (cell, item and head).

    Row i is in row ⌊i·height/n⌋ of the grid, key j in column ⌊j·width/M⌋; a program walks over exactly its rows and keys.
    """
    x, own = seats(width)
    y = own % height
    own = own // height
    h = own % heads
    l = own // heads
    q += l.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head
    k += l.to(tl.int64) * strides.k_item + (h // groups).to(tl.int64) * strides.k_head
    if SCALES:
        scale = tl.load(scales + h)
    top = ((y.to(tl.int64) * n + height - 1) // height).to(tl.int32)
    bottom = (((y + 1).to(tl.int64) * n + height - 1) // height).to(tl.int32)
    left = ((x.to(tl.int64) * M + width - 1) // width).to(tl.int32)
    right = (((x + 1).to(tl.int64) * M + width - 1) // width).to(tl.int32)
    rows = (l.to(tl.int64) * heads + h) * n
    total = tl.zeros([BM, BN], tl.float32)
    for i0 in range(top, bottom, BM):
        i = i0 + tl.arange(0, BM)
        lo, hi = span_rows(where, l, h, i, n, M, MASK)
        hi = tl.where(i < bottom, hi, 0)  # the rows of the next cell are not ours
        some = hi > lo
        start = tl.maximum(left, tl.min(tl.where(some, lo, M), 0))
        stop = tl.minimum(right, tl.max(hi, 0))
        if start < stop:
            Q = queries(q, strides, i, n, D, DP, HIDDEN)
            for j0 in range(start, stop, BN):
                j = j0 + tl.arange(0, BN)
                S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, 0, n, M, D, DP, BM, BN, MASK, BIAS,
                           CAP, FAST, HIDDEN, APPROXIMATE, PRECISION, False)
                show = shown_anywhere(where, l, h, lo, hi, i, j, key_blocks, MASK) & (j < right)[None, :] & some[:, None]
                total += tl.where(show, weights(S, row_max, log_row_sum, rows, i, n, scale * LOG2E, FAST), 0.0)
    area = (bottom - top).to(tl.float32) * (right - left).to(tl.float32)
    cell = ((l.to(tl.int64) * heads + h) * height + y) * width + x
    tl.store(out + cell, tl.sum(tl.sum(total, 1), 0) / area)


@triton.jit
def rank(S, j):
    """Numbers that order pairs by (logit, then lower key): int64 [BM, BN]; the lowest of all for hidden pairs."""
    bits = (S + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(S == float("-inf"), -0x8000000000000000, (order << 32) | (0xFFFFFFFF - j.to(tl.int64))[None, :])


@triton.jit
def insert(best, S, j):
    """Let the pairs of a tile compete with the best [BM, KP] so far, the strongest of each row at a time."""
    R = rank(S, j)  # [BM, BN]
    strongest = tl.max(R, 1)  # [BM]
    weakest = tl.min(best, 1)
    while tl.max((strongest > weakest).to(tl.int32), 0) > 0:
        better = strongest > weakest  # [BM]
        best = tl.where((best == weakest[:, None]) & (tl.cumsum((best == weakest[:, None]).to(tl.int32), 1) == 1) & better[:, None],
                        strongest[:, None], best)
        R = tl.where(R == strongest[:, None], -0x8000000000000000, R)
        strongest = tl.max(R, 1)
        weakest = tl.min(best, 1)
    return best


@triton.jit(do_not_specialize=["n", "M", "k_best", "where", "heads", "groups"])
def strongest(q, k, out, strides, scale, scales, cap, bias, where, vector, n, M, heads, groups, k_best,
              D: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr,
              BIAS: tl.constexpr, CAP: tl.constexpr, SCALES: tl.constexpr, HIDDEN: tl.constexpr,
              APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr):
    """The ranks of the KP strongest pairs of BM rows, in no order: program (block of rows, item and head)."""
    block, own = seats(tl.cdiv(n, BM))
    h = own % heads
    l = own // heads
    q += l.to(tl.int64) * strides.q_item + h.to(tl.int64) * strides.q_head
    k += l.to(tl.int64) * strides.k_item + (h // groups).to(tl.int64) * strides.k_head
    if SCALES:
        scale = tl.load(scales + h)
    i = block * BM + tl.arange(0, BM)
    Q = queries(q, strides, i, n, D, DP, HIDDEN)
    lo, hi = span_rows(where, l, h, i, n, M, MASK)
    slots = tl.arange(0, KP)
    best = tl.full([BM, KP], -0x8000000000000000, tl.int64)
    best = tl.where((slots < k_best)[None, :], best, 0x7FFFFFFFFFFFFFFF)  # places that nobody may take
    first, full, until, rest = met(where, seat(where, l, h, MASK), block, tl.cdiv(M, BN), M // BN, MASK)
    for t in range(full, until):
        b = whole_block(where, t, MASK)
        j = b * BN + tl.arange(0, BN)
        S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, 0, n, M, D, DP, BM, BN, MASK, BIAS, CAP,
                   False, HIDDEN, APPROXIMATE, PRECISION, False)
        best = insert(best, S, j)
    for t in range(rest):
        b, slot = partial(where, t, first, full, until, MASK)
        j = b * BN + tl.arange(0, BN)
        S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, slot, n, M, D, DP, BM, BN, MASK, BIAS, CAP,
                   False, HIDDEN, APPROXIMATE, PRECISION, True)
        best = insert(best, S, j)
    at = ((l.to(tl.int64) * heads + h) * n + i)[:, None] * KP + slots[None, :]
    tl.store(out + at, best, mask=(i < n)[:, None])
