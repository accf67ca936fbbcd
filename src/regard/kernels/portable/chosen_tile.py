"""Tiles of rows that share a list of keys: the rows of grouped heads, and the keys that the list names, by their index."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...masks.lists import NONE
from .tile_ops import LOG2E, dropout_keep, tanh

_NONE = tl.constexpr(NONE)


class ListArgs(NamedTuple):
    """Lists of keys as kernels read them."""

    entries: Any  # int32 (items, heads, lists, K), NONE where there is none
    counts: Any  # int32 (items, heads, lists): after how many entries there is none
    lo: Any  # int32 (items, heads, N): rows see keys of their list from lo …
    hi: Any  # … to hi; None if they see all
    item: int  # strides of the counts; those of the entries are K times as large
    head: int
    span_item: int  # strides of lo and hi
    span_head: int
    inner: int  # batch items that share an item of the mask
    shared: int  # heads of the problem per head of the lists


class TensorStrides(NamedTuple):
    """Strides of a tensor (L, H, N, D) in elements; that of D is 1."""

    item: int
    head: int
    row: int


class RowTile(NamedTuple):
    """The rows of a tile, [BM] each."""

    i: Any
    head: Any
    live: Any  # whether there is such a row
    lo: Any
    hi: Any
    least: Any  # of lo, over all rows
    most: Any  # of hi
    low_key: Any  # of dropout
    high_key: Any


@triton.jit
def row_tile(lists, dropout, item, group, list_, tile, n, heads, groups, height, C: tl.constexpr):
    """Rows `tile` of a list: row after row, and of each the heads of the group."""
    t = tile * C.BM + tl.arange(0, C.BM)  # [BM]
    i = list_ * height + t // groups
    head = group * groups + t % groups
    return rows_at(lists, dropout, item, i, head, (t < height * groups) & (i < n), n, heads, C)


@triton.jit
def rows_at(lists, dropout, item, i, head, live, n, heads, C: tl.constexpr):
    """The rows i [BM] of heads [BM], where they are live."""
    lo = i
    hi = i
    least = 0
    most = 0
    if C.SPANS:
        at = (item // lists.inner).to(tl.int64) * lists.span_item + head * lists.span_head + i
        lo, hi = tl.load(lists.lo + at, mask=live, other=0), tl.load(lists.hi + at, mask=live, other=0)
        least, most = tl.min(tl.where(live, lo, _NONE), 0), tl.max(hi, 0)
    low = i
    high = i
    if C.DROP:
        key = tl.load(dropout.keys + (item.to(tl.int64) * heads + head) * n + i, mask=live, other=0)
        low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    return RowTile(i, head, live, lo, hi, least, most, low, high)


@triton.jit
def load_tile(x, strides, item, rows, DIM: tl.constexpr, PADDED: tl.constexpr):
    """The rows of a tensor (L, H, N, D): [BM, PADDED]."""
    d = tl.arange(0, PADDED)
    at = item.to(tl.int64) * strides.item + rows.head.to(tl.int64) * strides.head + rows.i.to(tl.int64) * strides.row
    return tl.load(x + at[:, None] + d[None, :], mask=rows.live[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def store_tile(x, strides, item, rows, X, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store rows [BM, PADDED]."""
    d = tl.arange(0, PADDED)
    at = item.to(tl.int64) * strides.item + rows.head.to(tl.int64) * strides.head + rows.i.to(tl.int64) * strides.row
    tl.store(x + at[:, None] + d[None, :], X.to(x.dtype.element_ty), mask=rows.live[:, None] & (d < DIM)[None, :])


