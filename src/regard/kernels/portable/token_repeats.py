"""The weight of each row on earlier copies of its token, and on what followed them.

Rows and keys are taken in the order of their tokens. There the copies of a token are next to each other, so a tile of rows needs few
tiles of keys, however long the text is. P = exp(S − row max − log row sum), as in `statistics`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arguments import Sizes
from .aggregates import Head, Matrices
from .program import head_logits, k_at, load_row_tile, program_head, q_at, raw_scores
from .statistics import load_normalizer
from .tile_ops import _BIAS_NONE, LOG2E, load_rows, program_tile, unaligned_mask_tile


@triton.jit
def weight_on(Q, x, head, normalizer, rows, j, chosen, key_blocks, C: tl.constexpr):
    """Σ over keys j [BN], in any order, of the weights of rows [BM], in any order, for the chosen pairs [BM, BN]."""
    m = head.sizes.m
    offset, log_sum = normalizer
    K = j
    if C.HIDDEN_DIM == 0:
        K = load_rows(x.k, j.to(tl.int64) * x.strides.k_row, j < m, C.D, x.strides.k_dim, C.DP, True)
    S = raw_scores(Q, K, x, head, rows.i, j, C)
    if not C.FAST:
        S, show = head_logits(S, rows, j, head, C)
        if C.BIAS != _BIAS_NONE:
            chosen = chosen & show
    T = S * head.unit - offset[:, None] if C.FAST else (S - offset[:, None]) * LOG2E
    show = unaligned_mask_tile(head.blocks, head.batch, head.index, rows.lo, rows.hi, rows.i, j, key_blocks, C.MASK)
    return tl.sum(tl.where(chosen & show, tl.exp2(T - log_sum[:, None]), 0.0), 1)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "key_blocks"])
def token_repeats(q, k, out, runs, stats, args, n, m, heads, groups, key_blocks, C: tl.constexpr):
    """Both sums of BM rows: program (block of rows in the order of their tokens, batch item and head)."""
    strides = args.strides
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(tl.cdiv(n, C.BM))
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(q_at(q, head, strides, C), k_at(k, head, strides, C), None, None, strides, None)
    order, begin = runs.order + head.batch.to(tl.int64) * n, runs.begin + head.batch.to(tl.int64) * n
    place = block * C.BM + tl.arange(0, C.BM)
    i = tl.load(order + place, mask=place < n, other=n)  # rows
    run = tl.load(begin + place, mask=place < n, other=n)  # the place of the first copy
    Q = place
    if C.HIDDEN_DIM == 0:
        Q = load_rows(x.q, i.to(tl.int64) * strides.q_row, i < n, C.D, strides.q_dim, C.DP, True)
    rows = load_row_tile(head, i, C, True)
    normalizer = load_normalizer(stats, head, i, C)
    same = tl.zeros([C.BM], tl.float32)
    after = tl.zeros([C.BM], tl.float32)
    for start in range(tl.min(run, 0), tl.minimum(block * C.BM + C.BM, n), C.BN):
        copies = start + tl.arange(0, C.BN)
        j = tl.load(order + copies, mask=copies < n, other=n)
        of_token = (tl.load(begin + copies, mask=copies < n, other=-1)[None, :] == run[:, None]) & (j[None, :] < i[:, None])
        same += weight_on(Q, x, head, normalizer, rows, j, of_token, key_blocks, C)
        after += weight_on(Q, x, head, normalizer, rows, j + 1, of_token & (j[None, :] + 1 < i[:, None]), key_blocks, C)
    tl.store(out.duplicate + head.first_row + i, same, mask=place < n)
    tl.store(out.induction + head.first_row + i, after, mask=place < n)
