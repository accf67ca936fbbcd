"""Keys and values that a list names, gathered into shared memory by asynchronous copies, and the rows that share the list.

Triton's own pipeline starts the copies of the next tile after the products of this one and waits for them right after. Here they
start as soon as the first product of a tile runs, so that they have all of its time to arrive, and the entries of the list are in
registers a tile ahead.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...compat.gluon import start_copy
from ...masks.lists import NONE
from . import ptx

__all__ = ["KEYS", "ROWS", "fetch_list", "find_list", "gathered_layout", "load_rows", "next_entries", "row_index", "shared_matrix", "start_copies", "store_rows"]

KEYS = gl.constexpr(64)  # of a tile
ROWS = gl.constexpr(64)  # that share a list
_NONE = gl.constexpr(NONE)
_PREFETCH = gl.constexpr(ptx.PREFETCH)
_THREADS = gl.constexpr(128)
_EACH = gl.constexpr(32)  # entries that a thread fetches: a line


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
def find_list(at, lists, first_list, count, width, heads, groups, owners):
    """The list whose place is `at` among `count` lists from `first_list` on, groups of heads and batch items.

    Its number, group, item and key head; where its entries are, and how many tiles it has.
    """
    place, at = at % count, at // count
    group, item = at % (heads // groups), at // (heads // groups)
    list_ = first_list + place
    start = (item // lists.inner).to(gl.int64) * lists.item + (group // lists.shared) * lists.head + list_
    tiles = (gl.load(lists.counts + start) + (KEYS - 1)) // KEYS
    return list_, group, item, group // owners, lists.entries + start * width, tiles


@gluon.jit
def fetch_list(entries, width):
    """Bring a list to L2, so that entries which are loaded a tile ahead come in time."""
    thread = gl.arange(0, _THREADS, gl.BlockedLayout([1], [32], [4], [0]))
    for first in range(0, width, _THREADS * _EACH):
        column = gl.minimum(first + thread * _EACH, width - 1)
        gl.inline_asm_elementwise(_PREFETCH, "=r,l", [entries + column], gl.int32, False, 1)


@gluon.jit
def next_entries(entries, tile, width, L: gl.constexpr):
    """The entries [KEYS] of a tile of a list; NONE after its end."""
    column = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, L))
    return gl.load(entries + column, mask=column < width, other=_NONE)


@gluon.jit
def _gather(x, row_stride, entry, into, L: gl.constexpr):
    """Start to copy the rows of x that a tile of a list names; zeros for NONE."""
    d = gl.arange(0, into.shape[1], gl.SliceLayout(0, L))
    some = entry != _NONE
    at = x + (gl.where(some, entry, 0).to(gl.int64) * row_stride)[:, None] + d[None, :]
    start_copy(into, at, mask=some[:, None])


@gluon.jit
def start_copies(k, v, strides, entry, K, V, D: gl.constexpr, DV: gl.constexpr):
    """Start to copy a tile of keys and values."""
    _gather(k, strides.k.row, entry, K, gathered_layout(D))
    _gather(v, strides.v.row, gl.convert_layout(entry, gl.SliceLayout(1, gathered_layout(DV))), V, gathered_layout(DV))
    async_copy.commit_group()


@gluon.jit
def row_index(list_, group, groups, height, L: gl.constexpr):
    """The rows of a list, [ROWS] each: row after row, and of each the heads of the group."""
    t = gl.arange(0, ROWS, L)
    return list_ * height + t // groups, group * groups + t % groups


@gluon.jit
def _row_pointers(x, strides, item, list_, group, groups, height, D: gl.constexpr, L: gl.constexpr):
    i, head = row_index(list_, group, groups, height, gl.SliceLayout(1, L))
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    at = item.to(gl.int64) * strides.item + head.to(gl.int64) * strides.head + i.to(gl.int64) * strides.row
    return x + at[:, None] + d[None, :]


@gluon.jit
def load_rows(x, strides, item, list_, group, groups, height, D: gl.constexpr, L: gl.constexpr):
    """The rows of a list in a tensor (L, H, N, D): [ROWS, D]."""
    return gl.load(_row_pointers(x, strides, item, list_, group, groups, height, D, L))


@gluon.jit
def store_rows(x, strides, item, list_, group, groups, height, X, L: gl.constexpr):
    """Store rows [ROWS, D]."""
    D: gl.constexpr = X.shape[1]
    X = gl.convert_layout(X.to(x.dtype.element_ty), L)
    gl.store(_row_pointers(x, strides, item, list_, group, groups, height, D, L), X)