@triton.jit
def program_list(at, lists, first_list, count, heads, groups, owners):
    """The list of a program, whose place is `at` among `count` lists from `first_list` on, groups of heads and batch items.

    Its place among those lists, its number, its group, item and key head; where it is among the counts, and how many entries it has.
    """
    place, at = at % count, at // count
    group, item = at % (heads // groups), at // (heads // groups)
    list_ = first_list + place
    start = (item // lists.inner).to(tl.int64) * lists.item + (group // lists.shared) * lists.head + list_
    return place, list_, group, item, group // owners, start, tl.load(lists.counts + start)


@triton.jit
def listed_keys(lists, start, width, first, count, m, C: tl.constexpr):
    """The keys [BN] of a list from column `first` on, and which of them are some, and not NONE."""
    column = first + tl.arange(0, C.BN)
    e = column // C.SIZE
    at = lists.entries + start * width + e
    entry = tl.load(at, mask=e < count, other=_NONE)
    some = entry != _NONE
    j = tl.where(some, entry, 0) * C.SIZE + column % C.SIZE
    if C.SIZE > 1:
        some = some & (j < m)
    return tl.where(some, j, 0), some


@triton.jit
def load_keys(x, strides, item, kv_head, j, some, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Keys or values j: [BN, PADDED], zeros where there is none."""
    d = tl.arange(0, PADDED)
    at = item.to(tl.int64) * strides.item + kv_head.to(tl.int64) * strides.head + j.to(tl.int64) * strides.row
    return tl.load(x + at[:, None] + d[None, :], mask=some[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def visible_pairs(rows, j, some, C: tl.constexpr):
    """Which pairs of a tile are visible, [BM, BN], and which keys may be to some of its rows, [BN]."""
    show = rows.live[:, None] & some[None, :]
    if C.SPANS:
        show = show & (j[None, :] >= rows.lo[:, None]) & (j[None, :] < rows.hi[:, None])
        some = some & (j >= rows.least) & (j < rows.most)
    return show, some


@triton.jit
def capped_logits(Q, K, scale, cap, C: tl.constexpr):
    """The logits [BM, BN], natural units."""
    S = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION) * scale
    if C.CAP:
        S = cap * tanh(S / cap)
    return S


class RowGrads(NamedTuple):
    """What the backward needs of the rows of a tile, besides queries and keys."""

    dO: Any  # [BM, DVP]
    row_max: Any  # [BM]; 0 in a row that sees nothing
    log_row_sum: Any
    delta: Any  # Σ dO ∘ O − g_lse
    g_entropy: Any
    mean: Any  # E[S] above the row max


@triton.jit
def load_normalizer(stats, item, rows, n, heads):
    """The row max, 0 in a row that sees nothing, and the log of the row sum: [BM] each."""
    at = (item.to(tl.int64) * heads + rows.head) * n + rows.i
    row_max = tl.load(stats.row_max + at, mask=rows.live, other=0.0)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    return row_max, tl.load(stats.log_row_sum + at, mask=rows.live, other=0.0)


@triton.jit
def load_queries(q, strides, item, rows, given, n, heads, C: tl.constexpr):
    """The queries of a tile; 0 in a row that sees nothing, whose query may be NaN and multiplies a cotangent of 0."""
    at = (item.to(tl.int64) * heads + rows.head) * n + rows.i
    empty = tl.load(given.row_max + at, mask=rows.live, other=0.0) == float("-inf")
    return tl.where(empty[:, None], 0.0, load_tile(q, strides.q, item, rows, C.D, C.DP)).to(q.dtype.element_ty)


@triton.jit
def load_row_grads(given, strides, item, rows, n, heads, C: tl.constexpr):
    """The rows' part of what the backward is given."""
    at = (item.to(tl.int64) * heads + rows.head) * n + rows.i
    dO = load_tile(given.dO, strides.dO, item, rows, C.DV, C.DVP)
    O = load_tile(given.output, strides.output, item, rows, C.DV, C.DVP)
    delta = tl.sum(dO.to(tl.float32) * O.to(tl.float32), 1)
    if given.g_lse is not None:
        delta = delta - tl.load(given.g_lse + at, mask=rows.live, other=0.0)
    row_max, log_row_sum = load_normalizer(given, item, rows, n, heads)
    g_entropy = delta
    mean = delta
    if C.ENTROPY:
        g_entropy = tl.load(given.g_entropy + at, mask=rows.live, other=0.0)
        mean = log_row_sum - tl.load(given.entropy + at, mask=rows.live, other=0.0)
    return RowGrads(dO, row_max, log_row_sum, delta, g_entropy, mean)


@triton.jit
def tile_gradients(Q, K, V, row, rows, j, show, scale, cap, dropout, C: tl.constexpr):
    """The weights that multiply dO, and the cotangent of the products q·k, [BM, BN] each."""
    S = capped_logits(Q, K, scale, cap, C)
    X = S - row.row_max[:, None]  # [BM, BN]
    P = tl.where(show, tl.exp2(tl.minimum(X - row.log_row_sum[:, None], 0.0) * LOG2E), 0.0)
    dP = tl.dot(row.dO, tl.trans(V), input_precision=C.PRECISION)
    kept = P
    if C.DROP:
        keep = dropout_keep(rows.low_key, rows.high_key, j, dropout.bound)
        dP = tl.where(keep, dP * dropout.factor, 0.0)
        kept = tl.where(keep, P * dropout.factor, 0.0)
    slope = dP - row.delta[:, None]
    if C.ENTROPY:
        slope -= row.g_entropy[:, None] * (X - row.mean[:, None])
    dS = tl.where(show, P * slope, 0.0)
    if C.CAP:
        dS *= 1.0 - (S / cap) * (S / cap)
    return kept, dS * scale
