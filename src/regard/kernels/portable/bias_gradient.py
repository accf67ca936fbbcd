"""The gradient of a bias: dS summed over what the bias is broadcast over, without atomics and without n × m numbers.

A program owns a part of the result and goes over all tiles that add to it. PAIRS: a tensor with rows and keys; the
program owns a tile and goes over the batch items and heads that share it. ROWS, KEYS: a sum for each row (weighted by the
distance for the slopes of alibi) or key. TABLE: the sums along the diagonals, for a table of relative positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import Sizes
from .aggregates import Head, Matrices
from .backward import down_columns, softmax_backward
from .program import (
    additive_scores,
    at_head,
    head_logits,
    head_scale,
    load_row_stats,
    load_row_tile,
)
from .tile_ops import (
    _BIAS_ALIBI,
    _BITS,
    _SPANS,
    LOG2E,
    dropout_keep,
    load_rows,
    mask_tile,
    program_tile,
    row_spans,
)

PAIRS, ROWS, KEYS, TABLE = 0, 1, 2, 3
_PAIRS, _ROWS, _KEYS, _TABLE = tl.constexpr(PAIRS), tl.constexpr(ROWS), tl.constexpr(KEYS), tl.constexpr(TABLE)


@triton.jit
def mask_slot(blocks, batch, index, ib, jb, key_blocks, PER: tl.constexpr):
    """The slot of the bits of tile (ib, jb) in blocks of 128 / PER; −1 where all is hidden."""
    at = (batch // tl.load(blocks.inner)).to(tl.int64) * blocks.table_item + index * blocks.table_head
    return tl.load(blocks.table + at + (ib // PER) * key_blocks + jb // PER)


@triton.jit
def logit_gradient(x, stats, head, i, j, slot, C: tl.constexpr):
    """dS [BM, BN] of the logits of rows i and keys j."""
    n, m = head.sizes.n, head.sizes.m
    batch, index, kv_index, strides, do_strides = head.batch, head.index, head.kv_index, x.strides, x.do_strides
    q = at_head(x.q, batch, index, strides.q_batch, strides.q_head, C)
    k = at_head(x.k, batch, kv_index, strides.k_batch, strides.k_head, C)
    v = at_head(x.v, batch, kv_index, strides.v_batch, strides.v_head, C)
    do = at_head(x.do, batch, index, do_strides.batch, do_strides.head, C)
    rows = load_row_tile(head, i, C, True)
    if C.HIDDEN_DIM > 0:
        S = additive_scores(Matrices(q, k, v, do, strides, do_strides), head, i, j, C)
    else:
        Q = load_rows(q, i.to(tl.int64) * strides.q_row, i < n, C.D, strides.q_dim, C.DP, True)  # [BM, DP]
        K = load_rows(k, j.to(tl.int64) * strides.k_row, j < m, C.D, strides.k_dim, C.DP, True)  # [BN, DP]
        S = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)
    S, show = head_logits(S, rows, j, head, C)
    show = show & mask_tile(head.blocks, rows.lo, rows.hi, slot, i, j, C.MASK)
    V = load_rows(v, j.to(tl.int64) * strides.v_row, j < m, C.DV, strides.v_dim, C.DVP, True)  # [BN, DVP]
    dO = load_rows(do, i.to(tl.int64) * do_strides.row, i < n, C.DV, do_strides.dim, C.DVP, True)  # [BM, DVP]
    dP = tl.dot(dO, tl.trans(V), input_precision=C.PRECISION)
    keep = show
    if C.DROP:
        keep = dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound)
    row = load_row_stats(stats, head, i, C)
    _, dS, _ = softmax_backward(S, dP, S, show, keep, down_columns(row), head, C, True)
    return dS


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "parts", "tiles", "shared_heads", "shared_rows"])
def bias_gradient(q, k, v, do, out, stats, args, n, m, heads, groups, parts, tiles, shared_heads, shared_rows, C: tl.constexpr):
    """Program (part of the result, batch item and head of it); `tiles` tiles add to it, of all items and heads that share it.

    `parts` is how many there are per item and head; `shared_heads` heads and `shared_rows` blocks of rows share one.
    """
    strides, do_strides = args.strides.x, args.strides.do
    score, blocks, dropout = args.score, args.blocks, args.dropout
    sizes = Sizes(n, m, heads, groups)
    x = Matrices(q, k, v, do, strides, do_strides)
    bias = score.bias
    BLOCK: tl.constexpr = C.BM
    PER: tl.constexpr = 128 // BLOCK
    part, owner = program_tile(parts)
    columns = tl.cdiv(m, BLOCK)
    r = tl.arange(0, BLOCK)
    pair = tl.zeros([BLOCK, BLOCK], tl.float32)
    line = tl.zeros([BLOCK], tl.float32)
    low = 0.0
    high = 0.0
    if C.MODE == _TABLE:
        out += (owner.to(tl.int64) * parts + part) * (2 * bias.reach + 1)
    for t in range(tiles):
        batch = owner // heads
        index = owner % heads
        if C.MODE == _PAIRS:
            ib, jb = part // columns, part % columns
            fewer = heads // shared_heads  # heads that the bias tells apart
            batch = (owner // fewer) + t // shared_heads
            index = (owner % fewer) + t % shared_heads
        elif C.MODE == _ROWS:
            ib, jb = part, t
        elif C.MODE == _KEYS:
            ib, jb = t, part
        else:
            ib, jb = part * shared_rows + t // columns, t % columns
        i = ib * BLOCK + r
        j = jb * BLOCK + r
        slot = 0
        visible = ib * BLOCK < n
        if C.MASK == _BITS:
            if visible:
                slot = mask_slot(blocks, batch, index, ib, jb, tl.cdiv(m, 128), PER)
            visible = visible & (slot >= 0)
        if C.MASK == _SPANS:
            lo, hi = row_spans(blocks, batch, index, i, n, m, C.MASK)
            visible = visible & (tl.max(tl.where(hi > lo, hi, 0), 0) > jb * BLOCK) & (tl.min(tl.where(hi > lo, lo, m), 0) < (jb + 1) * BLOCK)
        if visible:
            scale = head_scale(score, index, C)
            first_row = (batch.to(tl.int64) * heads + index) * n
            head = Head(batch, index, index // groups, first_row, scale, scale * LOG2E, score, blocks, dropout, sizes)
            dS = logit_gradient(x, stats, head, i, j, slot, C)
            if C.MODE == _PAIRS:
                pair += dS
            elif C.MODE == _ROWS:
                if C.BIAS == _BIAS_ALIBI:
                    dS *= -tl.abs(i[:, None] + bias.offset - j[None, :]).to(tl.float32)
                line += tl.sum(dS, 1)
            elif C.MODE == _KEYS:
                line += tl.sum(dS, 0)
            else:
                c = tl.arange(0, 2 * BLOCK)  # diagonal c holds the pairs with j − i = c − (BLOCK − 1) in the tile
                y = r[:, None] + c[None, :] - (BLOCK - 1)  # [BLOCK, 2·BLOCK]
                inside = (y >= 0) & (y < BLOCK)
                skewed = tl.gather(dS, tl.minimum(tl.maximum(y, 0), BLOCK - 1), 1)
                diagonal = tl.sum(tl.where(inside, skewed, 0.0), 0)  # [2·BLOCK]
                ahead = (jb - ib) * BLOCK + c - (BLOCK - 1) - bias.offset
                low += tl.sum(tl.where(ahead <= -bias.reach, diagonal, 0.0), 0)
                high += tl.sum(tl.where((ahead >= bias.reach) & (ahead > -bias.reach), diagonal, 0.0), 0)
                within = (ahead > -bias.reach) & (ahead < bias.reach)
                at = out + ahead + bias.reach
                before = tl.load(at, mask=within, other=0.0)
                tl.debug_barrier()
                tl.store(at, before + diagonal, mask=within)
                tl.debug_barrier()
    i = (part // columns if C.MODE == _PAIRS else part) * BLOCK + r
    if C.MODE == _PAIRS:
        j = (part % columns) * BLOCK + r
        at = (owner.to(tl.int64) * n + i)[:, None] * m + j[None, :]
        tl.store(out + at, pair, mask=(i < n)[:, None] & (j < m)[None, :])
    elif C.MODE == _ROWS:
        tl.store(out + owner.to(tl.int64) * n + i, line, mask=i < n)
    elif C.MODE == _KEYS:
        tl.store(out + owner.to(tl.int64) * m + i, line, mask=i < m)
    else:  # with a reach of 0 both ends are one entry
        tl.store(out, tl.where(bias.reach > 0, low, low + high))
        if bias.reach > 0:
            tl.store(out + 2 * bias.reach, high)
