"""From tensors to tensors by the kernels for rows with lists of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...compat.triton import INTERPRETED
from ...core.rows import Rows
from ...masks.lists import NONE
from ..arguments import NO_ENTROPY, DropoutArgs
from .aggregates import Constants, constants
from .chosen_backward import chosen_dkdv, chosen_dq, sum_entries
from .chosen_forward import chosen_forward
from .chosen_statistics import chosen_received, chosen_top
from .chosen_tile import ListArgs, TensorStrides
from .configs import padded
from .statistics_launch import WeightStats, ranked

__all__ = ["ByLists", "ChosenArgs", "ChosenGradients", "ChosenLists", "ChosenStrides", "backward", "forward", "new_rows", "received", "tensor_strides", "top"]

_MOST_ROWS = 64  # of a tile
_MOST_RANKED = 32  # rows of a tile whose strongest keys are ranked
_BUFFER = 2**31  # bytes for what lists add to sums by key
# Keys of an entry and entries that a program sums at a time, and warps. On an H200, 65,536 rows with lists of 2,048 single keys, d 128:
# 17.0 ms; 16 and 32 entries at a time 17.4 ms, 32 by two warps 19.2 ms, 64 by four 30.7 ms.
_SUMMED = (1, 8, 1)
_SUMMED_BLOCKS = (32, 1, 4)  # of blocks with fewer than _FEW_BYTES per key
_FEW_BYTES = 256
# Keys of a tile, warps and stages, by pass and bytes per number. On an H200, 64 heads with one list of 2,048 of 65,536 keys each row,
# d 128: the backward of queries 45 ms; with 32 keys 65 ms, with 8 warps 78 ms.
CONFIGS: dict[tuple[str, int], tuple[int, int, int]] = {
    ("forward", 2): (64, 4, 3),
    ("forward", 4): (32, 8, 2),
    ("backward", 2): (64, 4, 2),
    ("backward", 4): (16, 8, 1),
    ("received", 2): (64, 4, 3),
    ("received", 4): (32, 8, 2),
    ("top", 2): (64, 4, 1),
    ("top", 4): (32, 4, 1),
}


class ChosenLists(NamedTuple):
    """Lists of keys, and where a mask beside them lets rows see."""

    entries: Tensor  # int32 (items, heads, lists, K): in order, NONE in place of repetitions and at the end
    counts: Tensor  # int32 (items, heads, lists): after how many entries there is none
    lo: Tensor | None  # int32 (items, heads, N)
    hi: Tensor | None
    size: int
    rows: int
    inner: int  # batch items that share an item of the mask


class ChosenArgs(NamedTuple):
    """A problem as these kernels take it."""

    query: Tensor  # (L, H, N, D)
    key: Tensor  # (L, K, M, D)
    value: Tensor  # (L, K, M, E)
    lists: ChosenLists
    scale: float
    softcap: float | None
    drop: DropoutArgs

    @property
    def groups(self) -> int:
        """Query heads that share their keys and their lists."""
        heads, keys, lists = self.query.shape[1], self.key.shape[1], self.lists.entries.shape[1]
        return heads // (lists if lists % keys == 0 else keys if keys % lists == 0 else heads)

    @property
    def tiles(self) -> int:
        """Tiles of rows of each list."""
        return -(-self.lists.rows * self.groups // self.tile_rows)

    @property
    def tile_rows(self) -> int:
        return min(_MOST_ROWS, padded(self.lists.rows * self.groups))

    def sizes(self) -> dict[str, Any]:
        """The sizes that all kernels take."""
        heads = self.query.shape[1]
        return {
            "scale": self.scale, "cap": 1.0 if self.softcap is None else self.softcap, "n": self.query.shape[2], "m": self.key.shape[2],
            "heads": heads, "groups": self.groups, "owners": heads // self.groups // self.key.shape[1], "height": self.lists.rows,
            "width": self.lists.entries.shape[3], "tiles": self.tiles,
        }  # fmt: skip

    @property
    def list_room(self) -> int:
        """Keys that one list has room for, in all groups of heads and batch items."""
        return self.query.shape[0] * (self.query.shape[1] // self.groups) * self.lists.entries.shape[3] * self.lists.size

    def has_room(self, copies: int) -> bool:
        """Whether the buffer takes so many copies of what one list adds to gradients, in the dtype of queries."""
        per_key = self.query.element_size() * (self.key.shape[3] + self.value.shape[3])
        return copies * self.list_room * per_key <= _BUFFER

    def list_args(self) -> ListArgs:
        lists = self.lists
        items, heads, count = lists.counts.shape
        span_item, span_head = (0, 0) if lists.lo is None else (stride if size > 1 else 0 for size, stride in zip(lists.lo.shape, lists.lo.stride()[:2], strict=False))
        shared = self.query.shape[1] // self.groups // heads
        item, head = heads * count if items > 1 else 0, count if heads > 1 else 0
        return ListArgs(lists.entries, lists.counts, lists.lo, lists.hi, item, head, span_item, span_head, lists.inner, shared)

    def constants(self, BN: int, entropy: bool = False, **more: int) -> Constants:
        """What a kernel is compiled for; SIZE are the keys of an entry, SPANS whether a mask beside the lists hides some."""
        dim, wide = self.query.shape[3], self.value.shape[3]
        return constants(
            BM=more.pop("BM", self.tile_rows), BN=BN, D=dim, DP=padded(dim), DV=wide, DVP=padded(wide), SIZE=self.lists.size, SPANS=self.lists.lo is not None,
            CAP=self.softcap is not None, FAST=False, DROP=self.drop.keys is not None, ENTROPY=entropy,
            PRECISION="ieee" if self.query.dtype == torch.float32 else "tf32", **more,
        )  # fmt: skip

    def config(self, name: str) -> tuple[int, dict[str, Any]]:
        """Keys of a tile, and the options of a launch."""
        keys, warps, stages = CONFIGS[name, self.query.element_size()]
        if max(self.query.shape[3], self.value.shape[3]) > 128:
            keys, stages = max(16, keys // 2), 1
        return keys, {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


class ChosenStrides(NamedTuple):
    """Strides of all tensors of a pass."""

    q: TensorStrides
    k: TensorStrides
    v: TensorStrides
    dO: TensorStrides | None
    output: TensorStrides
    dq: TensorStrides | None = None


def tensor_strides(x: Tensor) -> TensorStrides:
    return TensorStrides(*x.stride()[:3])


def new_rows(w: ChosenArgs, entropy: bool) -> Rows:
    """Room for what the forward pass finds."""
    L, H, N, _ = w.query.shape
    rows = Rows(
        w.value.new_empty(L, H, N, w.value.shape[3]),
        *(w.query.new_empty(L, H, N, dtype=torch.float32) for _ in range(4)),
    )
    return rows if entropy else rows._replace(entropy=NO_ENTROPY)


def forward(w: ChosenArgs, entropy: bool) -> Rows:
    """The forward pass."""
    L, H = w.query.shape[:2]
    rows = new_rows(w, entropy)
    BN, options = w.config("forward")
    count = w.lists.entries.shape[2]
    programs = L * (H // w.groups) * count * w.tiles
    strides = ChosenStrides(tensor_strides(w.query), tensor_strides(w.key), tensor_strides(w.value), None, tensor_strides(rows.output))
    chosen_forward[(programs,)](
        w.query, w.key, w.value, rows, strides, w.list_args(), w.drop,
        **w.sizes(), count=count, programs=programs, C=w.constants(BN, entropy), **options,
    )  # fmt: skip
    return rows


class RowsAndCotangents(NamedTuple):
    """What the backward is given of the rows."""

    dO: Tensor
    output: Tensor
    row_max: Tensor
    log_row_sum: Tensor
    g_lse: Tensor | None
    g_entropy: Tensor | None
    entropy: Tensor | None


class ChosenGradients(NamedTuple):
    """Gradients of queries, keys and values; those of keys and values in float32."""

    dq: Tensor
    dk: Tensor | None
    dv: Tensor | None


ByLists = Callable[[ChosenArgs, RowsAndCotangents, Tensor, Tensor, ChosenStrides, int, int], None]
"""Stores dq of some lists, and what each tile of their rows adds to the gradients of their keys: (w, given, dq, parts, strides, first list, how many).

