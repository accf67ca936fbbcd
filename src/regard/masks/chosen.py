"""Chosen: each row has a list of keys, or of blocks of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from regard.compat.torch import check_when_run, is_batched, is_traced, lacks_values
from regard.errors import MaskError
from regard.masks.arguments import integers, whole
from regard.masks.base import HIDDEN, And, Mask, Or, Span
from regard.masks.index import Index, broadcast_shapes, indices
from regard.masks.lists import NONE, Lists, first_times, in_order
from regard.masks.span import interval
from regard.masks.tiles import tile_states, uniform_cover

__all__ = ["Chosen", "beside_lists", "chosen", "lists_keys"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Chosen(Mask):
    """Row i sees key j if j // size is in the list of row i: indices[…, i // rows, :]; −1 is no key."""

    indices: Tensor  # (lists, K), (heads, lists, K) or (batch, heads, lists, K)
    size: int = 1
    rows: int = 1
    groups: int = field(default=1, kw_only=True, repr=False)  # query heads that share a list, if there are key heads

    factory: ClassVar[str] = "chosen"

    @property
    def extent(self) -> tuple[int, int]:
        """The rows that have lists, and the keys up to the last one that is listed."""
        last = int(self.indices.max()) if self.indices.numel() else -1
        return self.indices.shape[-2] * self.rows, (last + 1) * self.size

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        shape = broadcast_shapes(i.shape, j.shape)
        if not shape or i.shape[-1] != 1:  # one list for each pair; otherwise one for all pairs of a line
            i, j = i.expand(shape)[..., None], j.expand(shape)[..., None]
            return self.allows(i, j, n, m).squeeze(-1)
        lists = self._per_head(self._in_order().to(i.device))[:, :, i[..., 0] // self.rows]  # (B, H, …, K)
        lead = lists.shape[:2] if self.indices.dim() > 2 else ()
        if not lists.shape[-1]:
            return torch.zeros((*lead, *shape), dtype=torch.bool, device=i.device)
        wanted = (j // self.size).to(torch.int32).expand(*lists.shape[:2], *shape)
        lists = lists.expand(*wanted.shape[:-1], -1).contiguous()
        at = torch.searchsorted(lists, wanted.contiguous()).clamp_(max=lists.shape[-1] - 1)
        found = lists.gather(-1, at) == wanted
        return found if lead else found[0, 0]

    def span(self, i: Tensor, n: int, m: int) -> Span:
        lists = self._of_rows(i)  # (B, H, rows, K)
        if not lists.shape[-1]:
            lo = hi = lists.new_zeros(lists.shape[:-1], dtype=torch.int64)
        else:
            some = lists[..., 0] != NONE
            last = lists.masked_fill(lists == NONE, -1).amax(-1).long()
            lo, hi = torch.where(some, lists[..., 0].long(), 0) * self.size, (last + 1) * self.size
        lo, hi = (lo, hi) if self.indices.dim() > 2 else (lo[0, 0], hi[0, 0])
        return interval(i, m, lo, hi, exact=False)

    def visible(self, i: Tensor, n: int, m: int) -> Tensor:
        self.check(n, m)
        lists = self._of_rows(i)
        fresh = first_times(lists)
        keys = (m - lists.long() * self.size).clamp(max=self.size)  # the last block may be shorter
        count = torch.where(fresh, keys, 0).sum(-1)
        return count if self.indices.dim() > 2 else count[0, 0]

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        if n == 0 or m == 0 or 0 in self.lead:
            return uniform_cover(rows, cols, HIDDEN)
        counts = torch.stack([count.cpu() for count in self._counts(rows, cols, m)], 2)  # (B, H, R, C)
        return tile_states(counts > 0, counts == rows.diff()[:, None] * cols.diff())

    def _tile_densities(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        counts = torch.cat([count.reshape(1, -1).cpu() for count in self._counts(rows, cols, m)])
        return counts.double() / (rows.diff()[:, None] * cols.diff())

    def _counts(self, rows: Tensor, cols: Tensor, m: int) -> Iterator[Tensor]:
        """How many pairs each tile shows, one row of tiles after the other: (B, H, C)."""
        lists = self._in_order()
        inside, edges = torch.arange(self.size, device=lists.device), cols.to(lists.device)
        for top, bottom in pairwise(rows.tolist()):
            first, last = top // self.rows, -(-bottom // self.rows) if bottom > top else top // self.rows
            some = lists[:, :, first:last]  # (B, H, lists, K)
            starts = torch.arange(first, last, device=lists.device) * self.rows
            height = (starts + self.rows).clamp(max=bottom) - starts.clamp(min=top)
            keys = some[..., None].long() * self.size + inside  # (B, H, lists, K, size)
            shown = first_times(some)[..., None] & (keys < m) & (keys >= edges[0]) & (keys < edges[-1])
            tile = (torch.bucketize(keys, edges, right=True) - 1).clamp(0, len(edges) - 2)
            weight = torch.where(shown, height[:, None, None], 0)
            count = torch.zeros(*some.shape[:2], len(edges) - 1, dtype=torch.int64, device=lists.device)
            yield self._per_head(count.scatter_add_(-1, tile.flatten(2), weight.flatten(2)))

    @property
    def lead(self) -> tuple[int, int]:
        shape = (1, 1, *self.indices.shape)
        return shape[-4], shape[-3] * self.groups

    def misfit(self, n: int, m: int) -> str | None:
        found, wanted = self.indices.shape[-2], -(-n // self.rows)
        if found != wanted:
            each = "" if self.rows == 1 else f", {self.rows} for each list"
            return f"chosen: indices have {found} lists; there are {n} rows{each}, so {wanted} lists are needed."
        if not self.indices.is_cpu or torch.compiler.is_compiling() or is_traced():
            return None
        if lacks_values(self.indices) or is_batched(self.indices):
            return None
        return self.remembered(("range", m), lambda: self._out_of_range(m))

    def _out_of_range(self, m: int) -> str | None:
        """Say which index is no key, if one is; the host reads the indices."""
        count = -(-m // self.size)
        if not self.indices.numel():
            return None
        least, most = (int(x) for x in self.indices.aminmax())
        if least >= -1 and most < count:
            return None
        return f"chosen: an index is {least if least < -1 else most}; {self._rule(m)}"

    def _rule(self, m: int) -> str:
        what = "keys" if self.size == 1 else f"blocks of {self.size} keys"
        return f"indices count {what}, from 0 to {-(-m // self.size) - 1}, and −1 is none."

    def listed(self, n: int, m: int) -> Lists | None:
        lists = self._in_order()
        if not self.indices.is_cpu and not lacks_values(self.indices):  # the host does not wait for a GPU
            self.remembered(("range", m), lambda: self._check_on_device(m))
        elif not is_traced() and (reason := self.misfit(n, m)) is not None:  # compiled calls are checked when they run
            raise MaskError(reason)
        return Lists(lists, self.size, self.rows)

    def _check_on_device(self, m: int) -> bool:
        if self.indices.numel():
            least, most = self.indices.aminmax()
            fits = (least >= -1) & (most < -(-m // self.size))
            check_when_run(fits, f"chosen: an index is out of range; {self._rule(m)}")
        return True

    def _in_order(self) -> Tensor:
        """The lists, sorted: int32 (B, H, lists, K)."""
        return self.remembered("in order", lambda: in_order(self._with_lead()))

    def _with_lead(self) -> Tensor:
        return self.indices.reshape((1,) * (4 - self.indices.dim()) + self.indices.shape)

    def _per_head(self, x: Tensor) -> Tensor:
        """A tensor (B, H, …) with the heads of the mask's lead."""
        return x if self.groups == 1 else x.repeat_interleave(self.groups, 1)

    def _of_rows(self, i: Tensor) -> Tensor:
        """The sorted lists of rows `i`, (B, H, rows, K)."""
        return self._per_head(self._in_order().to(i.device)[:, :, i // self.rows])

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        if headless and self.indices.dim() == 3:
            return replace(self, indices=self.indices.unsqueeze(1))
        own = self.lead[1]
        shared = self.indices.dim() > 2 and own != 0 and self.groups == 1 and own not in (1, heads) and heads % own == 0
        return replace(self, groups=heads // own) if shared else self

    def restrict(self, batch: slice, heads: slice) -> Mask:
        items, several = self.lead
        if (items, several) == (1, 1):
            return self
        cut = batch if items != 1 else slice(None)
        found, sorted_ = self._with_lead(), self._in_order()
        if several == 1:
            made = replace(self, indices=found[cut])
            return _knowing(made, sorted_[cut])
        first, last, _ = heads.indices(several)
        if first % self.groups == 0 and last % self.groups == 0:
            own, groups = slice(first // self.groups, last // self.groups), self.groups
            return _knowing(replace(self, indices=found[cut, own], groups=groups), sorted_[cut, own])
        return _knowing(
            replace(self, indices=self._per_head(found)[cut, heads], groups=1), self._per_head(sorted_)[cut, heads]
        )


def _knowing(mask: Chosen, in_order: Tensor) -> Chosen:
    """The mask, which need not sort its lists again."""
    mask.remembered("in order", lambda: in_order)
    return mask


def lists_keys(mask: Mask | None) -> bool:
    """Whether the rows of a mask may have lists of keys: it is `chosen`, or composed of it; no tensor is read."""
    if isinstance(mask, And):
        return lists_keys(mask.left) or lists_keys(mask.right)
    if isinstance(mask, Or):
        return lists_keys(mask.left) and lists_keys(mask.right)
    return isinstance(mask, Chosen)


def beside_lists(mask: Mask) -> list[Mask] | None:
    """The masks that `&` puts beside one `chosen`; None if a mask is made in another way. No tensor is read."""
    if isinstance(mask, Chosen):
        return []
    if not isinstance(mask, And) or lists_keys(mask.left) == lists_keys(mask.right):
        return None
    with_lists, other = (mask.left, mask.right) if lists_keys(mask.left) else (mask.right, mask.left)
    found = beside_lists(with_lists)
    return None if found is None else [*found, other]


def chosen(indices: Any, size: int = 1, rows: int = 1) -> Mask:
    """Let each row see the keys in its list: (N, K), (heads, N, K) or (batch, heads, N, K) indices; −1 is no key.

    >>> print(chosen([[0, -1], [1, 0], [0, 2], [3, 1]]).picture(4, 4))
    █···
    ██··
    █·█·
    ·█·█

    With `size`, the indices are those of blocks of so many keys; with `rows`, each list is that of so many rows:

    >>> print(chosen([[0, -1], [0, 2]], size=2, rows=2).picture(4, 6))
    ██····
    ██····
    ██··██
    ██··██

    A list is a set: its order does not matter, and an index that is repeated counts once. An index out of range is an
    error. Heads may be those of the keys, each for its group of query heads. The cost is that of the listed pairs,
    also in `chosen(…) & other`; `~chosen(…)`, and `|` with a mask of another kind, go over all pairs.
    """
    found = integers("chosen", "indices", indices, dims=(2, 3, 4), dtypes=(torch.int64, torch.int32))
    return Chosen(found, whole("chosen", "size", size, least=1), whole("chosen", "rows", rows, least=1))
