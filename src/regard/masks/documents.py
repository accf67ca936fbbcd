"""Documents: several sequences packed into one, none of which sees another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from regard.compat.torch import is_traced, lacks_values
from regard.errors import MaskError
from regard.masks.arguments import Integers, integers
from regard.masks.base import HIDDEN, Mask, Span
from regard.masks.index import Index, broadcast_shapes, indices, take
from regard.masks.span import interval
from regard.masks.tiles import block_indices, tile_states, uniform_cover

__all__ = ["Documents", "Packed", "documents", "packed"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Row i sees key j if query_ids[b, i] = key_ids[b, j]; `key_ids` default to `query_ids`."""

    query_ids: Tensor
    key_ids: Tensor | None = None

    factory: ClassVar[str] = "documents"
    items: ClassVar[dict[str, int]] = {"query_ids": 1, "key_ids": 1}

    @property
    def keys(self) -> Tensor:
        """The ids of the keys."""
        return self.query_ids if self.key_ids is None else self.key_ids

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return take(self.query_ids, i) == take(self.keys, j)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        ids, keys = self.query_ids.to(i.device)[..., i], self.keys.to(i.device)
        lead = broadcast_shapes(ids.shape[:-1], keys.shape[:-1])
        ids, keys = ids.expand(*lead, -1).contiguous(), keys.expand(*lead, -1)
        if keys.numel() == 0:
            return interval(i, m, 0, torch.zeros_like(ids if not lead else ids[:, None]))
        groups, order = keys.sort(dim=-1, stable=True)  # equal ids are adjacent, each group in key order
        start, stop = torch.searchsorted(groups, ids), torch.searchsorted(groups, ids, right=True)
        first = order.gather(-1, start.clamp(max=m - 1))
        last = order.gather(-1, (stop - 1).clamp(min=0))
        count = stop - start
        lo, hi = torch.where(count > 0, first, 0), torch.where(count > 0, last + 1, 0)
        exact = bool((hi - lo == count).all())
        return interval(i, m, lo, hi, exact) if not lead else interval(i, m, lo[:, None], hi[:, None], exact)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        if n == 0 or m == 0 or 0 in self.lead:
            return uniform_cover(rows, cols, HIDDEN)
        queries, keys = self._labels(n, m)
        queries, keys = queries[..., block_indices(rows)], keys[..., block_indices(cols)]  # (lead, R or C, size)
        least, most = queries.amin(-1)[..., None], queries.amax(-1)[..., None]  # (lead, R, 1)
        found = least if self.key_ids is None else queries.masked_fill(queries < 0, m).amin(-1)[..., None]
        low, high = keys.amin(-1)[..., None, :], keys.amax(-1)[..., None, :]  # (lead, 1, C)
        return tile_states((found <= high) & (most >= low), (least == most) & (low == high) & (least == low))

    def _labels(self, n: int, m: int) -> tuple[Tensor, Tensor]:
        """Number the documents of rows and keys in the order of their first keys; −1 for a document without keys."""
        rows, keys = torch.arange(n, device="cpu"), torch.arange(m, device="cpu")
        if self.key_ids is not None:
            lo, hi, _ = self.span(rows, n, m)
            return torch.where(hi > lo, lo, -1), Documents(self.key_ids).span(keys, m, m).lo
        ids = take(self.query_ids, rows)
        labels = ids if bool((ids.diff() >= 0).all()) else self.span(rows, n, m).lo  # ids in order can serve as numbers
        return labels, labels

    def misfit(self, n: int, m: int) -> str | None:
        for ids, length, what in ((self.query_ids, n, "rows"), (self.keys, m, "keys")):
            if ids.shape[-1] != length:
                return f"documents: there are {length} {what}, but ids for {ids.shape[-1]}."
        return None


@final
@dataclass(frozen=True, eq=False, repr=False)
class Packed(Mask):
    """Documents of the given lengths, one after another: row i sees key j if both are in the same document."""

    lengths: Tensor

    factory: ClassVar[str] = "packed"
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return self._document_of(i) == self._document_of(j)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        which, ends = self._document_of(i), self.lengths.to(i.device).cumsum(0)
        edges = torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), m)))
        return interval(i, m, edges[which], edges[which + 1])

    def misfit(self, n: int, m: int) -> str | None:
        if n != m:
            return f"packed: rows and keys are the same tokens; there are {n} rows and {m} keys."
        if torch.compiler.is_compiling() or (self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None  # the lengths cannot be read here
        if is_traced() or lacks_values(self.lengths):
            return None
        total = int(self.lengths.sum())
        return None if total == n else f"packed: the lengths sum to {total}; there are {n} rows."

    def _document_of(self, i: Tensor) -> Tensor:
        """The index of the document that each token is in."""
        return torch.bucketize(i.contiguous(), self.lengths.to(i.device).cumsum(0), right=True)


def documents(query_ids: Integers, key_ids: Integers | None = None) -> Mask:
    """Let tokens see the tokens with the same id, (N,) or (B, N); keys have the same ids as queries unless given.

    >>> print(documents([7, 7, 3, 3, 3]).picture(5, 5))
    ██···
    ██···
    ··███
    ··███
    ··███
    """
    queries = integers("documents", "query_ids", query_ids, dims=(1, 2))
    if key_ids is None:
        return Documents(queries)
    keys = integers("documents", "key_ids", key_ids, dims=(1, 2))
    if queries.dim() == keys.dim() == 2 and queries.shape[0] != keys.shape[0] and 1 not in (len(queries), len(keys)):
        raise MaskError(
            f"documents: query_ids and key_ids must have the same number of batch items; "
            f"got shapes {tuple(queries.shape)} and {tuple(keys.shape)}."
        )
    return Documents(queries, keys)


def packed(lengths: Integers) -> Mask:
    """Let each document see only itself; the documents follow one another, and their lengths sum to the token count.

    >>> print(packed([2, 3]).picture(5, 5))
    ██···
    ██···
    ··███
    ··███
    ··███
    """
    return Packed(integers("packed", "lengths", lengths, least=0))
