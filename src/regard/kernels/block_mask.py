"""Turn a mask into the block mask that kernels read: spans if they say everything, else blocks with packed bits.

Nothing is compiled for a mask, and its block mask is computed once. Masks without tensors are cached by value; a mask
with tensors caches its own block mask until one of its tensors changes. On a GPU, a mask that is one interval of keys per
row by its kind (`span_terms`) costs one small kernel per list (`portable/spans.py`), and the host reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.torch import is_capturing, raw_stream
from ..masks import Mask
from ..masks.base import FULL, HIDDEN, PARTIAL, And
from ..masks.blocks import Blocks
from ..masks.causal import Causal
from ..masks.documents import Packed, Varlen
from ..masks.everything import Everything
from ..masks.padding import Padding
from ..masks.prefix import Prefix
from ..masks.window import Window
from . import ahead
from .block_lists import (
    BITS,
    MASK_BLOCK,
    NONE,
    SPANS,
    BlockLists,
    KeyOrder,
    MaskBits,
    SpanLists,
    addresses,
    lists_of_bits,
    lists_of_spans,
    pad_to_multiple,
    spans_alone,
    visible_by_bits,
    visible_by_spans,
)
from .span_terms import Sizes, SpanTerms, span_terms

__all__ = ["BlockMask", "block_mask", "most_bytes", "on_device", "traceable"]

_AT_ONCE = 2048  # partial blocks whose bits are computed together
_MOST_CACHED = 64  # block masks of masks without tensors
_BY_VALUE: dict[tuple[Mask, int, int, torch.device], BlockMask] = {}
_GATHER = 0x0102040810204080  # times eight bytes that are 0 or 1: their bits, in order, in the highest byte
_INTERVALS = frozenset((Everything, Causal, Window, Padding, Prefix, Blocks, Packed, Varlen))
_NARROW = 1024  # keys
_APART = 64  # items times heads up to which each gets lists of its own; beyond, all share one


_NOTHING = SpanLists.of(BlockLists())


class BlockMask:
    """A mask over n rows and m keys as kernels read it.

    Its spans are two tensors, or `terms` from which a kernel computes them on a GPU when the first lists are asked for.
    """

    def __init__(
        self,
        n: int,
        m: int,
        lo: Tensor | None = None,  # int32 (items, heads, n)
        hi: Tensor | None = None,
        mask_bits: MaskBits | None = None,
        lead: tuple[int, int] = (1, 1),  # items and heads that have masks of their own
        inner: int = 1,
        terms: SpanTerms | None = None,
        device: torch.device | None = None,  # where the terms are computed
        narrow: bool = False,  # whether no row sees more than _NARROW keys, as the kind of mask tells
    ) -> None:
        self.n, self.m, self.mask_bits, self.lead, self.inner, self.narrow = n, m, mask_bits, lead, inner, narrow
        self._known = _NOTHING  # lists with what all sizes of blocks share, as far as it is computed
        if terms is None and lo is not None and hi is not None and lo.is_cuda:
            terms, device = SpanTerms.of_spans(lo, hi), lo.device
            self._known = SpanLists.of(spans_alone(lo, hi))
        self._lo, self._hi, self._terms, self._device = lo, hi, terms, device
        self.kind = BITS if mask_bits is not None else SPANS if lo is not None or terms is not None else NONE
        self._cache: dict[tuple[int, int, bool, int], BlockLists] = {}
        self._addresses: dict[tuple[int, int, int | None], BlockLists] = {}  # of lists in the cache, or of launches
        self._launches: dict[tuple[int, int, int | None], SpanLists] = {}
        self._seen: Tensor | None = None
        self._stream: int | None = None  # the stream that computed its last part …
        self._there: torch.cuda.Event | None = None  # … and the event after it
        spans = lo if mask_bits is None else mask_bits.bits
        self._place = device if device is not None or spans is None else spans.device
        self.dq_orders: dict[tuple[int, int], Any] = {}  # of `hopper.dq_order` …
        self.dq_addresses: dict[tuple[int, int], tuple[Any, Any]] = {}  # … and their addresses, after them
        if terms is None:
            self.record()

    @property
    def lo(self) -> Tensor | None:
        """The first key that each row sees, int32 (items, heads, n)."""
        return self._lo if self._lo is not None or self._terms is None else self._padded_spans()[0][..., : self.n]

    @property
    def hi(self) -> Tensor | None:
        """One past the last key that each row sees."""
        return self._hi if self._hi is not None or self._terms is None else self._padded_spans()[1][..., : self.n]

    def by_rows(self, BM: int, BN: int, before: int = 0) -> BlockLists:
        """For kernels that hold BM rows and loop over blocks of BN keys; the first block starts `before` rows before row 0."""
        known = self._cache.get((BM, BN, False, before))
        return known if known is not None and self._is_there() else self._cached(BM, BN, False, before)

    def by_keys(self, BM: int, BN: int) -> BlockLists:
        """For kernels that hold BN keys and loop over blocks of BM rows."""
        known = self._cache.get((BM, BN, True, 0))
        return known if known is not None and self._is_there() else self._cached(BM, BN, True, 0)

    def for_launch(self, BM: int, BN: int, before: int | None) -> BlockLists:
        """The lists by rows, or by keys if `before` is None, with addresses in place of tensors that are kept here.

        Triton's launcher asks the driver about the address of every tensor, but takes a number as it is.
        """
        known = self._addresses.get((BM, BN, before))
        if known is not None and self._is_there():
            return known
        if self._terms is not None:
            made = self._launched(self._terms, BM, BN, before)
            if self._launches.get((BM, BN, before)) is not made:
                return made.lists  # which keep the memory
            self._addresses[BM, BN, before] = made.addresses
            return made.addresses
        lists = self.by_keys(BM, BN) if before is None else self.by_rows(BM, BN, before)
        if self._cache.get((BM, BN, before is None, before or 0)) is lists:
            self._addresses[BM, BN, before] = addresses(lists)
        return lists

    def key_order(self, BM: int, BN: int) -> KeyOrder | None:
        """The rows of each key and the order of key blocks, which the launch for `by_keys` computes too; None without one."""
        if self._terms is None:
            return None
        return self._launched(self._terms, BM, BN, None).order

    def record(self) -> None:
        """Record an event on the current stream, which computed a part, so that other streams can wait for it."""
        stream = self._current()
        if stream is not None:
            self._stream, self._there = stream.cuda_stream, stream.record_event()

    def wait(self, *parts: BlockLists | NamedTuple) -> None:
        """Let the current stream wait for the one that computed this, and keep the parts alive while it reads them."""
        if self._there is None or self._is_there() or (stream := self._current()) is None:
            return
        stream.wait_event(self._there)
        launched = [x for lists in (self._known, *self._launches.values()) for x in lists.tensors]
        for x in (self._lo, self._hi, self._seen, *launched, *(self.mask_bits or ()), *(x for part in parts for x in part)):
            if isinstance(x, Tensor):
                x.record_stream(stream)

    def _is_there(self) -> bool:
        """Whether the current stream computed this, or nobody else has to be waited for."""
        return self._there is None or self._place is None or raw_stream(self._place) == self._stream

    def _current(self) -> torch.cuda.Stream | None:
        """The current stream; None on a CPU and in a graph capture, which starts after all other work is done."""
        device = self._place
        return None if device is None or device.type != "cuda" or is_capturing() else torch.cuda.current_stream(device)

    def _cached(self, BM: int, BN: int, turned: bool, before: int) -> BlockLists:
        known = self._cache.get((BM, BN, turned, before))
        if known is not None:
            self.wait(known)
            return known
        if self._terms is not None:
            at = BM, BN, None if turned else before
            launched = self._launched(self._terms, *at)
            if self._launches.get(at) is launched:
                self._cache[BM, BN, turned, before] = launched.lists
            return launched.lists
        self.wait()
        made = self._compute(BM, BN, turned, before)
        if ahead.may_keep():
            self._cache[BM, BN, turned, before] = made
            self.record()
        return made

    def _launched(self, terms: SpanTerms, BM: int, BN: int, before: int | None) -> SpanLists:
        """The lists by rows, or by keys if `before` is None, and all that was not computed before, in one launch."""
        from .portable.spans_launch import launch_spans

        self.wait()
        made = self._launches.get((BM, BN, before))
        if made is not None:
            return made
        known = self._known
        if before is None and known.addresses.lo is None:
            known = self._launched(terms, MASK_BLOCK, MASK_BLOCK, 0)
        device = torch.device("cpu") if self._device is None else self._device
        made = launch_spans(terms, Sizes(self.n, self.m, self.lead, BM, BN, before, self.inner), device, known)
        if not ahead.may_keep():
            return made
        self._launches[BM, BN, before] = made
        if self._known.addresses.seen is None:
            self._known = made
        self.record()
        return made

    def _padded_spans(self) -> tuple[Tensor, Tensor]:
        lists = self._known.lists if self._known.addresses.lo is not None else self.by_rows(MASK_BLOCK, MASK_BLOCK)
        if lists.lo is None or lists.hi is None:
            raise RuntimeError("spans have two ends")
        return lists.lo.view(*self.lead, -1), lists.hi.view(*self.lead, -1)

    def _compute(self, BM: int, BN: int, turned: bool, before: int) -> BlockLists:
        if self.mask_bits is not None:
            return lists_of_bits(self.mask_bits, self.n, self.m, BM, BN, turned, before, self._visible_keys(), self.inner)
        if self._lo is None or self._hi is None:
            return BlockLists()
        return lists_of_spans(self._lo, self._hi, self.n, self.m, BM, BN, turned, before, self._visible_keys(), self.inner)

    def _visible_keys(self) -> Tensor:
        """Which keys some row may attend to: int8 (items, heads, m)."""
        if self._seen is None:
            if self.mask_bits is not None:
                made = visible_by_bits(self.mask_bits, self.m)
            elif self._lo is not None and self._hi is not None:
                made = visible_by_spans(self._lo, self._hi, self.m)
            else:
                raise RuntimeError("without a mask every key is seen")
            made = pad_to_multiple(made.to(torch.int8))
            if not ahead.may_keep():
                return made
            self._seen = made
        return self._seen


def block_mask(mask: Mask | None, n: int, m: int, device: torch.device, inner: int = 1) -> BlockMask:
    """The block mask of a mask on a device; `inner` consecutive batch items share one item of the mask."""
    if mask is None or isinstance(mask, Everything):
        return BlockMask(n, m)
    if is_capturing() and traceable(mask) and not (mask.constant and (mask, n, m, device) in _BY_VALUE):
        return _compute(mask, n, m, device, inner)  # computed inside the graph, so that replays follow the mask's tensors
    if mask.constant:
        made = mask.latest("layout", (n, m, device), lambda: _cached_by_value(mask, n, m, device))
    else:
        made = mask.remembered(("layout", n, m, device, inner), lambda: _compute(mask, n, m, device, inner))
    found: BlockMask = made
    return found


def _cached_by_value(mask: Mask, n: int, m: int, device: torch.device) -> BlockMask:
    key = (mask, n, m, device)
    found = _BY_VALUE.pop(key, None) or _compute(mask, n, m, device, 1)
    _BY_VALUE[key] = found  # now the most recently used
    if len(_BY_VALUE) > _MOST_CACHED:
        _BY_VALUE.pop(next(iter(_BY_VALUE)))
    return found


def _compute(mask: Mask, n: int, m: int, device: torch.device, inner: int) -> BlockMask:
    if device.type == "cuda":
        mask = on_device(mask, device)
        terms = span_terms(mask, n, m)
        if terms is not None:
            return BlockMask(n, m, lead=(terms.items, 1), inner=inner, terms=terms, device=device, narrow=_narrow(mask))
    with torch.no_grad():
        return _of_any_mask(mask, n, m, device, inner)


def on_device(mask: Mask, device: torch.device) -> Mask:
    """The mask with its tensors on a device."""
    for x in mask.tensors:
        if x.device != device:
            return mask.placed(device)
    return mask


def _of_any_mask(mask: Mask, n: int, m: int, device: torch.device, inner: int) -> BlockMask:
    i = torch.arange(n, device=device)
    lo, hi, exact = mask.span(i, n, m)
    if exact and (mask.monotone or bool((_never_decreases(lo) & _never_decreases(hi)).all())):
        return BlockMask(n, m, *_spans(lo, hi, n), lead=_lead(lo), inner=inner, narrow=_narrow(mask))
    mask = mask.shared(device)
    return BlockMask(n, m, mask_bits=_mask_bits(mask, n, m, device), lead=mask.lead, inner=inner)


def traceable(mask: Mask) -> bool:
    """Whether every mask of this kind is an interval per row: a compiler cannot read its parameters."""
    if type(mask) is And:
        return traceable(mask.left) and traceable(mask.right)
    return type(mask) in _INTERVALS


def _narrow(mask: Mask) -> bool:
    if type(mask) is And:
        return _narrow(mask.left) or _narrow(mask.right)
    return type(mask) is Window and mask.left is not None and mask.right is not None and mask.left + mask.right < _NARROW


def most_bytes(mask: Mask, n: int, m: int) -> int:
    """The most bytes that the bits of a mask may take, if it is no interval."""
    items, heads = mask.lead
    return items * heads * -(-n // MASK_BLOCK) * -(-m // MASK_BLOCK) * MASK_BLOCK * MASK_BLOCK // 8


def _never_decreases(x: Tensor) -> Tensor:
    return x[..., 1:] >= x[..., :-1]


def _lead(x: Tensor) -> tuple[int, int]:
    return (x.shape[0], x.shape[1]) if x.dim() == 3 else (1, 1)


def _spans(lo: Tensor, hi: Tensor, n: int) -> tuple[Tensor, Tensor]:
    shape = (*_lead(lo), n)
    return lo.expand(shape).to(torch.int32).contiguous(), hi.expand(shape).to(torch.int32).contiguous()


def _mask_bits(mask: Mask, n: int, m: int, device: torch.device) -> MaskBits:
    """The slots of all blocks that are not hidden, and the bits of those that are not full."""
    items, heads = mask.lead
    rows, keys = (torch.tensor([*range(0, size, MASK_BLOCK), size], device="cpu") for size in (n, m))
    parts = list(_restricted(mask)) if items * heads <= _APART else None
    if parts is None:
        cover = mask.cover(rows, keys, n, m).expand(items, heads, -1, -1).clone()
        cover[cover == FULL] = PARTIAL
        parts = list(_restricted(mask))
    else:
        cover = torch.stack([part.cover(rows, keys, n, m) for part in parts]).unflatten(0, (items, heads))
    if m % MASK_BLOCK:
        last = cover[..., -1]
        last[last == FULL] = PARTIAL  # keys after the last one are hidden
    seen = cover != HIDDEN
    partly = cover == PARTIAL
    slots = torch.where(partly, partly.flatten().cumsum(0).view_as(cover), torch.where(seen, 0, -1))
    bits = [torch.full((1, MASK_BLOCK, MASK_BLOCK // 32), -1, dtype=torch.int32, device=device)]
    for part, blocks in zip(parts, partly.flatten(0, 1), strict=True):
        bits += _bits(part, blocks.nonzero().to(device), n, m)
    return MaskBits(slots.to(device=device, dtype=torch.int32), torch.cat(bits))


def _restricted(mask: Mask) -> Iterator[Mask]:
    items, heads = mask.lead
    for b in range(items):
        for h in range(heads):
            yield mask if (items, heads) == (1, 1) else mask.restrict(slice(b, b + 1), slice(h, h + 1))


def _bits(mask: Mask, blocks: Tensor, n: int, m: int) -> Iterator[Tensor]:
    """The bits of some blocks (P, 2) of an item and head, int32 (P, SIDE, SIDE / 32)."""
    here = torch.arange(MASK_BLOCK, device=blocks.device)
    for some in blocks.split(_AT_ONCE):
        i, j = some[:, :1] * MASK_BLOCK + here, some[:, 1:] * MASK_BLOCK + here  # (P, SIDE)
        allowed = mask.allows(i.clamp(max=n - 1)[:, :, None], j.clamp(max=m - 1)[:, None, :], n, m)
        allowed = allowed.reshape(len(some), MASK_BLOCK, MASK_BLOCK) & (i < n)[:, :, None] & (j < m)[:, None, :]
        yield ((allowed.view(torch.int64) * _GATHER) >> 56).to(torch.uint8).view(torch.int32)
