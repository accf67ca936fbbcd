"""Tiles of equal shape in one batch: strips of a window differ only in where they begin, so one product computes many.

Where rows see two intervals, as with a window and global tokens, the tiles of the first ones come before those of the
second.

The tiles of a problem, and the order in which a row meets them, follow from its lengths and its mask. How many are in
one batch follows from the number of threads. A batched product gives each matrix to one thread, so no bit depends on
that number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from ..compat.torch import is_traced, lacks_values, transforms_are_active
from ..core.folded import FoldedProblem
from ..core.spec import Spec
from ..core.tiling import KEY_BLOCK, SHORTEST_FULL_RUN, Tile, TileSizes, mask_at
from ..masks import Mask, everything
from .intervals import Intervals, intervals_of
from .tile_ops import INF_BITS, Workspace, multiply

__all__ = ["Hidden", "TileBatch", "items_apart", "masked_logits", "raw_logits", "tile_batches"]

WIDTH = 2048  # keys of a tile
LOGITS = 2**18  # per thread at a time: as float32 they take 1 MiB, and so do their weights, so that a cache helps
FEWEST = 2  # tiles are batched for at least so many threads: BLAS libraries divide a single product among threads
ENOUGH = 4  # heads per thread: then threads wait little for each other, and no keys are copied
_LEFT, _WHOLE, _REST, _RIGHT = range(4)  # a row meets its keys in this order


class Hidden(NamedTuple):
    """The hidden pairs (r, c) of a tile as bits: `x & keep | low` is −inf for them, and x for all others."""

    keep: Tensor
    low: Tensor

    @staticmethod
    def of(visible: Tensor, dtype: torch.dtype) -> Hidden:
        kind, low = INF_BITS[dtype]
        keep = visible.to(kind).neg_()
        return Hidden(keep, keep.bitwise_not().bitwise_and_(low))

    def apply(self, S: Tensor) -> None:
        S.view(self.keep.dtype).bitwise_and_(self.keep).bitwise_or_(self.low)


@dataclass(frozen=True, eq=False)
class TileBatch:
    """`count` tiles of `height` rows and `width` keys, each so many rows and keys after the one before."""

    batch: slice
    heads: slice
    row: int  # of the first tile
    key: int
    row_step: int
    key_step: int
    count: int
    height: int
    width: int
    opens: bool  # whether these are the first keys of their rows
    hidden: Hidden | None  # None if all pairs are visible

    def rows(self, x: Tensor) -> Tensor:
        """The rows of all tiles, (l, k, count, g, r, …), of a tensor (L, K, G, N, …), as a view."""
        return self._spread(x, 3, self.row, self.row_step, self.height)

    def row_matrices(self, x: Tensor) -> Tensor:
        """The rows (l·k·count, g·r, D) of a tensor (L, K, G, N, D)."""
        return self._matrices(x, 3, self.row, self.row_step, self.height)

    def key_matrices(self, x: Tensor) -> Tensor:
        """The keys (l·k·count, c, D) of a tensor (L, K, M, D)."""
        return self._matrices(x, 2, self.key, self.key_step, self.width)

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add what the tiles (l·k·count, c, D) give to a tensor (L, K, M, D), tiles with earlier rows first.

        Where tiles overlap, one tile adds to keys that no other one adds to at the same time. If each of them is one
        step before the next, the part of every tile that is farthest ahead belongs to the tile with the earliest rows.
        """
        step = self.key_step
        where = self._keys(total, 0, self.width)
        part = part.view(where.shape)
        if step == 0:
            for i in range(self.count):
                where[:, :, i].add_(part[:, :, i])
            return
        for j in reversed(range(0, self.width, step)):
            size = min(step, self.width - j)
            self._keys(total, j, size).add_(part.narrow(3, j, size))

    def _keys(self, x: Tensor, first: int, size: int) -> Tensor:
        return self._spread(x, 2, self.key + first, self.key_step, size)

    def _matrices(self, x: Tensor, dim: int, first: int, step: int, size: int) -> Tensor:
        heads = self.heads.stop - self.heads.start
        single = self.batch.stop - self.batch.start == 1 and 1 in (heads, self.count)
        if single and (dim == 2 or x.shape[2] == 1):  # a view, in one operation: many of them take a share of the time
            stride = x.stride()
            count, apart = (self.count, step * stride[dim]) if heads == 1 else (heads, stride[1])
            return x.as_strided(
                (count, size, x.shape[-1]), (apart, stride[dim], stride[-1]), self._offset(x, dim, first)
            )
        part = self._spread(x, dim, first, step, size)
        return part.reshape(-1, math.prod(part.shape[3:-1]), x.shape[-1])

    def _spread(self, x: Tensor, dim: int, first: int, step: int, size: int) -> Tensor:
        shape, stride = list(x.shape), x.stride()
        shape[:2] = self.batch.stop - self.batch.start, self.heads.stop - self.heads.start, self.count
        shape[dim + 1] = size
        strides = (*stride[:2], step * stride[dim], *stride[2:])
        return x.as_strided(shape, strides, self._offset(x, dim, first))

    def _offset(self, x: Tensor, dim: int, first: int) -> int:
        stride = x.stride()
        apart: int = self.batch.start * stride[0] + self.heads.start * stride[1]
        return int(x.storage_offset()) + apart + first * stride[dim]


