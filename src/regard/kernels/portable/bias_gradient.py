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
from .backward import down_columns, folded, softmax_backward
from .program import (
    do_at,
    head_at,
    head_logits,
    k_at,
    load_do,
    load_k,
    load_q,
    load_row_stats,
    load_row_tile,
    load_v,
    q_at,
    raw_scores,
    v_at,
)
from .tile_ops import _BIAS_ALIBI, _BITS, _SPANS, dropout_keep, mask_item, mask_tile, program_tile, row_spans

PAIRS, ROWS, KEYS, TABLE = 0, 1, 2, 3
_PAIRS, _ROWS, _KEYS, _TABLE = tl.constexpr(PAIRS), tl.constexpr(ROWS), tl.constexpr(KEYS), tl.constexpr(TABLE)


@triton.jit
def mask_slot(blocks, batch, index, ib, jb, key_blocks, PER: tl.constexpr):
    """The slot of the bits of tile (ib, jb) in blocks of 128 / PER; −1 where all is hidden."""
    at = mask_item(blocks, batch).to(tl.int64) * blocks.table_item + index * blocks.table_head
    return tl.load(blocks.table + at + (ib // PER) * key_blocks + jb // PER)


@triton.jit
def logit_gradient(q, k, v, do, args, stats, head, i0, j0, slot, C: tl.constexpr):
    """dS [BM, BN] of the logits of the rows from i0 on and the keys from j0 on."""
    x = Matrices(q_at(q, head, args.strides.x, C), k_at(k, head, args.strides.x, C), v_at(v, head, args.strides.x, C), do_at(do, head, args.strides.do, C), args.strides.x, args.strides.do)
    rows = load_row_tile(head, i0 + tl.arange(0, C.BM), C, True)
    j = j0 + tl.arange(0, C.BN)
    S = raw_scores(load_q(x, head, i0, C), load_k(x, head, j0, C, True), x, head, rows.i, j, C)
    S, show = head_logits(S, rows, j, head, C)
    show = show & mask_tile(head.blocks, rows.lo, rows.hi, slot, rows.i, j, C.MASK)
    V = load_v(x, head, j0, C, True)  # [BN, DVP]
    dO = load_do(x, head, i0, C)  # [BM, DVP]
    dP = tl.dot(dO, tl.trans(V), input_precision=C.PRECISION)
    keep = show
    if C.DROP:
        keep = dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound)
    row = folded(load_row_stats(stats, head, rows.i, C), C)
    _, dS, _ = softmax_backward(S, dP, S, S, show, (), keep, down_columns(row), head, C, True)
    return dS


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "parts", "tiles", "shared_heads", "shared_rows"])
def bias_gradient(q, k, v, do, out, stats, args, n, m, heads, groups, parts, tiles, shared_heads, shared_rows, C: tl.constexpr):
    """Program (part of the result, batch item and head of it); `tiles` tiles add to it, of all items and heads that share it.

    `parts` is how many there are per item and head; `shared_heads` heads and `shared_rows` blocks of rows share one.
    """
    bias, blocks = args.score.bias, args.blocks
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
            ib, jb = part, part * 0 + t
        elif C.MODE == _KEYS:
            ib, jb = part * 0 + t, part  # numbers of the chip in the interpreter, too
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
            sizes = Sizes(n, m, heads, groups)
            head = Head(*head_at(args, sizes, batch, index, index // groups, C), args.score, args.blocks, args.dropout, sizes)
            dS = logit_gradient(q, k, v, do, args, stats, head, ib * BLOCK, jb * BLOCK, slot, C)
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
