"""Documents: several sequences packed into one, none of which sees another."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from regard.compat.torch import (
    is_batched,
    is_capturing,
    is_traced,
    is_wrapped,
    lacks_values,
    unwrap,
    versions_of,
)
from regard.errors import ArgumentError, MaskError
from regard.masks.arguments import Integers, integers
from regard.masks.base import HIDDEN, Mask, Span
from regard.masks.index import Index, broadcast_shapes, indices, take
from regard.masks.span import interval
from regard.masks.tiles import block_indices, tile_states, uniform_cover
from regard.masks.transfer import copy_to

__all__ = ["Documents", "Packed", "Varlen", "documents", "packed"]

_DTYPES = (torch.int64, torch.int32)  # these stay as they are: a converted tensor would be another one at each call


class _Read(NamedTuple):
    """What the host has read of a tensor of ids."""

    ids: weakref.ref[Tensor]
    version: int
    is_sorted: bool


_READ: dict[int, _Read] = {}  # by the id of the tensor


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

    def is_sorted(self) -> bool:
        """Whether no id is smaller than the one before it.

        Ids on a GPU are read once per tensor, for all masks of it, and again after it was changed; the host waits then.
        """
        return self.remembered("sorted", lambda: all(map(_is_sorted, self.tensors)))

    def _moved(self, device: torch.device, copy: Callable[[Tensor, torch.device], Tensor] = copy_to) -> Mask:
        moved = super()._moved(device, copy)
        if isinstance(moved, Documents) and all(ids.is_cpu for ids in self.tensors):
            known = self.is_sorted()  # the host has the ids, and need not wait for the copy
            moved.remembered("sorted", lambda: known)
        return moved

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


def _is_sorted(ids: Tensor) -> bool:
    if (
        not ids.is_cuda
        or _may_change_uncounted()
        or is_wrapped(ids)
        or lacks_values(ids)
        or (version := versions_of((ids,))[0]) < 0
    ):
        return _never_falls(ids)
    read, key = _READ, id(ids)
    found = read.get(key)
    if found is None or found.ids() is not ids or found.version != version:
        found = read[key] = _Read(weakref.ref(ids, lambda _: read.pop(key, None)), version, _never_falls(ids))
    return found.is_sorted


def _may_change_uncounted() -> bool:
    """Whether ids may change without a new version: a captured graph is replayed, and collectives count no changes."""
    return is_capturing() or (torch.distributed.is_available() and torch.distributed.is_initialized())


def _never_falls(ids: Tensor) -> bool:
    return bool((ids[..., 1:] >= ids[..., :-1]).all())


@final
@dataclass(frozen=True, eq=False, repr=False)
class Packed(Mask):
    """Documents of the given lengths, one after another: row i sees key j if both are in the same document.

    Tokens after the last document see nothing and are seen by none, as in `Varlen`.
    """

    lengths: Tensor

    factory: ClassVar[str] = "packed"
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        ends = self.lengths.cumsum(0)
        return _same_document(i, j, ends, ends)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        ends = self.lengths.cumsum(0)
        return _document_span(i, m, ends, ends)

    def misfit(self, n: int, m: int) -> str | None:
        if n != m:
            return f"packed: rows and keys are the same tokens; there are {n} rows and {m} keys."
        lengths = _numbers_on_host(self.lengths)
        if lengths is None or sum(lengths) == n:
            return None
        ends = lengths[:1] == [0] and lengths[-1] == n and sorted(lengths) == lengths
        remedy = " They look like cumulative lengths: packed(cu_seqlens=…) takes those." if ends else ""
        return f"packed: the lengths sum to {sum(lengths)}; there are {n} rows.{remedy}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class Varlen(Mask):
    """Documents one after another, by cumulative lengths (documents + 1,), of which the first counts as 0."""

    cu_seqlens: Tensor = field(kw_only=True)
    key_cu_seqlens: Tensor | None = field(default=None, kw_only=True)  # if those of the keys are others

    factory: ClassVar[str] = "packed"
    rising: ClassVar[bool] = True

    @property
    def keys(self) -> Tensor:
        """The cumulative lengths of the keys."""
        return self.cu_seqlens if self.key_cu_seqlens is None else self.key_cu_seqlens

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        return _same_document(i, j, self.cu_seqlens[1:].long(), self.keys[1:].long())

    def span(self, i: Tensor, n: int, m: int) -> Span:
        return _document_span(i, m, self.cu_seqlens[1:].long(), self.keys[1:].long())

    def misfit(self, n: int, m: int) -> str | None:
        if n != m and self.key_cu_seqlens is None:
            return (
                f"packed: rows and keys are the same tokens; there are {n} rows and {m} keys. "
                f"Give key_cu_seqlens if the keys are others."
            )
        for name, ends, size, what in (("", self.cu_seqlens, n, "rows"), ("key_", self.key_cu_seqlens, m, "keys")):
            numbers = None if ends is None else _numbers_on_host(ends)
            if numbers is not None and numbers[-1] != size:
                return f"packed: {name}cu_seqlens ends with {numbers[-1]}; there are {size} {what}."
        return None


def _same_document(i: Index, j: Index, rows: Tensor, keys: Tensor) -> Tensor:
    """Whether row i and key j are in one document, by where documents end."""
    i, j = indices(i, j)
    document = torch.bucketize(i.contiguous(), rows.to(i.device), right=True)
    return (document == torch.bucketize(j.contiguous(), keys.to(i.device), right=True)) & (document < len(rows))


def _document_span(i: Tensor, m: int, rows: Tensor, keys: Tensor) -> Span:
    """The keys of the document that row i is in; none, where the last document ends, for rows after it."""
    document, keys = torch.bucketize(i.contiguous(), rows.to(i.device), right=True), keys.to(i.device)
    edges = torch.cat((keys.new_zeros(1), keys, keys[-1:] if len(keys) else keys.new_zeros(1)))
    return interval(i, m, edges[document], edges[document + 1])


def _numbers_on_host(x: Tensor) -> list[int] | None:
    """The numbers of a tensor, if the host can read them, and without waiting for a GPU."""
    if not x.is_cpu or torch.compiler.is_compiling() or is_traced() or lacks_values(x) or is_batched(x):
        return None
    numbers: list[int] = unwrap(x).tolist()
    return numbers


def documents(query_ids: Integers, key_ids: Integers | None = None) -> Mask:
    """Let tokens see the tokens with the same id, (N,) or (B, N); keys have the same ids as queries unless given.

    >>> print(documents([7, 7, 3, 3, 3]).picture(5, 5))
    ██···
    ██···
    ··███
    ··███
    ··███
    """
    queries = integers("documents", "query_ids", query_ids, dims=(1, 2), dtypes=_DTYPES)
    if key_ids is None:
        return Documents(queries)
    keys = integers("documents", "key_ids", key_ids, dims=(1, 2), dtypes=(queries.dtype,))
    if keys.dtype != queries.dtype:
        queries, keys = queries.long(), keys.long()
    if queries.dim() == keys.dim() == 2 and queries.shape[0] != keys.shape[0] and 1 not in (len(queries), len(keys)):
        raise MaskError(
            f"documents: query_ids and key_ids must have the same number of batch items; "
            f"got shapes {tuple(queries.shape)} and {tuple(keys.shape)}."
        )
    return Documents(queries, keys)


def packed(
    lengths: Integers | None = None, *, cu_seqlens: Integers | None = None, key_cu_seqlens: Integers | None = None
) -> Mask:
    """Let each document see only itself; the documents follow one another, and their lengths sum to the token count.

    >>> print(packed([2, 3]).picture(5, 5))
    ██···
    ██···
    ··███
    ··███
    ··███

    `cu_seqlens` are cumulative lengths, (documents + 1,), as other libraries take them: 0, then the end of each
    document. `key_cu_seqlens` are those of the keys, where documents have other lengths there:

    >>> print(packed(cu_seqlens=[0, 2, 3], key_cu_seqlens=[0, 1, 5]).picture(3, 5))
    █····
    █····
    ·████

    Numbers in a CPU tensor or a list are checked. Those on a GPU are not read by the host, which would have to wait:
    tokens after the last document see nothing and are seen by none.
    """
    if (lengths is None) == (cu_seqlens is None):
        got = "both" if lengths is not None else "neither" if key_cu_seqlens is None else "key_cu_seqlens alone"
        raise ArgumentError(
            f"packed: give either lengths or cu_seqlens; got {got}. "
            f"cu_seqlens are cumulative lengths: 0, then the end of each document."
        )
    if lengths is not None:
        if key_cu_seqlens is not None:
            raise ArgumentError(
                "packed: key_cu_seqlens goes with cu_seqlens; got lengths. Give both as cumulative lengths."
            )
        return Packed(integers("packed", "lengths", lengths, least=0))
    rows = _cumulative("cu_seqlens", cu_seqlens)
    if key_cu_seqlens is None:
        return Varlen(cu_seqlens=rows)
    keys = _cumulative("key_cu_seqlens", key_cu_seqlens)
    if rows.shape != keys.shape:
        raise MaskError(
            f"packed: cu_seqlens and key_cu_seqlens must have one entry per document and one more; "
            f"got shapes {tuple(rows.shape)} and {tuple(keys.shape)}."
        )
    if rows.dtype != keys.dtype:
        rows, keys = rows.long(), keys.long()
    return Varlen(cu_seqlens=rows, key_cu_seqlens=keys)


def _cumulative(name: str, value: object) -> Tensor:
    """Read cumulative lengths. Those of 32 bits stay, so that the mask sees when its tensor is changed in place."""
    found = integers("packed", name, value, dtypes=_DTYPES)
    if found.shape[0] == 0:
        raise MaskError(f"packed: {name} must start with 0; got no entry. Without a document it is [0].")
    ends = _numbers_on_host(found)
    if ends is None:
        return found
    if ends[0] != 0:
        raise MaskError(f"packed: {name} must start with 0; got {ends[0]}. It is 0, then the end of each document.")
    for before, end in pairwise(ends):
        if end < before:
            raise MaskError(
                f"packed: {name} must never fall; got {before}, then {end}. Lengths are passed as packed(lengths)."
            )
    return found