def masked_logits(x: FoldedProblem, tiles: TileBatch, workspace: Workspace) -> Tensor:
    """The logits (l·k·count, g·r, c) of a batch, hidden pairs at −inf."""
    S = raw_logits(x, tiles, workspace, "logits")
    if x.spec.softcap is not None:
        S.div_(x.spec.softcap).tanh_().mul_(x.spec.softcap)
    if tiles.hidden is not None:
        tiles.hidden.apply(S.view(len(S), -1, tiles.height, tiles.width))
    return S


def raw_logits(x: FoldedProblem, tiles: TileBatch, workspace: Workspace, name: str) -> Tensor:
    """The products of queries and keys (l·k·count, g·r, c), in the buffer of this name."""
    rows = tiles.row_matrices(x.query)
    S = workspace.take(name, (*rows.shape[:2], tiles.width), rows)
    return multiply(rows, tiles.key_matrices(x.key).mT, out=S)


class _Progression(NamedTuple):
    """Where tiles begin: so many places, each so many rows and keys after the one before."""

    row: int
    key: int
    row_step: int
    key_step: int
    places: int


class _EqualTiles(NamedTuple):
    """All tiles of one shape that hide the same pairs."""

    height: int
    width: int
    opens: bool
    intervals: Intervals | None  # of the rows of one tile, counted from its first key; None if all pairs are visible
    progressions: list[_Progression]


class _Place(NamedTuple):
    """One tile: those with the same first six fields are equal."""

    order: tuple[int, int]
    height: int
    width: int
    opens: bool
    full: bool
    pattern: int
    row: int
    key: int


def tile_batches(x: FoldedProblem, tile_sizes: TileSizes, workspace: Workspace) -> Iterator[TileBatch] | None:
    """Yield all tiles in batches, in an order that keeps that of the keys of each row; None for other problems.

    The scores must be dot products without a bias, and the mask one interval per row, or two, that all items and heads
    share.
    """
    spec, mask, height = x.spec, x.spec.mask, tile_sizes.chunk(x.query.shape[2])
    if not _plain(x, height):
        return None
    if mask is None or mask.constant:
        tiles = _remembered(mask, spec.n, spec.m, height)
    else:
        tiles = _equal_tiles(workspace.intervals(spec), spec.n, spec.m, height)
    return None if tiles is None else _batches(x, tiles, tile_sizes)


