"""A mask by its keys: which rows see each, and in which order blocks of keys add to a block of rows, the last keys first."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...compat.torch import is_capturing
from ..block_lists import BITS, MASK_BLOCK, MULTIPLE, NONE, BlockMask, block_states, pad_to_multiple, strides_of

__all__ = ["DqOrder", "dq_order"]


class DqOrder(NamedTuple):
    """What a kernel gets; None where the mask's kind has no such thing. Strides are multiples of 16, as those of `Where`.

    Of spans, the turn is base − rank, and the rows that see a key are a span too. Of bits, the blocks of rows that each
    block of keys meets are listed, in ascending order, with their turns.
    """

    base: Tensor | None = None  # int32 (items, heads, row blocks): the rank of the last block of keys that it meets
    rank: Tensor | None = None  # int32 (items, heads, key blocks): how many before it are met by some row
    begin: Tensor | None = None  # int32 (items, heads, m): the first row that sees a key, never falling …
    behind: Tensor | None = None  # … and one behind the last; not above it where none does
    start: Tensor | None = None  # int32 (items · heads · key blocks + 1,): where the rows of each begin …
    entry: Tensor | None = None  # … which they are …
    slot: Tensor | None = None  # … the slot of their bits, −1 where the block is full …
    turn: Tensor | None = None  # … and how many blocks of keys come before
    bits: Tensor | None = None  # int32 (slots, SIDE, SIDE / 32): bit i of word w says of row 32·w + i
    row_item: int = 0
    row_head: int = 0
    key_item: int = 0
    key_head: int = 0
    span_item: int = 0
    span_head: int = 0


_TOGETHER = 512  # slots that are unpacked together
_KNOWN: WeakKeyDictionary[BlockMask, dict[tuple[int, int], DqOrder]] = WeakKeyDictionary()


def dq_order(block_mask: BlockMask, BM: int, BN: int) -> DqOrder:
    """The turns of a layout that is walked by keys, in blocks of BM rows and BN keys."""
    known = _KNOWN.setdefault(block_mask, {})
    if (BM, BN) in known:
        block_mask.wait(known[BM, BN])
        return known[BM, BN]
    block_mask.wait()
    made = DqOrder() if block_mask.kind == NONE else _listed(block_mask, BM, BN) if block_mask.kind == BITS else _of_spans(block_mask, BM, BN)
    if not is_capturing():  # what a captured graph makes is there only while the graph runs
        known[BM, BN] = made
        block_mask.record()
    return made


def _of_spans(block_mask: BlockMask, BM: int, BN: int) -> DqOrder:
    where = block_mask.by_keys(BM, BN)
    if where.bounds is None or block_mask.lo is None or block_mask.hi is None:
        raise RuntimeError("spans have two ends and bounds")
    keys, rows = -(-block_mask.m // BN), -(-block_mask.n // BM)
    bounds = where.bounds[..., : 4 * keys].unflatten(-1, (keys, 4)).long()  # (items, heads, key blocks, 4)
    first, behind = bounds[..., 0], bounds[..., 3]
    some = (behind > first).int()
    rank = some.cumsum(-1) - some
    begun = torch.zeros(*first.shape[:2], rows, dtype=torch.int64, device=first.device)
    base = begun.scatter_add_(2, first.clamp(max=rows - 1), some.long()).cumsum(-1) - 1
    j = torch.arange(block_mask.m, dtype=torch.int32, device=first.device).expand(*first.shape[:2], -1).contiguous()
    spans = (torch.searchsorted(x.contiguous(), j, right=True).int() for x in (block_mask.hi, block_mask.lo))
    base, rank, begin, behind = (pad_to_multiple(x) for x in (base.int(), rank.int(), *spans))
    strides = (*strides_of(base), *strides_of(rank), *strides_of(begin))
    return DqOrder(base, rank, begin, behind, None, None, None, None, None, *strides)


def _listed(block_mask: BlockMask, BM: int, BN: int) -> DqOrder:
    if block_mask.mask_bits is None:
        raise RuntimeError("lists are of bits")
    states = block_states(block_mask.mask_bits, block_mask.n, block_mask.m, BM, BN, True)  # (items, heads, row blocks, key blocks)
    slots = block_mask.mask_bits.table.repeat_interleave(MASK_BLOCK // BM, 2).repeat_interleave(MASK_BLOCK // BN, 3)
    slots = slots[:, :, : states.shape[2], : states.shape[3]]
    met = (states > 0).int()
    turn = met.flip(3).cumsum(3).flip(3) - met  # how many of later keys the rows meet
    slots = torch.where(states == 2, -1, slots)
    met, turn, slots = (pad(x.mT, (0, 0, 0, -x.shape[3] % MULTIPLE)) for x in (met, turn, slots))
    chosen = met > 0
    counts = chosen.sum(-1).flatten().cumsum(0)
    start = torch.cat((counts.new_zeros(1), counts)).to(torch.int32)
    entry = chosen.nonzero()[:, -1].to(torch.int32).contiguous()
    slot, turn = (x[chosen].int().contiguous() for x in (slots, turn))
    return DqOrder(None, None, None, None, start, entry, slot, turn, _turned(block_mask.mask_bits.bits))


def _turned(bits: Tensor) -> Tensor:
    """Bits (slots, SIDE, SIDE / 32) with rows and keys exchanged."""
    shift = torch.arange(32, device=bits.device)
    parts = [
        (((part[..., None].long() >> shift) & 1).flatten(2).mT.unflatten(2, (-1, 32)) << shift).sum(-1).int()
        for part in bits.split(_TOGETHER)
    ]
    return torch.cat(parts)
