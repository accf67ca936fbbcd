"""A mask that is one interval of keys per row, as the numbers and tensors that `portable.spans` computes it from.

Nothing here reads a tensor: lengths, offsets and ids may be on a GPU that is still computing them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..masks import Mask
from ..masks.base import And
from ..masks.blocks import Blocks
from ..masks.causal import Causal
from ..masks.documents import Documents, Packed, Varlen
from ..masks.everything import Everything
from ..masks.padding import Padding
from ..masks.prefix import Prefix
from ..masks.window import Window

__all__ = ["ENDS", "FAR", "LENGTHS", "NO_TABLE", "SORTED_IDS", "SPAN_TABLE", "Sizes", "SpanTerms", "span_terms"]

NO_TABLE, LENGTHS, ENDS, SORTED_IDS, SPAN_TABLE = range(5)
FAR = 1 << 30  # further than any row or key


class SpanTerms(NamedTuple):
    """Row i of batch item b sees key j if all of these hold; a field at its default allows everything."""

    least: int = -FAR  # least ≤ j − i < most
    most: int = FAR
    until: int = FAR  # j < until
    offset: Tensor | None = None  # int64 (B|1,): offset_least ≤ j − i − offset[b] < offset_most
    offset_least: int = -FAR
    offset_most: int = FAR
    length: Tensor | None = None  # int64 (B|1,): j < length[b]
    size: int = FAR  # (i + block_offset) // size = j // size, where block_offset is a number …
    block_offset: int = 0
    block_offsets: Tensor | None = None  # … or a tensor, int64 (B|1,)
    table: int = NO_TABLE  # what `rows` and `keys` hold
    rows: Tensor | None = None  # lengths or ends of documents, or sorted ids (B, n) or (n,); or lo …
    keys: Tensor | None = None  # … of the keys; or hi
    items: int = 1

    @staticmethod
    def of_spans(lo: Tensor, hi: Tensor) -> SpanTerms:
        """Any spans, int32 (items, heads, n), whose ends never fall."""
        return SpanTerms(table=SPAN_TABLE, rows=lo.contiguous(), keys=hi.contiguous())


class Sizes(NamedTuple):
    """What lists are for: blocks of BM rows and BN keys of a mask over n rows and m keys."""

    n: int
    m: int
    lead: tuple[int, int]  # items and heads that have masks of their own
    BM: int
    BN: int
    before: int | None  # by rows: how many rows before row 0 the first block begins; None for lists by keys
    inner: int  # batch items that share one item of the mask


def span_terms(mask: Mask, n: int, m: int) -> SpanTerms | None:
    """The terms of a mask; None if it is of another kind, or an `&` of more parts of one kind than there are fields."""
    found = _Found(n, m)
    return SpanTerms(**found.fields) if max(n, m) <= FAR and found.add(mask) else None


class _Found:
    """The fields of `SpanTerms` for the parts of an `&` so far."""

    def __init__(self, n: int, m: int) -> None:
        self.n, self.m = n, m
        self.fields: dict[str, Any] = {}

    def add(self, mask: Mask) -> bool:
        """Add a mask, and say whether there was a place for it."""
        if type(mask) is And:
            return self.add(mask.left) and self.add(mask.right)
        add = _ADD.get(type(mask))
        return add is not None and add(self, mask)

    def everything(self, mask: Everything) -> bool:
        return True

    def causal(self, mask: Causal) -> bool:
        return self._diagonal(mask.offset, None, 1)

    def window(self, mask: Window) -> bool:
        return self._diagonal(
            mask.offset, None if mask.left is None else -mask.left, None if mask.right is None else mask.right + 1
        )

    def prefix(self, mask: Prefix) -> bool:
        if not isinstance(mask.length, int):
            return self._per_item("length", mask.length)
        self.fields["until"] = min(mask.length, self.fields.get("until", FAR))
        return True

    def padding(self, mask: Padding) -> bool:
        return self._per_item("length", mask.lengths)

    def blocks(self, mask: Blocks) -> bool:
        if "size" in self.fields or mask.size >= FAR:
            return False
        self.fields["size"] = mask.size
        if mask.offset is not None and not isinstance(mask.offset, int):
            return self._per_item("block_offsets", mask.offset)
        self.fields["block_offset"] = self.m - self.n if mask.offset is None else _within(mask.offset)
        return True

    def packed(self, mask: Packed) -> bool:
        return self._table(LENGTHS, mask.lengths, mask.lengths)

    def varlen(self, mask: Varlen) -> bool:
        rows = mask.cu_seqlens[1:]
        return self._table(ENDS, rows, rows if mask.key_cu_seqlens is None else mask.key_cu_seqlens[1:])

    def documents(self, mask: Documents) -> bool:
        if "table" in self.fields or not mask.is_sorted():
            return False
        rows, keys = mask.query_ids, mask.keys
        for ids in (rows, keys):
            if ids.dim() == 2:
                self._count(ids.shape[0])
        return self._table(SORTED_IDS, rows, keys)

    def _diagonal(self, offset: int | Tensor | None, least: int | None, most: int | None) -> bool:
        """Add least ≤ j − i − offset < most, where None means no limit."""
        prefix, shift = "", 0
        if offset is None:
            shift = self.m - self.n
        elif isinstance(offset, int):
            shift = offset
        else:
            prefix = "offset_"
            if not self._per_item("offset", offset):
                return False
        if least is not None:
            name = prefix + "least"
            self.fields[name] = max(_within(least + shift), self.fields.get(name, -FAR))
        if most is not None:
            name = prefix + "most"
            self.fields[name] = min(_within(most + shift), self.fields.get(name, FAR))
        return True

    def _per_item(self, name: str, x: Tensor) -> bool:
        self._count(x.shape[0])
        return self.fields.setdefault(name, x) is x

    def _table(self, table: int, rows: Tensor, keys: Tensor) -> bool:
        if "table" in self.fields:
            return False
        self.fields |= {"table": table, "rows": rows, "keys": keys}
        return True

    def _count(self, items: int) -> None:
        if items > 1:
            self.fields["items"] = items


def _within(x: int) -> int:
    """A number of the user, cut to what no row or key reaches."""
    return max(-FAR, min(x, FAR))


_ADD: dict[type[Mask], Callable[[_Found, Any], bool]] = {
    Everything: _Found.everything,
    Causal: _Found.causal,
    Window: _Found.window,
    Prefix: _Found.prefix,
    Padding: _Found.padding,
    Blocks: _Found.blocks,
    Packed: _Found.packed,
    Varlen: _Found.varlen,
    Documents: _Found.documents,
}