def items_apart(x: FoldedProblem, tile_sizes: TileSizes) -> list[FoldedProblem]:
    """Each batch item as a problem of its own, if the items have masks of their own and may have batches; else none.

    The mask of one item may be an interval per row, and that of another not. So that no bit of the one depends on the
    other, each of them is computed as it would be alone.
    """
    batch, heads, groups = x.query.shape[:3]
    mask = x.spec.mask
    if mask is None or mask.lead[0] == 1 or mask.lead[1] > 1 or not _plain(x, tile_sizes.chunk(groups)):
        return []
    found = []
    for b in range(batch):
        one = slice(b, b + 1)
        own = mask_at(x.spec, Tile(one, slice(0, heads), slice(0, 0), slice(0, 0)), groups)
        spec = replace(x.spec, mask=own, inner=1, period=1)
        found.append(FoldedProblem(x.query[one], x.key[one], x.value[one], None, (), spec))
    return found


def _plain(x: FoldedProblem, height: int) -> bool:
    """Whether logits are dot products without a bias, on a CPU, in more than one strip."""
    spec = x.spec
    if spec.positions is not None or spec.pairwise or spec.bias is not None or x.bias is not None or spec.dropout:
        return False
    if x.query.device.type != "cpu" or x.query.dtype not in INF_BITS or spec.n <= height:
        return False
    if 0 in x.query.shape or 0 in x.key.shape or transforms_are_active() or is_traced():
        return False
    return not lacks_values(x.query, x.key, x.value)