`parts` (tiles, L, groups of heads, lists, keys of a list, D + DV) has all that the first tiles add, then all that the second ones do, and so on.
"""


def backward(
    w: ChosenArgs, rows: Rows, dO: Tensor, g_lse: Tensor | None, g_entropy: Tensor | None, wants_keys: bool, by_lists: ByLists | None = None
) -> ChosenGradients:
    """The gradients of queries, and of keys and values if they are wanted, some lists at a time; `by_lists` is a chip's own kernel."""
    dq = torch.empty(w.query.shape, dtype=w.query.dtype, device=w.query.device)
    entropy = None if g_entropy is None else rows.entropy
    given = RowsAndCotangents(dO, rows.output, rows.max_logit, rows.log_row_sum, g_lse, g_entropy, entropy)
    strides = ChosenStrides(*map(tensor_strides, (w.query, w.key, w.value, dO, rows.output, dq)))
    BN, options = w.config("backward")
    C = w.constants(BN, g_entropy is not None)
    if not wants_keys:
        _dq(w, given, dq, None, strides, 0, w.lists.entries.shape[2], C, BN, options)
        return ChosenGradients(dq, None, None)
    dims = (w.key.shape[3], w.value.shape[3])
    total = torch.zeros((*w.key.shape[:3], sum(dims)), dtype=torch.float32, device=dq.device)  # dK, and beside it dV
    dtype = torch.float32 if by_lists is None and (INTERPRETED or w.query.dtype != torch.bfloat16) else w.query.dtype
    copies = 1 if by_lists is None else w.tiles  # a chip's kernel keeps apart what tiles of rows add
    inverted = _inverted(w, copies * dtype.itemsize * sum(dims))
    parts = torch.empty((copies * inverted.chunk * w.list_room, sum(dims)), dtype=dtype, device=dq.device)
    for at, first, count in inverted.chunks(w.lists.entries.shape[2]):
        alone = w.tiles == 1
        if by_lists is not None:
            by_lists(w, given, dq, parts, strides, first, count)
        else:
            _dq(w, given, dq, parts if alone else None, strides, first, count, C, BN, options)
            if not alone:
                _dkdv(w, given, parts, strides, first, count, C, BN, options)
        _add(w, parts, total, inverted, at, count, copies)
    return ChosenGradients(dq, *total.split(dims, -1))


