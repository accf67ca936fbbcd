"""The gradient of a bias: dS summed over what the bias does not tell apart, without atomics and without n × m numbers.

A program owns a part of the result and walks over all tiles that add to it. PAIRS: a tensor with rows and keys; the
program owns a tile and walks over items and heads that share it. ROWS, KEYS: a sum for each row (weighted by the
distance for the slopes of alibi) or key. TABLE: the sums along the diagonals, for a table of relative positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import row_facts, weights_and_slopes
from .tile_ops import (
    _ALIBI,
    _BITS,
    _SPANS,
    LOG2E,
    additive,
    bias_rows,
    drop_keys,
    kept,
    load,
    logits,
    seats,
    shown,
    span_rows,
)

PAIRS, ROWS, KEYS, TABLE = 0, 1, 2, 3
_PAIRS, _ROWS, _KEYS, _TABLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def slot_of(where, l, h, ib, jb, key_blocks, PER: tl.constexpr):
    """The slot of the bits of tile (ib, jb) in blocks of 128 / PER; −1 where all is hidden."""
    at = (l // tl.load(where.inner)).to(tl.int64) * where.table_item + h * where.table_head
    return tl.load(where.table + at + (ib // PER) * key_blocks + jb // PER)


@triton.jit
def slopes(q, k, v, do, row_max, log_row_sum, delta, g_entropy, mean, strides, do_item, do_head, do_row, do_dim, scale, scales, cap, bias, where, drop, vector,
           l, h, i, j, slot, n, M, heads, groups,
           D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr, DROP: tl.constexpr,
           SCALES: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr):
    """dS [BM, BN] of the logits of rows i and keys j."""
    wide = l.to(tl.int64)
    q += wide * strides.q_item + h.to(tl.int64) * strides.q_head
    k += wide * strides.k_item + (h // groups).to(tl.int64) * strides.k_head
    v += wide * strides.v_item + (h // groups).to(tl.int64) * strides.v_head
    if SCALES:
        scale = tl.load(scales + h)
    if HIDDEN > 0:
        S = additive(q, k, vector, i, j, n, M, strides.q_row, strides.q_dim, strides.k_row, strides.k_dim, BM, BN, HIDDEN, APPROXIMATE)
    else:
        Q = load(q, i.to(tl.int64) * strides.q_row, i < n, D, strides.q_dim, DP, True)  # [BM, DP]
        K = load(k, j.to(tl.int64) * strides.k_row, j < M, D, strides.k_dim, DP, True)  # [BN, DP]
        S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
    S, show = logits(S, scale, cap, bias, bias_rows(bias, l, h, i, BIAS), i, j, n, M, CAP, BIAS)
    lo, hi = span_rows(where, l, h, i, n, M, MASK)
    show = show & shown(where, lo, hi, slot, i, j, MASK)
    V = load(v, j.to(tl.int64) * strides.v_row, j < M, DV, strides.v_dim, DVP, True)  # [BN, DVP]
    dO = load(do + wide * do_item + h.to(tl.int64) * do_head, i.to(tl.int64) * do_row, i < n, DV, do_dim, DVP, True)  # [BM, DVP]
    dP = tl.dot(dO, tl.trans(V), input_precision=PRECISION)
    keep = show
    if DROP:
        low, high = drop_keys(drop, l, h, heads, i, n)
        keep = kept(low, high, j, drop.bound)
    level, above, d, g, e = row_facts((wide * heads + h) * n, row_max, log_row_sum, delta, g_entropy, mean, i, n, ENTROPY, False, EXACT)
    _, dS, _ = weights_and_slopes(S, dP, S, show, level[:, None], above[:, None], d[:, None], g[:, None], e[:, None], keep,
                                  drop.factor, scale, scale * LOG2E, cap, ENTROPY, False, EXACT, False, DROP, True)
    return dS


@triton.jit(do_not_specialize=["n", "M", "turns", "per", "where", "drop", "key_blocks", "heads", "groups", "parts", "shared_heads"])
def bias_gradient(q, k, v, do, out, row_max, log_row_sum, delta, g_entropy, mean, strides, do_item, do_head, do_row, do_dim, scale, scales, cap, bias, where,
                  drop, vector, n, M, heads, groups, parts, key_blocks, shared_heads, turns, per,
                  D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr,
                  MASK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr, ENTROPY: tl.constexpr, DROP: tl.constexpr,
                  SCALES: tl.constexpr, HIDDEN: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr,
                  MODE: tl.constexpr):
    """Program (part of the result, item and head of it); `turns` tiles add to it, of all items and heads that share it."""
    part, own = seats(parts)
    blocks = tl.cdiv(M, BLOCK)
    r = tl.arange(0, BLOCK)
    PER: tl.constexpr = 128 // BLOCK
    pair = tl.zeros([BLOCK, BLOCK], tl.float32)
    line = tl.zeros([BLOCK], tl.float32)
    low = 0.0
    high = 0.0
    if MODE == _TABLE:
        out += (own.to(tl.int64) * parts + part) * (2 * bias.reach + 1)
    for t in range(turns):
        l = own // heads
        h = own % heads
        if MODE == _PAIRS:
            ib, jb = part // blocks, part % blocks
            fewer = heads // shared_heads  # heads that the bias tells apart
            l = (own // fewer) + t // shared_heads
            h = (own % fewer) + t % shared_heads
        elif MODE == _ROWS:
            ib, jb = part, t
        elif MODE == _KEYS:
            ib, jb = t, part
        else:
            ib, jb = part * per + t // blocks, t % blocks
        i = ib * BLOCK + r
        j = jb * BLOCK + r
        slot = 0
        visible = ib * BLOCK < n
        if MASK == _BITS:
            if visible:
                slot = slot_of(where, l, h, ib, jb, key_blocks, PER)
            visible = visible & (slot >= 0)
        if MASK == _SPANS:
            lo, hi = span_rows(where, l, h, i, n, M, MASK)
            visible = visible & (tl.max(tl.where(hi > lo, hi, 0), 0) > jb * BLOCK) & (tl.min(tl.where(hi > lo, lo, M), 0) < (jb + 1) * BLOCK)
        if visible:
            dS = slopes(q, k, v, do, row_max, log_row_sum, delta, g_entropy, mean, strides, do_item, do_head, do_row, do_dim, scale, scales, cap, bias, where,
                        drop, vector, l, h, i, j, slot, n, M, heads, groups, D, DV, DP, DVP, BLOCK, BLOCK, MASK, BIAS, CAP,
                        EXACT, ENTROPY, DROP, SCALES, HIDDEN, APPROXIMATE, PRECISION)
            if MODE == _PAIRS:
                pair += dS
            elif MODE == _ROWS:
                if BIAS == _ALIBI:
                    dS *= -tl.abs(i[:, None] + bias.offset - j[None, :]).to(tl.float32)
                line += tl.sum(dS, 1)
            elif MODE == _KEYS:
                line += tl.sum(dS, 0)
            else:
                c = tl.arange(0, 2 * BLOCK)  # diagonal c holds the pairs with j − i = c − (BLOCK − 1) in the tile
                y = r[:, None] + c[None, :] - (BLOCK - 1)  # [BLOCK, 2·BLOCK]
                inside = (y >= 0) & (y < BLOCK)
                skewed = tl.gather(dS, tl.minimum(tl.maximum(y, 0), BLOCK - 1), 1)
                diagonal = tl.sum(tl.where(inside, skewed, 0.0), 0)  # [2·BLOCK]
                ahead = (jb - ib) * BLOCK + c - (BLOCK - 1) - bias.offset
                low += tl.sum(tl.where(ahead <= -bias.reach, diagonal, 0.0), 0)
                high += tl.sum(tl.where(ahead >= bias.reach, diagonal, 0.0), 0)
                within = (ahead > -bias.reach) & (ahead < bias.reach)
                at = out + ahead + bias.reach
                before = tl.load(at, mask=within, other=0.0)
                tl.debug_barrier()
                tl.store(at, before + diagonal, mask=within)
                tl.debug_barrier()
    i = (part // blocks if MODE == _PAIRS else part) * BLOCK + r
    if MODE == _PAIRS:
        j = (part % blocks) * BLOCK + r
        at = (own.to(tl.int64) * n + i)[:, None] * M + j[None, :]
        tl.store(out + at, pair, mask=(i < n)[:, None] & (j < M)[None, :])
    elif MODE == _ROWS:
        tl.store(out + own.to(tl.int64) * n + i, line, mask=i < n)
    elif MODE == _KEYS:
        tl.store(out + own.to(tl.int64) * M + i, line, mask=i < M)
    else:  # with a reach of 0 both ends are one entry
        tl.store(out, low if bias.reach > 0 else tl.where(True, high, high))
        if bias.reach > 0:
            tl.store(out + 2 * bias.reach, high)
