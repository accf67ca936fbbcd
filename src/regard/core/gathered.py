"""Problems whose rows have lists of keys: some lists at a time, with their keys gathered, are a problem of their own.

Each list becomes a batch item, its rows become the rows of that item, and the keys of the list become its keys. The
passes and the formula compute such a part like any other problem, and results go back to where they came from. Sums
over lists that share a key are taken in the order of the lists, so that their bits are always the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..compat.torch import outside_transforms
from ..masks import Mask
from ..masks.lists import NONE, Lists, first_times
from .spec import Positions, Spec
from .tiling import PartOfTile, Tile, TileSizes

__all__ = [
    "GATHERED_BIAS",
    "GATHERED_KEY",
    "GATHERED_QUERY",
    "GATHERED_ROW",
    "GatheredTile",
    "add_in_order",
    "gathered_tiles",
    "lists_of",
]

_BUDGET = {"cpu": 2**21}  # numbers that are gathered at a time
_BUDGET_ELSEWHERE = 2**26
_TALLER = 16  # times as many rows are in a part on a GPU, where each part costs a few dozen launches


def lists_of(spec: Spec) -> Lists | None:
    """The lists of keys of a problem's rows, if its mask has some that are shorter than all keys."""
    if spec.mask is None or spec.n == 0 or 0 in spec.mask.lead:
        return None
    spec.check_unchanged()
    with outside_transforms():  # a mask remembers its lists, so these must not be wrapped tensors
        lists = spec.mask.listed(spec.n, spec.m)
    return None if lists is None or not 0 < lists.width < spec.m else lists