def _dq(w: ChosenArgs, given: RowsAndCotangents, dq: Tensor, parts: Tensor | None, strides: ChosenStrides, first: int, count: int, C: Constants, BN: int, options: dict[str, Any]) -> None:  # fmt: skip
    programs = w.query.shape[0] * (w.query.shape[1] // w.groups) * count * w.tiles
    chosen_dq[(programs,)](
        w.query, w.key, w.value, given, dq, parts, strides, w.list_args(), w.drop, first_list=first, count=count, **w.sizes(), C=C,
        PARTS=parts is not None, **options,
    )  # fmt: skip


def _dkdv(w: ChosenArgs, given: RowsAndCotangents, parts: Tensor, strides: ChosenStrides, first: int, count: int, C: Constants, BN: int, options: dict[str, Any]) -> None:  # fmt: skip
    blocks = triton.cdiv(w.lists.entries.shape[3] * w.lists.size, BN)
    programs = w.query.shape[0] * (w.query.shape[1] // w.groups) * count * blocks
    chosen_dkdv[(programs,)](
        w.query, w.key, w.value, given, parts, strides, w.list_args(), w.drop, first_list=first, count=count, **w.sizes(), blocks=blocks, C=C,
        **options,
    )  # fmt: skip


class _Inverted(NamedTuple):
    """For each key, or block of keys, the entries that name it, chunk by chunk of the lists and in their order."""

    order: Tensor  # int (items, heads, entries of all lists): entries, chunk by chunk sorted by what they name
    starts: Tensor  # int32 (items, heads, chunks, blocks + 1), within the chunk
    chunk: int  # lists
    blocks: int

    @staticmethod
    def of(lists: ChosenLists, m: int, chunk: int) -> _Inverted:
        items, heads, count, width = lists.entries.shape
        blocks, chunks = -(-m // lists.size), -(-count // chunk)
        dtype = torch.int32 if chunks * (blocks + 1) < NONE else torch.int64
        which = torch.arange(count, dtype=dtype, device=lists.entries.device) // chunk * (blocks + 1)
        named = (lists.entries.clamp(max=blocks).to(dtype) + which[:, None]).flatten(2)  # NONE comes last in its chunk
        named, order = named.sort(dim=-1, stable=True)
        edges = torch.arange(chunks * (blocks + 1), dtype=dtype, device=named.device).expand(items, heads, -1)
        starts = torch.searchsorted(named, edges.contiguous()).unflatten(-1, (chunks, blocks + 1))
        offsets = torch.arange(chunks, device=named.device)[:, None] * (chunk * width)
        order = order.to(torch.int32) if count * width < NONE else order
        return _Inverted(order, (starts - offsets).to(torch.int32), chunk, blocks)


    def chunks(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Each chunk of so many lists, its first list, and how many lists it has."""
        for at, first in enumerate(range(0, count, self.chunk)):
            yield at, first, min(self.chunk, count - first)


def _inverted(w: ChosenArgs, size: int) -> _Inverted:
    """The lists by key, in chunks for which a buffer with `size` bytes per listed key has room."""
    most = max(1, _BUFFER // (w.list_room * size))
    return _Inverted.of(w.lists, w.key.shape[2], min(most, w.lists.entries.shape[2]))


def _add(w: ChosenArgs, buffer: Tensor, total: Tensor, inverted: _Inverted, chunk: int, count: int, copies: int = 1) -> None:
    """Add what a chunk of the lists adds to sums by key, (L, heads, M, D); the buffer holds `copies` copies of all entries."""
    items, heads, entries = inverted.order.shape
    L, kv_heads, m, dim = total.shape
    groups = w.query.shape[1] // w.groups
    size, width = w.lists.size, w.lists.entries.shape[3]
    keys, at_once, warps = _SUMMED if size == 1 or dim * buffer.itemsize >= _FEW_BYTES else _SUMMED_BLOCKS
    ROWS = min(keys, triton.next_power_of_2(size))
    programs = L * kv_heads * inverted.blocks * triton.cdiv(size, ROWS)
    sum_entries[(programs,)](
        buffer, total, inverted.order, inverted.starts, m=m, kv_heads=kv_heads, owners=groups // kv_heads, count=count, width=width,
        blocks=inverted.blocks, chunk=chunk, chunks=inverted.starts.shape[2], offset=chunk * inverted.chunk * width, entries=entries,
        inner=w.lists.inner, shared=groups // heads, items=items, heads=heads, stride=count * w.list_room, COPIES=copies, SIZE=size, ROWS=ROWS,
        AT_ONCE=at_once, D=dim, DP=padded(dim), num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip


class _LateStrides(NamedTuple):
    q: TensorStrides
    k: TensorStrides


def received(w: ChosenArgs, row_max: Tensor, log_row_sum: Tensor) -> Tensor:
    """Σ over rows of the weight each key receives, (L, H, M): some lists at a time, in the order of the lists."""
    (L, H), count = w.query.shape[:2], w.lists.entries.shape[2]
    total = row_max.new_zeros(L, H // w.groups, w.key.shape[2], w.groups)
    inverted = _inverted(w, w.groups * total.itemsize)
    parts = row_max.new_empty(inverted.chunk * w.list_room * w.groups)
    BN, options = w.config("received")
    HB = min(_MOST_ROWS, triton.next_power_of_2(w.groups))
    BM = min(_MOST_ROWS, padded(w.lists.rows * HB))
    tiles, width = triton.cdiv(w.lists.rows, BM // HB), w.lists.entries.shape[3] * w.lists.size
    columns = width if tiles == 1 else BN
    blocks = triton.cdiv(width, columns)
    strides = _LateStrides(tensor_strides(w.query), tensor_strides(w.key))
    for at, first, some in inverted.chunks(count):
        programs = L * (H // w.groups) * some * triton.cdiv(w.groups, HB) * blocks
        chosen_received[(programs,)](
            w.query, w.key, WeightStats(row_max, log_row_sum), parts, strides, w.list_args(), w.drop, first_list=first, count=some,
            **{**w.sizes(), "tiles": tiles}, columns=columns, blocks=blocks, C=w.constants(BN, BM=BM, HB=HB), **options,
        )  # fmt: skip
        _add(w, parts, total, inverted, at, some)
    return total.mT.contiguous().flatten(1, 2)


def top(w: ChosenArgs, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and their keys, (L, H, N, k) each; −inf and −1 where fewer are visible."""
    (L, H, N), count = w.query.shape[:3], w.lists.entries.shape[2]
    KP, BM = padded(k), min(_MOST_RANKED, w.tile_rows)
    ranks = w.query.new_empty(L, H, N, KP, dtype=torch.int64)
    BN, options = w.config("top")
    tiles = triton.cdiv(w.lists.rows * w.groups, BM)
    programs = L * (H // w.groups) * count * tiles
    chosen_top[(programs,)](
        w.query, w.key, ranks, _LateStrides(tensor_strides(w.query), tensor_strides(w.key)), w.list_args(), w.drop, **{**w.sizes(), "tiles": tiles},
        count=count, programs=programs, k_best=k, C=w.constants(BN, BM=BM, KP=KP), **options,
    )  # fmt: skip
    return ranked(ranks, k)
