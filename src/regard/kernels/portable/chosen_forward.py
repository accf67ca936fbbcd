"""The forward pass for rows with lists of keys: the rows of grouped heads that share a list form the tile.

A program gathers the keys and values that its list names, a few at a time, and folds them by the online softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chosen_tile import (
    capped_logits,
    listed_keys,
    load_keys,
    load_tile,
    program_list,
    row_tile,
    store_tile,
    visible_pairs,
)
from .forward import online_softmax
from .tile_ops import LN2, LOWEST, dropout_keep

__all__ = ["chosen_forward"]


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "owners", "height", "count", "width", "tiles", "programs"])
def chosen_forward(
    q, k, v, out, strides, lists, dropout, scale, cap, n, m, heads, groups, owners, height, count, width, tiles, programs, C: tl.constexpr
):  # fmt: skip
    """Program (tile of rows, list, group of heads, batch item); the last lists first, which often are the longest.

    `owners` is how many groups share a key head, `height` the rows of a list, `count` the number of lists, `width` that
    of the entries of each, `tiles` that of its tiles.
    """
    at = programs - 1 - tl.program_id(0)
    tile, at = at % tiles, at // tiles
    place, list_, group, item, kv_head, start, entries = program_list(at, lists, 0, count, heads, groups, owners)
    rows = row_tile(lists, dropout, item, group, list_, tile, n, heads, groups, height, C)
    Q = load_tile(q, strides.q, item, rows, C.D, C.DP)
    O = tl.zeros([C.BM, C.DVP], tl.float32)
    row_max = tl.full([C.BM], LOWEST, tl.float32)
    l = tl.zeros([C.BM], tl.float32)
    e = tl.zeros([C.BM], tl.float32)
    for first in range(0, entries * C.SIZE, C.BN):
        j, some = listed_keys(lists, start, width, first, entries, m, C)
        show, some = visible_pairs(rows, j, some, C)
        K = load_keys(k, strides.k, item, kv_head, j, some, C.D, C.DP)
        S = capped_logits(Q, K, scale, cap, C)  # [BM, BN]
        P, row_max, l, e, a, _, _ = online_softmax(S, show, row_max, l, e, 1.0, C, True)
        if C.DROP:
            P = tl.where(dropout_keep(rows.low_key, rows.high_key, j, dropout.bound), P, 0.0)
        V = load_keys(v, strides.v, item, kv_head, j, some, C.DV, C.DVP)
        O = tl.dot(P.to(V.dtype), V, O * a[:, None], input_precision=C.PRECISION)

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    O = O * (dropout.factor / l)[:, None] if C.DROP else O * (1.0 / l)[:, None]
    store_tile(out.output, strides.output, item, rows, O, C.DV, C.DVP)
    to = (item.to(tl.int64) * heads + rows.head) * n + rows.i
    log_row_sum = tl.log2(l) * LN2
    tl.store(out.lse + to, tl.where(empty, float("-inf"), row_max + log_row_sum), mask=rows.live)
    tl.store(out.max_logit + to, tl.where(empty, float("-inf"), row_max), mask=rows.live)
    tl.store(out.log_row_sum + to, log_row_sum, mask=rows.live)
    if C.ENTROPY:
        tl.store(out.entropy + to, log_row_sum - e / l * LN2, mask=rows.live)