class Heads(NamedTuple):
    """How heads are grouped in a gathered part: those of one group share their keys, and the list of these."""

    keys: int  # key heads of the whole problem
    heads: int  # groups of query heads
    groups: int  # query heads in each

    @staticmethod
    def of(lists: int, keys: int, queries: int) -> Heads:
        """The groups for so many heads of lists, keys and queries."""
        if lists <= 1 or keys % lists == 0:
            heads = keys
        elif lists % keys == 0:
            heads = lists
        else:
            heads = queries
        return Heads(keys, heads, queries // max(heads, 1))


@dataclass(frozen=True, eq=False)
class GatheredTile:
    """Consecutive lists of one batch item, their rows and their keys: a problem of its own."""

    item: int
    rows: slice
    height: int  # rows of each list
    heads: Heads
    positions: Positions

    @property
    def count(self) -> int:
        return len(self.positions.rows)

    @property
    def keys(self) -> Tensor:
        """The gathered keys, (lists, heads or 1, W)."""
        return self.positions.keys

    def spec(self, whole: Spec) -> Spec:
        """The specification of this part."""
        return replace(
            whole,
            n=self.height,
            m=self.keys.shape[-1],
            mask=None,
            inner=1,
            period=self.count,
            copies=1,
            positions=self.positions,
            read=None,
        )

    @property
    def tile(self) -> Tile:
        """All of this part."""
        lengths = self.count, self.heads.heads, self.height, self.keys.shape[-1]
        return Tile(*(slice(0, length) for length in lengths))


class _OfRows:
    """(…, L, K, G, N, D) as (…, lists, heads, groups, rows, D); without D for statistics of rows."""

    def __init__(self, dims: int) -> None:
        self._dims = dims  # after the rows

    def _view(self, x: Tensor, tile: GatheredTile) -> Tensor:
        dims = self._dims
        x = x.select(-5 + 1 - dims, tile.item).narrow(-1 - dims, tile.rows.start, tile.rows.stop - tile.rows.start)
        split = (tile.heads.heads, tile.heads.groups, tile.count, tile.height)
        x = x.flatten(-3 - dims, -2 - dims)  # (…, H, n, D)
        x = x.unflatten(-1 - dims, split[2:]).unflatten(-3 - dims, split[:2])  # (…, h, g, c, r, D)
        return x.movedim(-2 - dims, -4 - dims)

    def part(self, x: Tensor, tile: GatheredTile) -> Tensor:
        return self._view(x, tile)

    def add(self, whole: Tensor, tile: GatheredTile, part: Tensor) -> None:
        dims = self._dims
        x = whole.select(-4 - dims, tile.item).narrow(-1 - dims, tile.rows.start, tile.rows.stop - tile.rows.start)
        back = part.movedim(-4 - dims, -2 - dims)  # (…, h, g, c, r, D)
        x.add_(back.reshape(x.shape))


class _OfKeys:
    """(…, L, K, M, D) as (…, lists, heads, W, D)."""

    def _index(self, m: int, tile: GatheredTile) -> Tensor:
        """Which of all keys of all key heads, (lists, heads, W)."""
        heads, keys = tile.heads, tile.keys
        owners = torch.arange(heads.heads, device=keys.device) * heads.keys // max(heads.heads, 1)
        return keys + owners[:, None] * m

    def part(self, x: Tensor, tile: GatheredTile) -> Tensor:
        index = self._index(x.shape[-2], tile)
        flat = x.select(-4, tile.item).flatten(-3, -2)  # (…, K·M, D)
        found: Tensor = flat.index_select(-2, index.flatten()).unflatten(-2, index.shape)
        return found

    def add(self, whole: Tensor, tile: GatheredTile, part: Tensor) -> None:
        index = self._index(whole.shape[-2], tile)
        flat = whole.select(-4, tile.item).flatten(-3, -2)
        add_in_order(flat, index.flatten(), part.flatten(-4, -2))
        if flat.data_ptr() != whole.select(-4, tile.item).data_ptr():
            raise RuntimeError("sums over keys are views of the whole")


class _OfPairs:
    """A bias (…, L|1, K|1, G|1, N|1, M|1) as (…, lists|1, heads|1, groups|1, rows|1, W|1)."""

    def _index(self, x: Tensor, tile: GatheredTile) -> Tensor:
        """The places of the pairs in one item of x, (lists, heads, groups, rows, W), each of them 1 where x has one."""
        K, G, N, M = x.shape[-4:]
        heads = tile.heads
        at = torch.zeros(1, dtype=torch.int64, device=x.device)
        if K * G > 1:
            at = torch.arange(heads.heads * heads.groups, device=x.device).view(heads.heads, heads.groups, 1, 1)
        at = at * N
        if N > 1:
            at = at + tile.positions.rows[:, None, None, :, None]
        at = at * M
        if M > 1:
            at = at + tile.keys[:, :, None, None, :]
        return at.reshape((1,) * (5 - at.dim()) + at.shape)

    def _item(self, x: Tensor, tile: GatheredTile) -> Tensor:
        return x.select(-5, tile.item if x.shape[-5] != 1 else 0)

    def part(self, x: Tensor, tile: GatheredTile) -> Tensor:
        index = self._index(x, tile)
        found: Tensor = self._item(x, tile).flatten(-4).index_select(-1, index.flatten()).unflatten(-1, index.shape)
        return found

    def add(self, whole: Tensor, tile: GatheredTile, part: Tensor) -> None:
        index = self._index(whole, tile)
        lead = part.shape[:-5]
        part = part.sum_to_size(*lead, *index.shape) if part.shape[-5:] != index.shape else part
        flat = self._item(whole, tile).view(*whole.shape[:-5], prod(whole.shape[-4:]))
        add_in_order(flat.unsqueeze(-1), index.flatten(), part.reshape(*lead, -1, 1))


GATHERED_QUERY: PartOfTile = _OfRows(1)
GATHERED_ROW: PartOfTile = _OfRows(0)
GATHERED_KEY: PartOfTile = _OfKeys()
GATHERED_BIAS: PartOfTile = _OfPairs()


def add_in_order(total: Tensor, index: Tensor, parts: Tensor) -> None:
    """Add rows `parts` (…, P, D) to rows `index` (P,) of `total` (…, X, D), one after the other."""
    if total.device.type == "cpu":
        total.index_add_(-2, index, parts)  # in the order of the index
    else:  # index_add_ is faster and adds in any order; this one sorts
        total.movedim(-2, 0).index_put_((index,), parts.movedim(-2, 0), accumulate=True)


def gathered_tiles(
    spec: Spec, lists: Lists, size: torch.Size, dims: int, tile_sizes: TileSizes
) -> Iterator[GatheredTile]:
    """Yield all lists of a problem with `size` (items, key heads, query heads per key head, …), some at a time.

    `dims` is how many numbers are gathered with a key.
    """
    batch, key_heads, groups = size[:3]
    if 0 in (batch, key_heads, groups):
        return
    entries = lists.entries
    heads = Heads.of(entries.shape[1], key_heads, key_heads * groups)
    width, several = lists.width, heads.heads if entries.shape[1] > 1 else 1
    device = entries.device
    budget = _BUDGET.get(device.type, _BUDGET_ELSEWHERE)
    each = width * heads.heads * max(dims, heads.groups * lists.rows * spec.cost)
    tall = tile_sizes.rows * (1 if device.type == "cpu" else _TALLER)
    together = max(1, min(tall // (heads.groups * lists.rows), budget // max(each, 1)))
    ragged = spec.n % lists.rows
    whole = spec.n // lists.rows
    starts = [(at, min(at + together, whole), lists.rows) for at in range(0, whole, together)]
    starts += [(whole, whole + 1, ragged)] if ragged else []
    owners = torch.arange(several, device=device) * entries.shape[1] // several
    inside = torch.arange(lists.size, device=device)
    for item in range(batch):
        own = item % spec.period // spec.inner if entries.shape[0] > 1 else 0
        for first, last, height in starts:
            some = entries[own, owners, first:last].movedim(1, 0)  # (lists, heads|1, K)
            keys = (some.long()[..., None] * lists.size + inside).flatten(-2)  # (lists, heads|1, W)
            shown = first_times(some)[..., None].expand(*some.shape, lists.size).flatten(-2)
            shown = shown & (keys < spec.m) if spec.m % lists.size else shown
            first_key = keys[..., :1].masked_fill(some[..., :1] == NONE, 0)
            keys = torch.where(
                shown, keys, first_key
            )  # in place of none, one that the rows see: NaN spreads no further
            rows = torch.arange(first * lists.rows, first * lists.rows + (last - first) * height, device=device)
            rows = rows.view(-1, height)
            place = item % spec.period // spec.copies
            at = Positions(place, rows, keys, shown[:, :, None, None, :], heads.groups, spec.n, spec.m)
            if lists.rest is not None:
                at = at._replace(shown=at.shown & _allowed(spec, lists.rest, item, at, heads))
            yield GatheredTile(
                item, slice(int(first * lists.rows), first * lists.rows + rows.numel()), height, heads, at
            )


def _allowed(spec: Spec, rest: Mask, item: int, at: Positions, heads: Heads) -> Tensor:
    """Which gathered pairs another mask allows: broadcastable to (lists, heads, groups, rows, W)."""
    items, several = rest.lead
    own = item % spec.period // spec.inner if items > 1 else 0
    cut = slice(own, own + 1)
    i, j = at.rows[:, None, None, :, None], at.keys[:, :, None, None, :]
    if several == 1:
        found = rest.restrict(cut, slice(0, 1)).allows(i, j, spec.n, spec.m)
        return found.reshape(found.shape[-5:])
    alike = at.keys.shape[1] == 1
    lines = []
    for h in range(several):
        mine = j if alike else j[:, h // heads.groups, None]
        found = rest.restrict(cut, slice(h, h + 1)).allows(i, mine, spec.n, spec.m)
        lines.append(found.reshape(found.shape[-5:])[:, 0, 0])
    stacked = torch.stack(lines, 1)  # (lists, H, rows, W)
    allowed: Tensor = stacked.unflatten(1, (heads.heads, heads.groups))
    return allowed
