"""Keys and values that a list names, gathered into shared memory by asynchronous copies, and tiles of the rows that share the list.

Triton's own pipeline starts the copies of the next tile after the products of this one and waits for them right after. Here they
start as soon as the first product of a tile runs, so that they have all of its time to arrive, and the entries of the list are in
registers a tile ahead.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...compat.gluon import start_copy
from ...masks.lists import NONE
from . import ptx

__all__ = [
    "KEYS", "ROWS", "SeenKeys", "fetch_list", "find_list", "gathered_layout", "is_cut", "listed_keys", "load_rows", "load_spans", "row_index", "seen_keys",
    "shared_matrix", "start_copies", "store_rows",
]  # fmt: skip

KEYS = gl.constexpr(64)  # of a tile
ROWS = gl.constexpr(64)  # of a tile
_NONE = gl.constexpr(NONE)
_PREFETCH = gl.constexpr(ptx.PREFETCH)
_THREADS = gl.constexpr(128)
_EACH = gl.constexpr(32)  # entries that a thread fetches: a line


class SeenKeys(NamedTuple):
    """The keys that the rows of a tile see because of a mask beside their list."""

    least: Any  # some row sees keys from here
    all_from: Any  # all rows see keys from here
    all_to: Any  # all rows see keys up to here
    most: Any  # some row sees keys up to here


@gluon.constexpr_function
def gathered_layout(dim):
    """How threads copy a tile [64, dim]: 16 bytes each, and each thread neighbouring rows, whose entries are one load."""
    lanes = dim // 8
    return gl.BlockedLayout([dim // 16, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def shared_matrix(dim, dtype):
    """The layout of [64, dim] in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([64, dim], dtype)


@gluon.jit
def find_list(at, lists, first_list, count, width, heads, groups, owners, tiles, SIZE: gl.constexpr):
    """The list and the rows whose place is `at` among tiles of rows, `count` lists from `first_list` on, groups of heads and batch items.

    The tile of rows, its group, item and key head; where the entries of the list are, and how many tiles of keys they name.
    """
    tile, at = at % tiles, at // tiles
    place, at = at % count, at // count
    group, item = at % (heads // groups), at // (heads // groups)
    list_ = first_list + place
    start = (item // lists.inner).to(gl.int64) * lists.item + (group // lists.shared) * lists.head + list_
    key_tiles = (gl.load(lists.counts + start) * SIZE + (KEYS - 1)) // KEYS
    return list_ * tiles + tile, group, item, group // owners, lists.entries + start * width, key_tiles


@gluon.jit
def fetch_list(entries, width):
    """Bring a list to L2, so that entries which are loaded a tile ahead come in time."""
    thread = gl.arange(0, _THREADS, gl.BlockedLayout([1], [32], [4], [0]))
    for first in range(0, width, _THREADS * _EACH):
        column = gl.minimum(first + thread * _EACH, width - 1)
        gl.inline_asm_elementwise(_PREFETCH, "=r,l", [entries + column], gl.int32, False, 1)


@gluon.jit
def listed_keys(entries, tile, width, m, seen, SIZE: gl.constexpr, L: gl.constexpr):
    """The keys [KEYS] of a tile of a list; NONE after its end, and where no row sees a key."""
    if SIZE == 1:
        column = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, L))
        j = gl.load(entries + column, mask=column < width, other=_NONE)
    else:
        first = _first_key(entries, tile, width, SIZE)
        j = first + gl.arange(0, KEYS, gl.SliceLayout(1, L))
        j = gl.where((first != _NONE) & (j < m), j, _NONE)
    if seen is not None:
        j = gl.where((j >= seen.least) & (j < seen.most), j, _NONE)
    return j


@gluon.jit
def _first_key(entries, tile, width, SIZE: gl.constexpr):
    """The first key of a tile of a list of blocks, or NONE."""
    column = tile * KEYS // SIZE
    block = gl.load(entries + column, mask=column < width, other=_NONE)
    return gl.where(block != _NONE, block * SIZE + tile * KEYS % SIZE, _NONE)


@gluon.jit
def load_spans(lists, item, row_tile, group, groups, L: gl.constexpr):
    """From which key and up to which one the rows of a tile see keys of their list, [ROWS] each."""
    i, head = row_index(row_tile, group, groups, L)
    at = (item // lists.inner).to(gl.int64) * lists.span_item + head * lists.span_head + i
    return gl.load(lists.lo + at), gl.load(lists.hi + at)


@gluon.jit
def seen_keys(lo, hi):
    """The keys that some rows see, and those that all do."""
    return SeenKeys(gl.min(lo, 0), gl.max(lo, 0), gl.min(hi, 0), gl.max(hi, 0))


@gluon.jit
def is_cut(entries, tile, width, seen, SIZE: gl.constexpr):
    """Whether some row may not see some key of a tile. Lists are in order, so the first and the last key tell; NONE says yes."""
    if SIZE == 1:
        first, last = gl.load(entries + tile * KEYS), gl.load(entries + (tile * KEYS + (KEYS - 1)))
    else:
        first = _first_key(entries, tile, width, SIZE)
        last = gl.where(first != _NONE, first + (KEYS - 1), _NONE)
    return (first < seen.all_from) | (first == _NONE) | (last >= seen.all_to)


@gluon.jit
def _gather(x, row_stride, j, into, L: gl.constexpr):
    """Start to copy rows j [KEYS] of x; zeros for NONE."""
    d = gl.arange(0, into.shape[1], gl.SliceLayout(0, L))
    some = j != _NONE
    at = x + (gl.where(some, j, 0).to(gl.int64) * row_stride)[:, None] + d[None, :]
    start_copy(into, at, mask=some[:, None])


@gluon.jit
def start_copies(k, v, strides, j, K, V, D: gl.constexpr, DV: gl.constexpr):
    """Start to copy keys and values j [KEYS]."""
    _gather(k, strides.k.row, j, K, gathered_layout(D))
    _gather(v, strides.v.row, gl.convert_layout(j, gl.SliceLayout(1, gathered_layout(DV))), V, gathered_layout(DV))
    async_copy.commit_group()


@gluon.jit
def row_index(row_tile, group, groups, L: gl.constexpr):
    """The rows of a tile, [ROWS] each: row after row, and of each the heads of the group."""
    t = row_tile * ROWS + gl.arange(0, ROWS, L)
    return t // groups, group * groups + t % groups


@gluon.jit
def _row_pointers(x, strides, item, row_tile, group, groups, D: gl.constexpr, L: gl.constexpr):
    i, head = row_index(row_tile, group, groups, gl.SliceLayout(1, L))
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    at = item.to(gl.int64) * strides.item + head.to(gl.int64) * strides.head + i.to(gl.int64) * strides.row
    return x + at[:, None] + d[None, :]


@gluon.jit
def load_rows(x, strides, item, row_tile, group, groups, D: gl.constexpr, L: gl.constexpr):
    """The rows of a tile in a tensor (L, H, N, D): [ROWS, D]."""
    return gl.load(_row_pointers(x, strides, item, row_tile, group, groups, D, L))


@gluon.jit
def store_rows(x, strides, item, row_tile, group, groups, X, L: gl.constexpr):
    """Store rows [ROWS, D]."""
    D: gl.constexpr = X.shape[1]
    X = gl.convert_layout(X.to(x.dtype.element_ty), L)
    gl.store(_row_pointers(x, strides, item, row_tile, group, groups, D, L), X)
