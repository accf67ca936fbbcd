"""The gradient of a table that a function of the scores reads: dS ∘ ∂value/∂load, summed without atomics.

An index of the table depends on the row, on the key, or on row − key; so the products are summed along rows, along keys or
along diagonals. What is left has one number per row, key or diagonal, and torch adds it up by index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import Sizes
from .aggregates import Head, Matrices
from .backward import down_columns, folded, softmax_backward
from .program import (
    do_at,
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
    raw_scores,
    scores_and_slope,
    v_at,
    visible_logits,
)
from .tile_ops import _BIAS_NONE, dropout_keep, program_tile, tanh


@triton.jit
def load_gradient(Q, K, V, dO, x, head, rows, row, j, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """dS of the scores times the derivative by the load, [BM, BN]; 0 where a pair is hidden."""
    raw = raw_scores(Q, K, x, head, rows.i, j, C)
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    S, show = visible_logits(raw, rows, j, slot, head, C, MASKED)
    keep = j
    if C.DROP:
        keep = dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound)
    dP = tl.dot(dO, tl.trans(V), input_precision=C.PRECISION)
    score, slope = scores_and_slope(raw, rows.i, j, head, C, False)
    _, dS, _ = softmax_backward(S, dP, score, slope, show, (), keep, down_columns(row), head, C, HIDES)
    if C.CAP:
        t = tanh(score / head.score.cap)
        dS = tl.where(dS == 0.0, 0.0, dS * (1.0 - t * t))
    partial = pointwise(C.PARTIAL, raw * head.scale, rows.i, j, head, C, False)
    return tl.where(dS == 0.0, 0.0, dS * partial)


@triton.jit
def add_diagonals(out, G, i0, j0, n, m, C: tl.constexpr):
    """Add the sums of G [BM, BM] along its diagonals; a program has its own `out`, of n + m − 1 numbers."""
    r = tl.arange(0, C.BM)
    c = tl.arange(0, 2 * C.BM)  # diagonal c of the tile has the pairs with row − key = c − (BM − 1) in it
    y = r[:, None] + (C.BM - 1) - c[None, :]  # [BM, 2·BM]
    inside = (y >= 0) & (y < C.BM)
    skewed = tl.gather(G, tl.minimum(tl.maximum(y, 0), C.BM - 1), 1)
    diagonal = tl.sum(tl.where(inside, skewed, 0.0), 0)  # [2·BM]
    d = i0 - j0 + c - (C.BM - 1) + m - 1
    valid = (d >= 0) & (d < n + m - 1)
    before = tl.load(out + d, mask=valid, other=0.0)
    tl.debug_barrier()
    tl.store(out + d, before + diagonal, mask=valid)
    tl.debug_barrier()


@triton.jit
def by_rows_step(line, out, Q, dO, x, head, rows, row, i0, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add block b of the keys to the sums of rows, or to those of diagonals."""
    j = b * C.BN + tl.arange(0, C.BN)
    K = load_k(x, head, b * C.BN, C, MASKED)
    V = load_v(x, head, b * C.BN, C, MASKED)
    G = load_gradient(Q, K, V, dO, x, head, rows, row, j, slot, C, MASKED)
    if C.DIAGONALS:
        add_diagonals(out, G, i0, b * C.BN, head.sizes.n, head.sizes.m, C)
    else:
        line += tl.sum(G, 1)
    return line


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "parts", "shared_rows"])
def table_gradient_by_rows(q, k, v, do, out, stats, args, n, m, heads, groups, parts, shared_rows, C: tl.constexpr):
    """Sums (L, H, N) along rows, or (L, H, parts, N + M − 1) along diagonals: program (part, batch item and head).

    A part has `shared_rows` blocks of rows: one if the sums are along rows.
    """
    sizes = Sizes(n, m, heads, groups)
    part, owner = program_tile(parts)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(q_at(q, head, args.strides.x, C), k_at(k, head, args.strides.x, C), v_at(v, head, args.strides.x, C), do_at(do, head, args.strides.do, C), args.strides.x, args.strides.do)
    mine = out
    if C.DIAGONALS:
        mine = out + tl.program_id(0).to(tl.int64) * (n + m - 1)
    for at in range(shared_rows):
        block = part * shared_rows + at
        if block * C.BM < n:
            i0 = block * C.BM
            i = i0 + tl.arange(0, C.BM)
            Q = load_q(x, head, i0, C)
            dO = load_do(x, head, i0, C)
            row = folded(load_row_stats(stats, head, i, C), C)
            rows = load_row_tile(head, i, C, True)
            line = over_keys(by_rows_step, tl.zeros([C.BM], tl.float32), (mine, Q, dO, x, head, rows, row, i0), head, block, C)
            if not C.DIAGONALS:
                tl.store(out + head.first_row + i, line, mask=i < n)


@triton.jit
def by_keys_step(line, K, V, x, head, stats, j, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add block b of the rows to the sums of keys."""
    i = b * C.BM + tl.arange(0, C.BM)
    rows = load_row_tile(head, i, C, MASKED)
    row = folded(load_row_stats(stats, head, i, C), C)
    dO = load_do(x, head, b * C.BM, C)
    Q = load_q(x, head, b * C.BM, C)
    return line + tl.sum(load_gradient(Q, K, V, dO, x, head, rows, row, j, slot, C, MASKED), 0)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups"])
def table_gradient_by_keys(q, k, v, do, out, stats, args, n, m, heads, groups, C: tl.constexpr):
    """Sums (L, H, M) along keys: program (block of keys, batch item and head)."""
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(tl.cdiv(m, C.BN))
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(q_at(q, head, args.strides.x, C), k_at(k, head, args.strides.x, C), v_at(v, head, args.strides.x, C), do_at(do, head, args.strides.do, C), args.strides.x, args.strides.do)
    j = block * C.BN + tl.arange(0, C.BN)
    K = load_k(x, head, block * C.BN, C, True)
    V = load_v(x, head, block * C.BN, C, True)
    line = over_rows(by_keys_step, tl.zeros([C.BN], tl.float32), (K, V, x, head, stats, j), head, block, C)
    tl.store(out + (head.batch.to(tl.int64) * heads + head.index) * m + j, line, mask=j < m)
