"""What kernels read of a block mask: row spans, lists of full and partial blocks, packed bits.

A mask reaches a kernel as a `BlockMask` of one of three kinds. NONE: every pair is visible. SPANS: row i attends to the
keys lo[i] ≤ j < hi[i], and neither end decreases from row to row; blocks inside the span of every row need no mask. BITS:
any other mask, as a table of blocks of 128 × 128 pairs. A block is hidden or has a slot of bits; slot 0 is all ones. The
blocks of a kernel divide these, and for them there are lists of the full and of the partial ones.

A kernel takes blocks in one order, whatever the kind: the full ones, then the partial ones; on Hopper the partial ones
backwards, then the full ones. So the result of a mask does not depend on its kind, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "BITS", "MASK_BLOCK", "MULTIPLE", "NONE", "SPANS", "BlockLists", "KeyOrder", "MaskBits", "SpanLists", "addresses", "block_states", "bounds_by_keys", "lists_of_bits",
    "lists_of_spans", "pad_to_multiple", "spans_alone", "strides_of", "visible_by_bits", "visible_by_spans",
]

T = TypeVar("T", bound=tuple[Any, ...])
NONE, SPANS, BITS = 0, 1, 2
MULTIPLE = 16
MASK_BLOCK = 128  # rows and keys of a block in the lists; the blocks of a kernel divide it


class MaskBits(NamedTuple):
    """Blocks of SIDE × SIDE pairs and their bits."""

    table: Tensor  # int32 (items, heads, row blocks, key blocks): the slot of each block, −1 where hidden
    bits: Tensor  # int32 (slots, SIDE, SIDE / 32): bit j of word w says of key 32·w + j


class BlockLists(NamedTuple):
    """A block mask for the blocks of one kernel; None where its kind has no such field. Kernels read by strides, so tensors may be flat.

    Integers are multiples of 16, and other numbers are in tensors: Triton compiles once more for integers that are, or are
    not, multiples of 16, and must not compile for a mask.
    """

    lo: Tensor | None = None  # int32 (items, heads, n)
    hi: Tensor | None = None
    bounds: Tensor | None = (
        None  # int32 (items, heads, blocks · 4): first, first full, end of the full, end
    )
    full_start: Tensor | None = None  # int32 (items · heads · blocks + 1,): where the list of full blocks of each block begins …
    full_entry: Tensor | None = None  # … and the blocks in it
    start: Tensor | None = None  # the same for the partial blocks …
    entry: Tensor | None = None
    slot: Tensor | None = None  # … with the slots of their bits: of each part of their rows that divides SIDE
    bits: Tensor | None = None
    table: Tensor | None = None  # int32 (items, heads, row blocks · key blocks) of SIDE: the slot of each, −1 where hidden
    seen: Tensor | None = None  # int8 (items, heads, m): whether some row may attend to the key
    all_keys_visible: Tensor | None = None  # int32 (1,): whether some row may attend to every key
    item: int = 0  # strides of lo, hi in items and heads
    head: int = 0
    block_item: int = 0  # the same of blocks: of `bounds`, or of `start`
    block_head: int = 0
    table_item: int = 0
    table_head: int = 0
    seen_item: int = 0
    seen_head: int = 0
    inner: int = 16  # 16 times the batch items that share one item of the mask


class KeyOrder(NamedTuple):
    """The rows that see each key, and the order in which key blocks add to dQ, flat; see `hopper.dq_order.DqOrder`."""

    begin: Tensor  # int32 (items · heads · m, padded)
    end: Tensor
    rank: Tensor  # of key blocks
    base: Tensor  # of row blocks


class SpanLists:
    """Lists by their addresses, which is all that most launches read; tensors are made of them when somebody asks."""

    def __init__(
        self, addresses: BlockLists, lists: Callable[[], BlockLists], order: Callable[[], KeyOrder] | None = None, memory: Tensor | None = None
    ) -> None:
        self.addresses, self._lists, self._order, self._memory = addresses, lists, order, memory

    @cached_property
    def lists(self) -> BlockLists:
        return self._lists()

    @cached_property
    def order(self) -> KeyOrder | None:
        """Where blocks are listed by keys: their order."""
        return None if self._order is None else self._order()

    @property
    def tensors(self) -> Sequence[object]:
        """All that must stay alive while a kernel reads the lists."""
        return self.lists if self._memory is None else (self._memory,)

    @staticmethod
    def of(lists: BlockLists) -> SpanLists:
        """Lists that are there as tensors."""
        return SpanLists(addresses(lists), lambda: lists)


def addresses(part: T) -> T:
    """A named tuple with addresses in place of its tensors."""
    kind: Any = type(part)
    made: T = kind(*[x.data_ptr() if type(x) is Tensor else x for x in part])
    return made


def lists_of_bits(
    mask_bits: MaskBits, n: int, m: int, BM: int, BN: int, turned: bool, before: int, seen: Tensor, inner: int
) -> BlockLists:
    """The lists of a mask given by bits, for blocks of BM rows and BN keys; `turned` for kernels that hold keys."""
    items, heads = mask_bits.table.shape[:2]
    part = math.gcd(BM, MASK_BLOCK)
    states = block_states(mask_bits, n, m, part, BN, turned)  # (items, heads, row blocks, key blocks)
    slots = mask_bits.table.repeat_interleave(MASK_BLOCK // part, 2).repeat_interleave(MASK_BLOCK // BN, 3)
    slots = slots[:, :, : states.shape[2], : states.shape[3]]
    states, slots = _join_rows(states, slots, BM // part, before // part)
    if turned:
        states, slots = states.mT, slots.transpose(2, 3)
    spare = -states.shape[2] % MULTIPLE
    states, slots = pad(states, (0, 0, 0, spare)), pad(slots, (0, 0, 0, 0, 0, spare))
    blocks = states.shape[2]
    table = pad_to_multiple(mask_bits.table.flatten(2))
    (full_start, full_entry), (start, entry) = _lists(states == 2), _lists(states == 1)
    table_item, table_head = strides_of(table)
    return _of_keys(seen, m, inner)._replace(
        full_start=full_start,
        full_entry=full_entry,
        start=start,
        entry=entry,
        slot=slots[states == 1].flatten(),
        bits=mask_bits.bits,
        table=table,
        block_item=blocks * heads if items > 1 else 0,
        block_head=blocks if heads > 1 else 0,
        table_item=table_item,
        table_head=table_head,
    )


def lists_of_spans(
    lo: Tensor, hi: Tensor, n: int, m: int, BM: int, BN: int, turned: bool, before: int, seen: Tensor, inner: int
) -> BlockLists:
    """The bounds of a mask given by spans, for blocks of BM rows and BN keys; `turned` for kernels that hold keys."""
    bounds = _bounds_of_blocks(lo, hi, n, m, BM, BN) if turned else _bounds_by_rows(lo, hi, n, m, BM, BN, before)
    lo, hi, bounds = map(pad_to_multiple, (lo, hi, bounds.flatten(2)))
    (item, head), (block_item, block_head) = map(strides_of, (lo, bounds))
    return _of_keys(seen, m, inner)._replace(
        lo=lo,
        hi=hi,
        bounds=bounds,
        item=item,
        head=head,
        block_item=block_item,
        block_head=block_head,
    )


def spans_alone(lo: Tensor, hi: Tensor) -> BlockLists:
    """Lists that have nothing but spans; copied only if their strides must become multiples."""
    if lo.shape[2] % MULTIPLE == 0 or lo.shape[0] * lo.shape[1] == 1:
        lo, hi = lo.contiguous(), hi.contiguous()
    else:
        lo, hi = pad_to_multiple(lo), pad_to_multiple(hi)
    item, head = strides_of(lo)
    return BlockLists(lo=lo, hi=hi, item=item, head=head)


def _of_keys(seen: Tensor, m: int, inner: int) -> BlockLists:
    """The fields that do not depend on the blocks."""
    item, head = strides_of(seen)
    return BlockLists(
        seen=seen,
        inner=MULTIPLE * inner,
        all_keys_visible=seen[..., :m].all().to(torch.int32).view(1),
        seen_item=item,
        seen_head=head,
    )


def block_states(mask_bits: MaskBits, n: int, m: int, BM: int, BN: int, turned: bool) -> Tensor:
    """The state of each block of BM rows and BN keys, 0 hidden, 1 partial, 2 full: (items, heads, row, key blocks).

    Rows after the last do not count, nor do keys after the last for kernels that hold keys.
    """
    slots, down, across = len(mask_bits.bits), MASK_BLOCK // BM, MASK_BLOCK // BN
    parts = (
        mask_bits.bits.view(slots, down, BM, across, BN // 32) if BN >= 32 else _half_words(mask_bits.bits, down, BM, across, BN)
    )
    hidden = (parts == 0).all(4).all(2)  # (slots, down, across)
    full = _full(mask_bits.bits, n % MASK_BLOCK, m % MASK_BLOCK if turned else 0, BM, BN)  # (4, slots, down, across)
    items, heads, rows, keys = mask_bits.table.shape
    last = torch.zeros(rows, keys, dtype=torch.int64, device=mask_bits.bits.device)  # which of the four applies to a block
    if n % MASK_BLOCK:
        last[-1] += 1
    if turned and m % MASK_BLOCK:
        last[:, -1] += 2
    slot = mask_bits.table.clamp(min=0).long()
    state = torch.where(
        hidden[slot], 0, torch.where(full[last, slot], 2, 1)
    )  # (items, heads, rows, keys, down, across)
    state = torch.where((mask_bits.table < 0)[..., None, None], 0, state)
    state = state.transpose(3, 4).reshape(items, heads, rows * down, keys * across)
    return state[:, :, : -(-n // BM), : -(-m // BN)]


def _join_rows(states: Tensor, slots: Tensor, parts: int, before: int) -> tuple[Tensor, Tensor]:
    """Join `parts` blocks of rows into one: their state, and the slot of each part, (items, heads, rows, keys, parts).

    Parts before the first row and after the last do not count, and have no slot.
    """
    around = (0, 0, before, -(states.shape[2] + before) % parts)
    full, hidden = (pad(states == known, around, value=True).unflatten(2, (-1, parts)).all(3) for known in (2, 0))
    slots = pad(slots, around, value=-1).unflatten(2, (-1, parts)).transpose(3, 4)
    return torch.where(full, 2, torch.where(hidden, 0, 1)), slots


def _half_words(bits: Tensor, down: int, BM: int, across: int, BN: int) -> Tensor:
    """The bits of blocks narrower than a word: (slots, down, BM, across, 1)."""
    shift = torch.arange(0, 32, BN, device=bits.device, dtype=torch.int32)
    pieces = (bits[..., None] >> shift) & ((1 << BN) - 1)  # (slots, SIDE, SIDE / 32, 32 / BN)
    return pieces.view(len(bits), down, BM, across, 1)


def _full(bits: Tensor, rows: int, keys: int, BM: int, BN: int) -> Tensor:
    """Which parts of each slot are full: inside, in the last row of blocks, in the last column, in both: (4, slots, …)."""
    down, across = MASK_BLOCK // BM, MASK_BLOCK // BN
    beyond_rows = (torch.arange(MASK_BLOCK, device=bits.device) >= (rows or MASK_BLOCK))[:, None]  # (SIDE, 1)
    j = torch.arange(MASK_BLOCK, device=bits.device)
    beyond = ((j >= (keys or MASK_BLOCK)).view(MASK_BLOCK // 32, 32).long() << torch.arange(32, device=bits.device)).sum(-1)
    beyond_keys = beyond.to(torch.int32)  # (SIDE / 32,) a word with the bits of the keys beyond the last
    found: list[Tensor] = []
    for with_keys in (0, 1):
        for with_rows in (0, 1):
            if found and not (with_keys and keys) and not (with_rows and rows):
                found.append(found[0])  # nothing is beyond
                continue
            mask_bits = bits | beyond_keys if with_keys else bits
            mask_bits = torch.where(beyond_rows, -1, mask_bits) if with_rows else mask_bits
            if BN >= 32:
                whole = mask_bits.view(len(bits), down, BM, across, BN // 32) == -1
            else:
                whole = _half_words(mask_bits, down, BM, across, BN) == (1 << BN) - 1
            found.append(whole.all(4).all(2))
    return torch.stack(found)


def visible_by_spans(lo: Tensor, hi: Tensor, m: int) -> Tensor:
    """Which of m keys are in some span: spans begun minus spans ended."""
    some = (hi > lo).to(torch.int32)
    change = torch.zeros(*lo.shape[:2], m + 1, dtype=torch.int32, device=lo.device)
    change.scatter_add_(2, lo.long(), some).scatter_add_(2, hi.long(), -some)
    return change.cumsum(2)[..., :m] > 0


def visible_by_bits(mask_bits: MaskBits, m: int) -> Tensor:
    """Which of m keys have a bit in some block."""
    shown = _bitwise_or(mask_bits.bits, 1)  # (slots, SIDE / 32)
    slots = mask_bits.table  # (items, heads, row blocks, key blocks)
    total = _bitwise_or(torch.where((slots >= 0)[..., None], shown[slots.clamp(min=0).long()], 0), 2)
    shift = torch.arange(32, device=shown.device, dtype=torch.int32)
    return ((total[..., None] >> shift) & 1).bool().flatten(2)[..., :m]


def _bitwise_or(x: Tensor, dim: int) -> Tensor:
    """The bitwise or along a dimension, by halves."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        x = torch.cat((x.narrow(dim, 0, half) | x.narrow(dim, half, half), x.narrow(dim, 2 * half, size % 2)), dim)
    return x.squeeze(dim)


