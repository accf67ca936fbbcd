"""A mask that is one interval of keys per row, as the numbers and tensors that `portable.spans` computes it from.

Nothing here reads a tensor: lengths, offsets and ids may be on a GPU that is still computing them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    if max(n, m) > FAR:
        return None
    return _with(SpanTerms(), mask, n, m)


def _with(terms: SpanTerms, mask: Mask, n: int, m: int) -> SpanTerms | None:
    kind = type(mask)
    if kind is And:
        left = _with(terms, mask.left, n, m)  # type: ignore[attr-defined]
        return None if left is None else _with(left, mask.right, n, m)  # type: ignore[attr-defined]
    add = _ADD.get(kind)
    return None if add is None else add(terms, mask, n, m)


def _causal(terms: SpanTerms, mask: Causal, n: int, m: int) -> SpanTerms | None:
    return _diagonal(terms, mask.offset, None, 1, n, m)


def _window(terms: SpanTerms, mask: Window, n: int, m: int) -> SpanTerms | None:
    least, most = None if mask.left is None else -mask.left, None if mask.right is None else mask.right + 1
    return _diagonal(terms, mask.offset, least, most, n, m)


def _diagonal(
    terms: SpanTerms, offset: int | Tensor | None, least: int | None, most: int | None, n: int, m: int
) -> SpanTerms | None:
    """Add least ≤ j − i − offset < most, where None means no limit."""
    shift = 0 if isinstance(offset, Tensor) else m - n if offset is None else offset
    low = -FAR if least is None else max(-FAR, min(least + shift, FAR))
    high = FAR if most is None else max(-FAR, min(most + shift, FAR))
    if not isinstance(offset, Tensor):
        return terms._replace(least=max(terms.least, low), most=min(terms.most, high))
    if terms.offset is not None and terms.offset is not offset:
        return None
    low, high = max(low, terms.offset_least), min(high, terms.offset_most)
    return _items(terms._replace(offset=offset, offset_least=low, offset_most=high), offset)


def _prefix(terms: SpanTerms, mask: Prefix, n: int, m: int) -> SpanTerms | None:
    if isinstance(mask.length, Tensor):
        return _length(terms, mask.length)
    return terms._replace(until=min(terms.until, mask.length))


def _padding(terms: SpanTerms, mask: Padding, n: int, m: int) -> SpanTerms | None:
    return _length(terms, mask.lengths)


def _length(terms: SpanTerms, length: Tensor) -> SpanTerms | None:
    if terms.length is not None and terms.length is not length:
        return None
    return _items(terms._replace(length=length), length)


def _blocks(terms: SpanTerms, mask: Blocks, n: int, m: int) -> SpanTerms | None:
    if terms.size != FAR or mask.size >= FAR:
        return None
    if isinstance(mask.offset, Tensor):
        return _items(terms._replace(size=mask.size, block_offsets=mask.offset), mask.offset)
    offset = m - n if mask.offset is None else max(-FAR, min(mask.offset, FAR))
    return terms._replace(size=mask.size, block_offset=offset)


def _packed(terms: SpanTerms, mask: Packed, n: int, m: int) -> SpanTerms | None:
    if terms.table != NO_TABLE:
        return None
    return terms._replace(table=LENGTHS, rows=mask.lengths, keys=mask.lengths)


def _varlen(terms: SpanTerms, mask: Varlen, n: int, m: int) -> SpanTerms | None:
    if terms.table != NO_TABLE:
        return None
    return terms._replace(table=ENDS, rows=mask.cu_seqlens[1:], keys=mask.keys[1:])


def _documents(terms: SpanTerms, mask: Documents, n: int, m: int) -> SpanTerms | None:
    if terms.table != NO_TABLE or not mask.is_sorted():
        return None
    terms = terms._replace(table=SORTED_IDS, rows=mask.query_ids, keys=mask.keys)
    for ids in (mask.query_ids, mask.keys):
        terms = _items(terms, ids[:, 0]) if ids.dim() == 2 else terms
    return terms


def _items(terms: SpanTerms, per_item: Tensor) -> SpanTerms:
    return terms._replace(items=max(terms.items, per_item.shape[0]))


def _everything(terms: SpanTerms, mask: Everything, n: int, m: int) -> SpanTerms | None:
    return terms


_ADD: dict[type[Mask], Callable[..., SpanTerms | None]] = {
    Everything: _everything,
    Causal: _causal,
    Window: _window,
    Prefix: _prefix,
    Padding: _padding,
    Blocks: _blocks,
    Packed: _packed,
    Varlen: _varlen,
    Documents: _documents,
}
