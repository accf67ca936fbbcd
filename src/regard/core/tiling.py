"""How a problem is tiled: strips of rows, and the runs of keys that the rows of each strip may see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..compat.torch import lacks_values
from ..masks import Mask, everything
from ..masks.base import FULL, HIDDEN, PARTIAL
from .spec import Spec

__all__ = [
    "BIAS",
    "KEY",
    "KEY_BLOCK",
    "QUERY",
    "ROW",
    "SHARED",
    "SHORTEST_FULL_RUN",
    "Axes",
    "KeyRun",
    "PartOfTile",
    "Points",
    "Strip",
    "Tile",
    "TileSizes",
    "mask_at",
    "strips",
    "tiles",
]

_BUDGET = 2**21  # logits in flight: two such buffers of float32 are 16 MiB, which stays in a last-level cache
_BUDGET_PER_ROW = 2**13  # logits in flight per row of a strip, if there are few rows
_CPU_ROWS = 128  # of a strip on a CPU
_THREAD_BUDGET = 2**19  # logits in flight per thread of a CPU: a buffer of float32 is 2 MiB
_MOST_THREADS = 32  # for which memory is taken
_WIDEST = 4096  # gathered keys of a tile
KEY_BLOCK = 128  # keys that are skipped or computed together
SHORTEST_FULL_RUN = 512  # a shorter run of fully visible keys joins its masked neighbours


class Tile(NamedTuple):
    """A part of the problem: flattened batch items, key heads, rows, keys."""

    batch: slice
    heads: slice
    rows: slice
    cols: slice

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and key indices, 1-D."""
        i = torch.arange(self.rows.start, self.rows.stop, device=device)
        return i, torch.arange(self.cols.start, self.cols.stop, device=device)


class Points(NamedTuple):
    """Rows and keys selected one by one."""

    batch: slice
    heads: slice
    rows: Tensor
    cols: Tensor

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and key indices, 1-D."""
        return self.rows.to(device), self.cols.to(device)


class PartOfTile(Protocol):
    """Which part of a tensor a tile takes, as a view or gathered, and how it is added to the whole again."""

    def part(self, x: Tensor, tile: Any) -> Tensor:
        """The tile's part of x."""
        ...

    def add(self, whole: Tensor, tile: Any, part: Tensor) -> None:
        """Add a part to the whole."""
        ...


class Axes(NamedTuple):
    """Which dimensions of a tensor, counted from the end, are its batch, heads, rows and keys."""

    batch: int | None = None
    heads: int | None = None
    rows: int | None = None
    cols: int | None = None

    def part(self, x: Tensor, tile: Tile) -> Tensor:
        """View the tile's part of x; dimensions of size 1 broadcast and are kept."""
        for dim, where in zip(self, tile, strict=True):
            if dim is None or (where.start == 0 and where.stop == x.shape[dim]):  # all of it, of whatever size
                continue
            if x.shape[dim] != 1:
                x = x.narrow(dim, where.start, where.stop - where.start)
        return x

    def add(self, whole: Tensor, tile: Tile, part: Tensor) -> None:
        """Add a part to the whole."""
        self.part(whole, tile).add_(part)


QUERY = Axes(batch=-5, heads=-4, rows=-2)  # (L, K, G, N, D); the output too
KEY = Axes(batch=-4, heads=-3, cols=-2)  # (L, K, M, D); values too
BIAS = Axes(batch=-5, heads=-4, rows=-2, cols=-1)  # (L|1, K|1, G|1, N|1, M|1)
ROW = Axes(batch=-4, heads=-3, rows=-1)  # (L, K, G, N)
SHARED = Axes()


class KeyRun(NamedTuple):
    """Keys start:stop; `full` if every row of the strip sees all of them."""

    start: int
    stop: int
    full: bool


class Strip(NamedTuple):
    """Some rows of some heads, and the runs of keys that they may see."""

    batch: slice
    heads: slice
    rows: slice
    runs: list[KeyRun]

    def tile(self, run: KeyRun) -> Tile:
        return Tile(self.batch, self.heads, self.rows, slice(run.start, run.stop))

    def hull(self, m: int) -> Tile:
        """One tile over all keys that the strip may see, or over one hidden key if it sees none."""
        cols = slice(self.runs[0].start, self.runs[-1].stop) if self.runs else slice(0, min(m, 1))
        return Tile(self.batch, self.heads, self.rows, cols)