def _lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Where the list of each block begins, and the blocks in the lists."""
    counts = chosen.sum(-1).flatten().cumsum(0)
    start = torch.cat((counts.new_zeros(1), counts)).to(torch.int32)
    return start, chosen.nonzero()[:, -1].to(torch.int32).contiguous()


def pad_to_multiple(x: Tensor) -> Tensor:
    """Lengthen the last dimension to a multiple of MULTIPLE."""
    return pad(x, (0, -x.shape[-1] % MULTIPLE)).contiguous()


def strides_of(x: Tensor) -> tuple[int, int]:
    """Strides of items and heads in (items, heads, …), 0 where the size is 1."""
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0


def _bounds_by_rows(lo: Tensor, hi: Tensor, n: int, m: int, BM: int, BN: int, before: int) -> Tensor:
    """For each block of BM rows, in blocks of BN keys: first, first full, end of the full, end."""
    begin = torch.arange(-before, n, BM, device=lo.device)  # (blocks,)
    top, last = begin.clamp(min=0), (begin + (BM - 1)).clamp_(max=n - 1)
    first_lo, first_hi, last_lo, last_hi = lo[..., top], hi[..., top], lo[..., last], hi[..., last]
    some = last_hi > first_lo
    first = torch.where(some, first_lo // BN, 0)
    behind = torch.where(some, (last_hi + BN - 1) // BN, 0)
    return _four(first, (last_lo + BN - 1) // BN, first_hi // BN, behind)


def _bounds_of_blocks(lo: Tensor, hi: Tensor, n: int, m: int, BM: int, BN: int) -> Tensor:
    """For each block of BN keys, in blocks of BM rows."""
    left = torch.arange(0, m, BN, device=lo.device)
    return bounds_by_keys(lo, hi, n, left, (left + BN).clamp_(max=m), BM)


def bounds_by_keys(lo: Tensor, hi: Tensor, n: int, left: Tensor, right: Tensor, BM: int) -> Tensor:
    """For the keys from `left` to `right`, in blocks of BM rows: first, first full, end of the full, end.

    Both ends of the spans never fall, so rows are found by search.
    """
    shape = (*lo.shape[:2], len(left))
    left, right = (x.to(torch.int32).expand(shape).contiguous() for x in (left, right))
    lo, hi = lo.contiguous(), hi.contiguous()
    first = torch.searchsorted(hi, left, right=True)  # the first row with hi > left
    behind = torch.searchsorted(lo, right)  # one after the last row with lo < right
    full = torch.searchsorted(hi, right)  # the first row with hi ≥ right
    until = torch.searchsorted(lo, left, right=True)  # one after the last row with lo ≤ left
    some = (behind > first) & (right > left)
    whole = torch.where(until == n, (n + BM - 1) // BM, until // BM)  # the rows that a last block lacks see all
    return _four(
        torch.where(some, first // BM, 0),
        (full + BM - 1) // BM,
        whole,
        torch.where(some, (behind + BM - 1) // BM, 0),
    )


def _four(first: Tensor, full: Tensor, until: Tensor, behind: Tensor) -> Tensor:
    """Put the full blocks inside of those that are met; without any, both their ends are at the first."""
    full, until = torch.maximum(full, first), torch.minimum(until, behind)
    none = until <= full
    full, until = torch.where(none, first, full), torch.where(none, first, until)
    return torch.stack((first, full, until, behind), -1).to(torch.int32).contiguous()
