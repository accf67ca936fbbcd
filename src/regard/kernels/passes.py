"""What the weights say, from q, k and what the forward pass found: passes that never hold n × m numbers.

P = exp(S − max − spread), with the largest logit and ln of the denominator of each row: exact even where logits are large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import (
    _BITS,
    _NONE,
    LOG2E,
    additive,
    bias_rows,
    load,
    logits,
    met,
    partial,
    seat,
    seats,
    shown,
    span_rows,
)


@triton.jit
def scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, slot, n, M,
           D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
           CAP: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """The logits [BM, BN] of rows i and keys j, −inf where hidden."""
    if HIDDEN > 0:
        S = additive(q, k, vector, i, j, n, M, strides.q_row, strides.q_dim, strides.k_row, strides.k_dim, BM, BN, HIDDEN, APPROXIMATE)
    else:
        K = load(k, j.to(tl.int64) * strides.k_row, j, j < M, D, strides.k_dim, DP, True)  # [BN, DP]
        S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
    S = logits(S, scale, cap, bias, bias_rows(bias, l, h, i, BIAS), i, j, n, M, CAP, BIAS)
    if MASKED:
        S = tl.where(shown(where, lo, hi, slot, i, j, MASK), S, float("-inf"))
    return S


@triton.jit
def weights(S, peak, spread, rows, i, n):
    """The weights [BM, BN] of logits; 0 in a row that sees nothing."""
    top = tl.load(peak + rows + i, mask=i < n, other=float("inf"))  # [BM]
    top = tl.where(top == float("-inf"), float("inf"), top)
    above = tl.load(spread + rows + i, mask=i < n, other=0.0)
    return tl.exp2(((S - top[:, None]) - above[:, None]) * LOG2E)


@triton.jit
def queries(q, strides, l, h, i, n, D: tl.constexpr, DP: tl.constexpr, HIDDEN: tl.constexpr):
    """The queries of rows i [BM, DP]; the additive score loads its own."""
    Q = i
    if HIDDEN == 0:
        Q = load(q, i.to(tl.int64) * strides.q_row, i, i < n, D, strides.q_dim, DP, True)
    return Q


@triton.jit(do_not_specialize=["n", "M"])
def received(q, k, out, peak, spread, strides, scale, scales, cap, bias, where, vector, n, M, heads, groups,
             D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
             CAP: tl.constexpr, SCALES: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
             PRECISION: tl.constexpr):
    """Σ over rows of the weight of BN keys: program (block of keys, item and query head)."""
    block, own = seats(tl.cdiv(M, BN))
    h = own % heads
    l = own // heads  # noqa: E741
    q += l.to(tl.int64) * strides.q_item + h * strides.q_head
    k += l.to(tl.int64) * strides.k_item + (h // groups) * strides.k_head
    if SCALES:
        scale = tl.load(scales + h)
    j = block * BN + tl.arange(0, BN)
    rows = (l.to(tl.int64) * heads + h) * n
    total = tl.zeros([BN], tl.float32)
    SPLIT: tl.constexpr = 128 // BM
    first, full, until, rest = met(where, seat(where, l, h, MASK), block, tl.cdiv(n, BM), tl.cdiv(n, BM), MASK, 128 // BN, SPLIT)
    if MASK != _BITS:
        for t in range(full, until):
            i = t * BM + tl.arange(0, BM)
            Q = queries(q, strides, l, h, i, n, D, DP, HIDDEN)
            S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, i, i, 0, n, M, D, DP, BM, BN, MASK, BIAS, CAP,
                       HIDDEN, APPROXIMATE, PRECISION, False)
            total += tl.sum(weights(S, peak, spread, rows, i, n), 0)
    if MASK != _NONE:
        for t in range(rest):
            b, slot = partial(where, t, first, full, until, MASK, SPLIT)
            i = b * BM + tl.arange(0, BM)
            lo, hi = span_rows(where, l, h, i, n, M, MASK)
            Q = queries(q, strides, l, h, i, n, D, DP, HIDDEN)
            S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, slot, n, M, D, DP, BM, BN, MASK, BIAS,
                       CAP, HIDDEN, APPROXIMATE, PRECISION, True)
            total += tl.sum(weights(S, peak, spread, rows, i, n), 0)
    tl.store(out + (l.to(tl.int64) * heads + h) * M + j, total, mask=j < M)


@triton.jit(do_not_specialize=["n", "M"])
def health(q, k, out, peak, spread, strides, scale, scales, cap, bias, where, vector, n, M, heads, groups,
           D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
           CAP: tl.constexpr, SCALES: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
           PRECISION: tl.constexpr):
    """Σ p (1 − p) of BM rows: program (block of rows, item and head)."""
    block, own = seats(tl.cdiv(n, BM))
    h = own % heads
    l = own // heads  # noqa: E741
    q += l.to(tl.int64) * strides.q_item + h * strides.q_head
    k += l.to(tl.int64) * strides.k_item + (h // groups) * strides.k_head
    if SCALES:
        scale = tl.load(scales + h)
    i = block * BM + tl.arange(0, BM)
    Q = queries(q, strides, l, h, i, n, D, DP, HIDDEN)
    lo, hi = span_rows(where, l, h, i, n, M, MASK)
    rows = (l.to(tl.int64) * heads + h) * n
    total = tl.zeros([BM], tl.float32)
    SPLIT: tl.constexpr = 128 // BN
    first, full, until, rest = met(where, seat(where, l, h, MASK), block, tl.cdiv(M, BN), M // BN, MASK, 128 // BM, SPLIT)
    for t in range(full, until):
        j = t * BN + tl.arange(0, BN)
        S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, 0, n, M, D, DP, BM, BN, MASK, BIAS, CAP,
                   HIDDEN, APPROXIMATE, PRECISION, False)
        P = weights(S, peak, spread, rows, i, n)
        total += tl.sum(P - P * P, 1)
    for t in range(rest):
        b, slot = partial(where, t, first, full, until, MASK, SPLIT)
        j = b * BN + tl.arange(0, BN)
        S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, slot, n, M, D, DP, BM, BN, MASK, BIAS, CAP,
                   HIDDEN, APPROXIMATE, PRECISION, True)
        P = weights(S, peak, spread, rows, i, n)
        total += tl.sum(P - P * P, 1)
    tl.store(out + rows + i, total, mask=i < n)


@triton.jit(do_not_specialize=["n", "M", "height", "width"])
def pooled(q, k, out, peak, spread, strides, scale, scales, cap, bias, where, vector, n, M, heads, groups, height, width,
           D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CELLS: tl.constexpr, MASK: tl.constexpr,
           BIAS: tl.constexpr, CAP: tl.constexpr, SCALES: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr,
           PRECISION: tl.constexpr):
    """Σ of the weights in CELLS cells of one row of a grid: program (item and head, row of the grid, cells).

    Row i is in row ⌊i·height/n⌋ of the grid, key j in column ⌊j·width/M⌋; a program walks over exactly its rows and keys.
    """
    across = tl.program_id(2)
    x = across * CELLS + tl.arange(0, CELLS)  # [CELLS]
    y = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) % heads
    l = tl.program_id(0) // heads  # noqa: E741
    q += l.to(tl.int64) * strides.q_item + h * strides.q_head
    k += l.to(tl.int64) * strides.k_item + (h // groups) * strides.k_head
    if SCALES:
        scale = tl.load(scales + h)
    top = ((y * n + height - 1) // height).to(tl.int32)
    bottom = (((y + 1) * n + height - 1) // height).to(tl.int32)
    behind = tl.minimum((across + 1) * CELLS, width).to(tl.int64)
    left = ((across.to(tl.int64) * CELLS * M + width - 1) // width).to(tl.int32)
    right = ((behind * M + width - 1) // width).to(tl.int32)
    rows = (l.to(tl.int64) * heads + h) * n
    total = tl.zeros([CELLS], tl.float32)
    for i0 in range(top, bottom, BM):
        i = i0 + tl.arange(0, BM)
        ours = i < bottom
        Q = queries(q, strides, l, h, i, n, D, DP, HIDDEN)
        lo, hi = span_rows(where, l, h, i, n, M, MASK)
        some = ours & (hi > lo)
        start = tl.maximum(left, tl.min(tl.where(some, lo, M), 0))
        stop = tl.minimum(right, tl.max(tl.where(some, hi, 0), 0))
        for j0 in range(start, stop, BN):
            j = j0 + tl.arange(0, BN)
            S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, 0, n, M, D, DP, BM, BN, MASK, BIAS,
                       CAP, HIDDEN, APPROXIMATE, PRECISION, True)
            P = weights(S, peak, spread, rows, i, n)
            P = tl.where(ours[:, None] & (j < right)[None, :], P, 0.0)
            column = tl.sum(P, 0)  # [BN]
            cell = (j.to(tl.int64) * width // M).to(tl.int32)  # [BN]
            total += tl.sum(tl.where(cell[:, None] == x[None, :], column[:, None], 0.0), 0)
    at = ((l.to(tl.int64) * heads + h) * height + y) * width + x
    area = (bottom - top).to(tl.float32)
    wide = x.to(tl.int64)
    keys = ((wide + 1) * M + width - 1) // width - (wide * M + width - 1) // width
    tl.store(out + at, total / (area * tl.maximum(keys, 1).to(tl.float32)), mask=x < width)


@triton.jit
def rank(S, j):
    """Numbers that order pairs by (logit, then lower key): int64 [BM, BN]; the lowest of all for hidden pairs."""
    bits = (S + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(S == float("-inf"), -0x8000000000000000, (order << 32) | (0xFFFFFFFF - j.to(tl.int64))[None, :])


@triton.jit
def insert(best, S, j, slots, KP: tl.constexpr):
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


@triton.jit(do_not_specialize=["n", "M", "k_best"])
def strongest(q, k, out, strides, scale, scales, cap, bias, where, vector, n, M, heads, groups, k_best,
              D: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr,
              BIAS: tl.constexpr, CAP: tl.constexpr, SCALES: tl.constexpr, HIDDEN: tl.constexpr,
              APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr):
    """The ranks of the KP strongest pairs of BM rows, in no order: program (block of rows, item and head)."""
    block, own = seats(tl.cdiv(n, BM))
    h = own % heads
    l = own // heads  # noqa: E741
    q += l.to(tl.int64) * strides.q_item + h * strides.q_head
    k += l.to(tl.int64) * strides.k_item + (h // groups) * strides.k_head
    if SCALES:
        scale = tl.load(scales + h)
    i = block * BM + tl.arange(0, BM)
    Q = queries(q, strides, l, h, i, n, D, DP, HIDDEN)
    lo, hi = span_rows(where, l, h, i, n, M, MASK)
    slots = tl.arange(0, KP)
    best = tl.full([BM, KP], -0x8000000000000000, tl.int64)
    best = tl.where((slots < k_best)[None, :], best, 0x7FFFFFFFFFFFFFFF)  # places that nobody may take
    SPLIT: tl.constexpr = 128 // BN
    first, full, until, rest = met(where, seat(where, l, h, MASK), block, tl.cdiv(M, BN), M // BN, MASK, 128 // BM, SPLIT)
    for t in range(full, until):
        j = t * BN + tl.arange(0, BN)
        S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, 0, n, M, D, DP, BM, BN, MASK, BIAS, CAP,
                   HIDDEN, APPROXIMATE, PRECISION, False)
        best = insert(best, S, j, slots, KP)
    for t in range(rest):
        b, slot = partial(where, t, first, full, until, MASK, SPLIT)
        j = b * BN + tl.arange(0, BN)
        S = scores(Q, q, k, strides, scale, cap, bias, where, vector, l, h, i, j, lo, hi, slot, n, M, D, DP, BM, BN, MASK, BIAS, CAP,
                   HIDDEN, APPROXIMATE, PRECISION, True)
        best = insert(best, S, j, slots, KP)
    at = ((l.to(tl.int64) * heads + h) * n + i)[:, None] * KP + slots[None, :]
    tl.store(out + at, best, mask=(i < n)[:, None])