def _batches(x: FoldedProblem, tiles: list[_EqualTiles], tile_sizes: TileSizes) -> Iterator[TileBatch]:
    batch, heads, groups = x.query.shape[:3]
    budget = max(tile_sizes.threads, FEWEST) * min(LOGITS, tile_sizes.budget)
    for tall, width, opens, intervals, progressions in tiles:
        hidden = None if intervals is None else Hidden.of(intervals.between(0, tall, 0, width), x.query.dtype)
        most = max(1, budget // (groups * tall * width))  # matrices in flight
        for row, key, row_step, key_step, count in progressions:
            for part, own, first, some in _split(batch, heads, count, most, tile_sizes.threads):
                at = row + first * row_step, key + first * key_step
                yield TileBatch(part, own, *at, row_step, key_step, some, tall, width, opens, hidden)


def _split(batch: int, heads: int, count: int, most: int, threads: int) -> Iterator[tuple[slice, slice, int, int]]:
    """Split batch items, heads and tiles into batches of at most `most` matrices.

    Tiles of one head, or one tile of many heads, are views. If there are few of both, keys of several heads are copied.
    """
    if count >= 2 * most:
        at_once, together = most, 1
    elif batch * heads >= min(2 * most, ENOUGH * threads):
        at_once, together = 1, most
    else:
        at_once = min(count, most)
        together = max(1, most // at_once)
    items = max(1, together // heads)
    for b, h, i in product(range(0, batch, items), range(0, heads, together), range(0, count, at_once)):
        part, own = slice(b, min(b + items, batch)), slice(h, min(h + together, heads))
        yield part, own, i, min(at_once, count - i)


@lru_cache(maxsize=32)
def _remembered(mask: Mask | None, n: int, m: int, height: int) -> list[_EqualTiles] | None:
    """The tiles under a mask without tensors, or under none."""
    spans = intervals_of(Spec(n, m, everything() if mask is None else mask))
    return _equal_tiles(spans, n, m, height)


def _equal_tiles(intervals: tuple[Intervals, ...], n: int, m: int, height: int) -> list[_EqualTiles] | None:
    """All tiles, equal ones together, in the order in which rows meet them; None if no intervals are known."""
    if not intervals:
        return None
    found = []
    opened: set[int] = set()  # strips, by their first row
    for part in intervals:
        places = sorted(_places(part, n, height, opened))
        opened.update(place.row for place in places)
        for shape, alike in groupby(places, lambda place: place[:6]):
            _, tall, width, opens, full, _ = shape
            runs = list(_progressions([(place.row, place.key) for place in alike]))
            own = None if full else part.at(runs[0].row, tall, runs[0].key, width)
            found.append(_EqualTiles(tall, width, opens, own, runs))
    return found


def _progressions(places: list[tuple[int, int]]) -> Iterator[_Progression]:
    """Cut places (row, key) into runs with equal steps."""
    steps = [(row - before[0], key - before[1]) for before, (row, key) in pairwise(places)]
    at = 0
    while at < len(places):
        step = steps[at] if at < len(steps) else (0, 0)
        count = 1
        while at + count < len(places) and steps[at + count - 1] == step:
            count += 1
        yield _Progression(*places[at], *step, count)
        at += count


def _places(intervals: Intervals, n: int, height: int, opened: set[int]) -> list[_Place]:
    """Every tile: first keys of partly visible blocks, then those of fully visible blocks, then partly visible ones.

    In strips that are `opened`, no tile has the first keys of its rows.
    """
    places: list[_Place] = []
    for row, (start, full_from, full_to, stop) in zip(range(0, n, height), _bounds(intervals, height), strict=True):
        tall, opens = min(height, n - row), row not in opened
        for kind, a, b in ((_LEFT, start, full_from), (_WHOLE, full_from, full_to), (_RIGHT, full_to, stop)):
            for key in range(a, b, WIDTH):
                width = min(WIDTH, b - key)
                order = (_REST, 0) if kind == _WHOLE and width < WIDTH else (kind, key - a)
                places.append(_Place(order, tall, width, opens, kind == _WHOLE, 0, row, key))
                opens = False
    return _with_patterns(places, intervals)


def _bounds(intervals: Intervals, height: int) -> list[list[int]]:
    """For each strip: the first visible block, the fully visible ones from … to, and the end of the last one."""
    n, m = len(intervals.lo), len(intervals.keys)
    count = -(-n // height)
    lo, hi = (torch.cat((end[:, 0], end[-1:, 0].expand(count * height - n))) for end in (intervals.lo, intervals.hi))
    lo, hi = lo.view(count, height).clamp(0, m), hi.view(count, height).clamp(0, m)
    blind = hi <= lo
    start = lo.masked_fill(blind, m).amin(1) // KEY_BLOCK * KEY_BLOCK
    stop = (-(hi.masked_fill(blind, 0).amax(1) // -KEY_BLOCK) * KEY_BLOCK).clamp(max=m)
    full_from = -(lo.amax(1) // -KEY_BLOCK) * KEY_BLOCK
    full_to = torch.where(hi.amin(1) == m, m, hi.amin(1) // KEY_BLOCK * KEY_BLOCK)
    alone = (start == full_from) & (stop == full_to)
    kept = (full_from < full_to) & (alone | (full_to - full_from >= SHORTEST_FULL_RUN))
    full_from, full_to = torch.where(kept, full_from, stop), torch.where(kept, full_to, stop)
    found: list[list[int]] = torch.stack((start, full_from, full_to, stop), 1).tolist()
    return found


def _with_patterns(places: list[_Place], intervals: Intervals) -> list[_Place]:
    """The places, with a number for each pattern of hidden pairs."""
    numbered = [place for place in places if place.full]
    partial = sorted((place for place in places if not place.full), key=lambda place: place[1:3])
    for (height, width), alike in groupby(partial, lambda place: place[1:3]):
        some = list(alike)
        row, key = (
            torch.tensor([place[i] for place in some], dtype=torch.int32, device="cpu")[:, None] for i in (-2, -1)
        )
        rows = row + torch.arange(height, dtype=torch.int32, device="cpu")
        lo, hi = ((end[:, 0][rows] - key).clamp_(0, width) for end in (intervals.lo, intervals.hi))
        blind = hi <= lo
        ends = torch.cat((lo.masked_fill(blind, 0), hi.masked_fill(blind, 0)), 1)
        patterns = ends.unique(dim=0, return_inverse=True)[1].tolist()
        numbered += (place._replace(pattern=i) for place, i in zip(some, patterns, strict=True))
    return numbered