@dataclass(frozen=True)
class TileSizes:
    """Sizes of tiles. They depend on the lengths, never on the batch size, so that batching changes no bits."""

    rows: int = 512
    most: int = _BUDGET
    threads: int = 1  # how many such tiles are in flight together
    blocks: bool = False  # whether those may be blocks of rows of one head

    @property
    def budget(self) -> int:
        """How many logits a tile has: in proportion to the rows, up to what a cache holds; heads do not matter."""
        return min(self.most, self.rows * _BUDGET_PER_ROW)

    def on(self, device: torch.device, masked: bool, independent: bool) -> TileSizes:
        """The sizes for a device. On a CPU, tiles are small, and as many are in flight as there are threads.

        Tiles in flight together are of different heads. If the rows are `independent`, so that nothing is summed over
        them, and no mask tells them apart, they are blocks of rows.
        """
        if device.type != "cpu":
            return self
        few = masked or independent  # masks hide more of short strips; sums over rows are faster over many
        threads = min(torch.get_num_threads(), _MOST_THREADS)
        return TileSizes(min(self.rows, _CPU_ROWS if few else self.rows), _THREAD_BUDGET, threads, independent)

    def chunk(self, groups: int) -> int:
        return max(1, self.rows // max(groups, 1))


def mask_at(spec: Spec, tile: Tile | Points, groups: int) -> Mask:
    """The mask for a tile's batch items and heads; an error if it was changed since the call."""
    spec.check_unchanged()
    mask = everything() if spec.mask is None else spec.mask
    every_item = spec.inner == 1 and tile.batch.start == 0 and tile.batch.stop == spec.period
    if every_item and (mask.lead[1] == 1 or (tile.heads.start == 0 and tile.heads.stop * groups == mask.lead[1])):
        return mask
    if mask.lead == (1, 1):
        return mask
    heads = slice(tile.heads.start * groups, tile.heads.stop * groups)
    if tile.batch.start == tile.batch.stop:
        return mask.restrict(slice(0, 0), heads)
    first = tile.batch.start % spec.period // spec.inner
    last = (tile.batch.stop - 1) % spec.period // spec.inner
    return mask.restrict(slice(first, last + 1), heads)


def strips(spec: Spec, size: Sequence[int], tile_sizes: TileSizes, whole: bool = False) -> Iterator[Strip]:
    """Yield every strip of a problem with `size` (batch items, key heads, query heads per key head, …).

    `whole` keeps all keys of a row in one tile, and makes the strips thin enough for that.
    """
    batch, heads, groups = size[:3]
    if 0 in (batch, heads, groups, spec.n):
        return
    if spec.positions is not None:  # as small as they should be, and with keys that no cover tells apart
        runs = [KeyRun(j, min(j + _WIDEST, spec.m), False) for j in range(0, spec.m, _WIDEST)]
        for rows in _slices(slice(0, spec.n), tile_sizes.chunk(groups)):
            yield Strip(slice(0, batch), slice(0, heads), rows, runs)
        return
    chunk = min(tile_sizes.chunk(groups), spec.n)
    if whole:
        chunk = max(1, min(chunk, tile_sizes.budget // max(8 * groups * spec.m * spec.cost, 1)))
        width = max(spec.m, 1)
    else:
        width = max(KEY_BLOCK, tile_sizes.budget // (groups * chunk * spec.cost) // KEY_BLOCK * KEY_BLOCK)

    enough = tile_sizes.threads > 1 and spec.n >= tile_sizes.threads * tile_sizes.rows  # rows for every thread
    if tile_sizes.blocks and enough and spec.mask is None and groups == 1 and not whole:
        yield from _blocks_of_rows(spec, batch, heads, chunk, tile_sizes.threads, width)
        return

    def together(keys: int) -> int:
        """How many heads with so many keys per row fit into the budget."""
        fit = tile_sizes.threads * tile_sizes.budget // (groups * chunk * max(keys, 1) * spec.cost)
        return max(1, fit)

    some = together(min(width, spec.m))
    for items, those in _sharing_a_mask(spec, batch, heads, some):
        for rows, runs in list(_rows(spec, Tile(items, those, slice(0, 0), slice(0, 0)), groups, chunk, width)):
            fit = some if whole else together(max((run.stop - run.start for run in runs), default=0))
            for part, own in _split(items, those, fit):
                yield Strip(part, own, rows, runs)


def tiles(spec: Spec, size: Sequence[int], tile_sizes: TileSizes) -> Iterator[tuple[Tile, KeyRun]]:
    """Yield every tile of every strip, with its run of keys."""
    for strip in strips(spec, size, tile_sizes):
        yield from ((strip.tile(run), run) for run in strip.runs)


def _blocks_of_rows(spec: Spec, batch: int, heads: int, chunk: int, threads: int, width: int) -> Iterator[Strip]:
    """Yield strips with a block of rows for each thread; the rows that are left over are a strip of their own."""
    runs = [KeyRun(j, min(j + width, spec.m), True) for j in range(0, spec.m, width)]
    whole = spec.n // chunk * chunk
    rows = [*_slices(slice(0, whole), threads * chunk), *([slice(whole, spec.n)] if whole < spec.n else [])]
    for b, h in product(range(batch), range(heads)):
        yield from (Strip(slice(b, b + 1), slice(h, h + 1), some, runs) for some in rows)


def _sharing_a_mask(spec: Spec, batch: int, heads: int, together: int) -> Iterator[tuple[slice, slice]]:
    """Batch items and heads for which the mask is covered at once."""
    lead = (1, 1) if spec.mask is None else spec.mask.lead
    apart = lead[0] > 1 and (spec.m > KEY_BLOCK or spec.inner > 1 or spec.period != batch)
    items = 1 if apart else batch  # the runs of an item follow its mask; adjacent items may not be adjacent in the mask
    if lead[1] > 1:  # the runs of a head follow its mask too
        items, heads_at_once = max(1, min(items, together // heads)), min(together, heads)
    else:
        heads_at_once = heads
    for b in range(0, batch, items):
        yield from ((slice(b, min(b + items, batch)), own) for own in _slices(slice(0, heads), heads_at_once))


def _split(items: slice, heads: slice, together: int) -> Iterator[tuple[slice, slice]]:
    """Split batch items and heads so that each tile stays within the budget."""
    for part in _slices(items, max(1, together // (heads.stop - heads.start))):
        yield from ((part, own) for own in _slices(heads, together))


def _slices(whole: slice, size: int) -> Iterator[slice]:
    yield from (slice(at, min(at + size, whole.stop)) for at in range(whole.start, whole.stop, size))


def _rows(spec: Spec, probe: Tile, groups: int, chunk: int, width: int) -> Iterator[tuple[slice, list[KeyRun]]]:
    """Yield the rows of every strip and the runs that they may see, for the batch items and heads of a tile."""
    n, m = spec.n, spec.m
    starts = range(0, n, chunk)
    if spec.mask is None:
        runs = [KeyRun(j, min(j + width, m), True) for j in range(0, m, width)]
        for i in starts:
            yield slice(i, min(i + chunk, n)), runs
        return
    edges = [*range(0, m, KEY_BLOCK), m]
    if lacks_values(*spec.mask.tensors):
        cover = [[PARTIAL] * (len(edges) - 1)] * len(starts)
    else:
        rows, cols = (torch.tensor(each, device="cpu") for each in ([*starts, n], edges))
        cover = mask_at(spec, probe, groups).cover(rows, cols, n, m).tolist()
    for i, states in zip(starts, cover, strict=True):
        yield slice(i, min(i + chunk, n)), list(_runs(states, edges, width))


def _runs(states: list[int], edges: list[int], width: int) -> Iterator[KeyRun]:
    """Join adjacent blocks of the same state; short full runs join their partial neighbours."""
    joined: list[list[int]] = []  # [first block, last block + 1, state]
    for b, state in enumerate(states):
        if joined and joined[-1][2] == state and joined[-1][1] == b:
            joined[-1][1] = b + 1
        elif state != HIDDEN:
            joined.append([b, b + 1, state])
    merged: list[list[int]] = []
    for first, last, state in joined:
        before = merged[-1] if merged and merged[-1][1] == first else None
        short = state == FULL and edges[last] - edges[first] < SHORTEST_FULL_RUN
        thin = before is not None and (
            before[2] == state or (before[2] == FULL and edges[before[1]] - edges[before[0]] < SHORTEST_FULL_RUN)
        )
        if before is not None and (short or thin):
            before[1], before[2] = last, PARTIAL
        else:
            merged.append([first, last, state])
    for first, last, state in merged:
        for j in range(edges[first], edges[last], width):
            yield KeyRun(j, min(j + width, edges[last]), state == FULL)
