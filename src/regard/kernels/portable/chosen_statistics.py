"""Statistics of the weights of rows with lists of keys, from q, k and what the forward pass found."""

from __future__ import annotations

import triton
import triton.language as tl

from .chosen_tile import (
    capped_logits,
    listed_keys,
    load_keys,
    load_normalizer,
    load_tile,
    program_list,
    row_tile,
    rows_at,
    visible_pairs,
)
from .statistics import empty_ranks, insert
from .tile_ops import LOG2E

__all__ = ["chosen_received", "chosen_top"]


@triton.jit
def load_rows(q, stats, strides, lists, dropout, item, first_head, last_head, list_, tile, n, heads, height, C: tl.constexpr):
    """Rows `tile` of a list in HB heads: row after row, and of each these heads; their queries and normalizer."""
    t = tl.arange(0, C.BM)
    r = tile * (C.BM // C.HB) + t // C.HB  # [BM] within the list
    i, head = list_ * height + r, first_head + t % C.HB
    rows = rows_at(lists, dropout, item, i, head, (r < height) & (i < n) & (head < last_head), n, heads, C)
    row_max, log_row_sum = load_normalizer(stats, item, rows, n, heads)
    return rows, load_tile(q, strides.q, item, rows, C.D, C.DP), row_max, log_row_sum


@triton.jit
def received_from(rows, Q, row_max, log_row_sum, K, j, some, scale, cap, C: tl.constexpr):
    """What keys j receive from rows: [BN, HB]."""
    show, some = visible_pairs(rows, j, some, C)
    X = capped_logits(Q, K, scale, cap, C) - row_max[:, None]
    P = tl.where(show, tl.exp2((X - log_row_sum[:, None]) * LOG2E), 0.0)  # [BM, BN]
    if C.BM > C.HB:
        P = tl.sum(tl.reshape(P, [C.BM // C.HB, C.HB, C.BN]), 0)
    return tl.trans(P)


@triton.jit(do_not_specialize=["first_list", "n", "m", "heads", "owners", "height", "count", "width", "columns", "blocks"])
def chosen_received(
    q, k, stats, parts, strides, lists, dropout, scale, cap, first_list, n, m, heads, groups, owners, height, count, width, tiles, columns, blocks, C: tl.constexpr
):  # fmt: skip
    """Program (`columns` of a list, HB heads of a group, one of `count` lists, group, batch item).

    Store what the rows of the list give to the keys of these columns. With one tile, which Triton compiles apart, no
    loop is within the loop over keys, so that their loads are pipelined.
    """
    at = tl.program_id(0)
    block, at = at % blocks, at // blocks
    strip, at = at % tl.cdiv(groups, C.HB), at // tl.cdiv(groups, C.HB)
    place, list_, group, item, kv_head, start, entries = program_list(at, lists, first_list, count, heads, groups, owners)
    first_head, last_head = group * groups + strip * C.HB, (group + 1) * groups
    h = strip * C.HB + tl.arange(0, C.HB)
    to = ((item.to(tl.int64) * (heads // groups) + group) * count + place) * (width * C.SIZE)
    rows, Q, row_max, log_row_sum = load_rows(q, stats, strides, lists, dropout, item, first_head, last_head, list_, 0, n, heads, height, C)
    for first in range(block * columns, tl.minimum((block + 1) * columns, entries * C.SIZE), C.BN):
        j, some = listed_keys(lists, start, width, first, entries, m, C)
        K = load_keys(k, strides.k, item, kv_head, j, some, C.D, C.DP)
        X = received_from(rows, Q, row_max, log_row_sum, K, j, some, scale, cap, C)
        for tile in range(1, tiles):
            more, Q_more, max_more, sum_more = load_rows(q, stats, strides, lists, dropout, item, first_head, last_head, list_, tile, n, heads, height, C)
            X += received_from(more, Q_more, max_more, sum_more, K, j, some, scale, cap, C)
        column = first + tl.arange(0, C.BN)
        inside = (column < entries * C.SIZE)[:, None] & (h < groups)[None, :]
        tl.store(parts + (to + column)[:, None] * groups + h[None, :], X, mask=inside)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "owners", "height", "count", "width", "tiles", "programs", "k_best"])
def chosen_top(
    q, k, out, strides, lists, dropout, scale, cap, n, m, heads, groups, owners, height, count, width, tiles, programs, k_best, C: tl.constexpr
):  # fmt: skip
    """The ranks of the KP strongest pairs of each row, in no order: program (tile of rows, list, group, batch item)."""
    at = programs - 1 - tl.program_id(0)
    tile, at = at % tiles, at // tiles
    _, list_, group, item, kv_head, start, entries = program_list(at, lists, 0, count, heads, groups, owners)
    rows = row_tile(lists, dropout, item, group, list_, tile, n, heads, groups, height, C)
    Q = load_tile(q, strides.q, item, rows, C.D, C.DP)
    slots = tl.arange(0, C.KP)
    best = empty_ranks(k_best, C)
    for first in range(0, entries * C.SIZE, C.BN):
        j, some = listed_keys(lists, start, width, first, entries, m, C)
        show, some = visible_pairs(rows, j, some, C)
        K = load_keys(k, strides.k, item, kv_head, j, some, C.D, C.DP)
        best = insert(best, tl.where(show, capped_logits(Q, K, scale, cap, C), float("-inf")), j)
    to = ((item.to(tl.int64) * heads + rows.head) * n + rows.i)[:, None] * C.KP + slots[None, :]
    tl.store(out + to, best, mask=rows.live[:, None])
