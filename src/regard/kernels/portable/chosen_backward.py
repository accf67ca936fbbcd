"""The backward pass for rows with lists of keys.

`chosen_dq` goes by lists. What a list adds to the gradients of its keys, `chosen_dkdv` (or `chosen_dq` itself, where one
tile holds all rows of a list) leaves in a buffer, entry by entry. `sum_entries` goes by keys: for each it adds up the
entries that name it, in the order of the lists. So no two programs add to one number, and the bits are always the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chosen_tile import (
    listed_keys,
    load_keys,
    load_queries,
    load_row_grads,
    program_list,
    row_tile,
    store_tile,
    tile_gradients,
    visible_pairs,
)

__all__ = ["chosen_dkdv", "chosen_dq", "sum_entries"]

@triton.jit
def store_entries(parts, at, column, inside, X, FIRST: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr):
    """Store what columns [BN] of a list add, [BN, PADDED], at FIRST of the buffer's rows, which for this list begin at `at`."""
    d = tl.arange(0, PADDED)
    to = parts + (at + column).to(tl.int64)[:, None] * (C.D + C.DV) + FIRST + d[None, :]
    tl.store(to, X.to(parts.dtype.element_ty), mask=inside[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["first_list", "n", "m", "heads", "groups", "owners", "height", "count", "width", "tiles"])
def chosen_dq(
    q, k, v, given, dq, parts, strides, lists, dropout, scale, cap, first_list, n, m, heads, groups, owners, height, count, width, tiles, C: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Program (tile of rows, one of `count` lists from `first_list` on, group of heads, batch item)."""
    at = tl.program_id(0)
    tile, at = at % tiles, at // tiles
    place, list_, group, item, kv_head, start, entries = program_list(at, lists, first_list, count, heads, groups, owners)
    rows = row_tile(lists, dropout, item, group, list_, tile, n, heads, groups, height, C)
    Q = load_queries(q, strides, item, rows, given, n, heads, C)
    row = load_row_grads(given, strides, item, rows, n, heads, C)
    to = ((item.to(tl.int64) * (heads // groups) + group) * count + place) * (width * C.SIZE)
    dQ = tl.zeros([C.BM, C.DP], tl.float32)
    for first in range(0, entries * C.SIZE, C.BN):
        j, some = listed_keys(lists, start, width, first, entries, m, C)
        show, some = visible_pairs(rows, j, some, C)
        K = load_keys(k, strides.k, item, kv_head, j, some, C.D, C.DP)
        V = load_keys(v, strides.v, item, kv_head, j, some, C.DV, C.DVP)
        P, dS = tile_gradients(Q, K, V, row, rows, j, show, scale, cap, dropout, C)
        dS = dS.to(K.dtype)
        dQ = tl.dot(dS, K, dQ, input_precision=C.PRECISION)
        if PARTS:
            column = first + tl.arange(0, C.BN)
            inside = column < entries * C.SIZE
            store_entries(parts, to, column, inside, tl.dot(tl.trans(dS), Q, input_precision=C.PRECISION), 0, C.D, C.DP, C)
            dV = tl.dot(tl.trans(P.to(row.dO.dtype)), row.dO, input_precision=C.PRECISION)
            store_entries(parts, to, column, inside, dV, C.D, C.DV, C.DVP, C)
    store_tile(dq, strides.dq, item, rows, dQ, C.D, C.DP)


@triton.jit(do_not_specialize=["first_list", "n", "m", "heads", "groups", "owners", "height", "count", "width", "tiles", "blocks"])
def chosen_dkdv(
    q, k, v, given, parts, strides, lists, dropout, scale, cap, first_list, n, m, heads, groups, owners, height, count, width, tiles, blocks, C: tl.constexpr
):  # fmt: skip
    """Program (BN columns of a list, list, group of heads, batch item): what all rows of the list add."""
    at = tl.program_id(0)
    block, at = at % blocks, at // blocks
    place, list_, group, item, kv_head, start, entries = program_list(at, lists, first_list, count, heads, groups, owners)
    j, some = listed_keys(lists, start, width, block * C.BN, entries, m, C)
    K = load_keys(k, strides.k, item, kv_head, j, some, C.D, C.DP)
    V = load_keys(v, strides.v, item, kv_head, j, some, C.DV, C.DVP)
    dK = tl.zeros([C.BN, C.DP], tl.float32)
    dV = tl.zeros([C.BN, C.DVP], tl.float32)
    if block * C.BN < entries * C.SIZE:
        for tile in range(tiles):
            rows = row_tile(lists, dropout, item, group, list_, tile, n, heads, groups, height, C)
            Q = load_queries(q, strides, item, rows, given, n, heads, C)
            row = load_row_grads(given, strides, item, rows, n, heads, C)
            show, seen = visible_pairs(rows, j, some, C)
            P, dS = tile_gradients(Q, K, V, row, rows, j, show, scale, cap, dropout, C)
            dK = tl.dot(tl.trans(dS.to(Q.dtype)), Q, dK, input_precision=C.PRECISION)
            dV = tl.dot(tl.trans(P.to(row.dO.dtype)), row.dO, dV, input_precision=C.PRECISION)
    column = block * C.BN + tl.arange(0, C.BN)
    inside = column < entries * C.SIZE
    to = ((item.to(tl.int64) * (heads // groups) + group) * count + place) * (width * C.SIZE)
    store_entries(parts, to, column, inside, dK, 0, C.D, C.DP, C)
    store_entries(parts, to, column, inside, dV, C.D, C.DV, C.DVP, C)


@triton.jit(do_not_specialize=["m", "kv_heads", "owners", "count", "width", "blocks", "chunk", "chunks", "offset", "entries", "inner", "shared", "items", "heads", "stride"])
def sum_entries(
    parts, total, order, starts, m, kv_heads, owners, count, width, blocks, chunk, chunks, offset, entries, inner, shared, items, heads, stride, COPIES: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Program (ROWS keys of an entry, entry, key head, batch item): add up what one chunk of the lists adds to them.

    `order` (items, heads, entries of all lists) are the entries of each chunk by key, `starts` (items, heads, chunks,
    blocks + 1) where those of a key begin, counted from `offset`, where the chunk does. `items` and `heads` are 1 where
    these are shared. `parts` has COPIES of each entry, `stride` keys apart, from different rows. AT_ONCE of all these
    are added up at a time.
    """
    at = tl.program_id(0)
    pieces = (SIZE + ROWS - 1) // ROWS
    piece, at = at % pieces, at // pieces
    block, at = at % blocks, at // blocks
    kv_head, item = at % kv_heads, at // kv_heads
    r = piece * ROWS + tl.arange(0, ROWS)  # [ROWS] keys within the entry
    d = tl.arange(0, DP)
    j = block * SIZE + r
    inside = ((r < SIZE) & (j < m))[:, None] & (d < D)[None, :]
    within = r[:, None] * D + d[None, :]  # [ROWS, DP]
    X = tl.zeros([ROWS, DP], tl.float32)
    named = 0
    for g in range(owners):
        group = kv_head * owners + g
        listed = tl.where(items > 1, item // inner, 0).to(tl.int64) * heads + tl.where(heads > 1, group // shared, 0)
        start = (listed * chunks + chunk) * (blocks + 1) + block
        first, last = tl.load(starts + start) * COPIES, tl.load(starts + start + 1) * COPIES
        named += last - first
        own = parts + (item.to(tl.int64) * (kv_heads * owners) + group) * count * width * SIZE * D
        its = order + listed * entries + offset
        for s in range(first, last, AT_ONCE):
            some = s + tl.arange(0, AT_ONCE)
            e = tl.load(its + some // COPIES, mask=some < last, other=offset).to(tl.int64) - offset
            row = some % COPIES * stride + e * SIZE
            Y = tl.load(own + (row * D)[:, None, None] + within[None, :, :], mask=(some < last)[:, None, None] & inside[None, :, :], other=0.0)
            X += tl.sum(Y.to(tl.float32), 0)
    if named > 0:
        to = total + ((item.to(tl.int64) * kv_heads + kv_head) * m + j.to(tl.int64))[:, None] * D + d[None, :]
        tl.store(to, tl.load(to, mask=inside, other=0.0) + X, mask=inside)
