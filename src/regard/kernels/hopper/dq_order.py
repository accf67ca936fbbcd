"""A mask by its keys: which rows see each, and in which order blocks of keys add to a block of rows, the last keys first."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...compat.torch import captured
from ..block_lists import BITS, EVEN, NONE, SIDE, Layout, block_states, pad_to_even, strides_of

__all__ = ["Turns", "turns"]


class Turns(NamedTuple):
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
_KNOWN: WeakKeyDictionary[Layout, dict[tuple[int, int], Turns]] = WeakKeyDictionary()


def turns(layout: Layout, BM: int, BN: int) -> Turns:
    """The turns of a layout that is walked by keys, in blocks of BM rows and BN keys."""
    known = _KNOWN.setdefault(layout, {})
    if (BM, BN) in known:
        layout.awaited(known[BM, BN])
        return known[BM, BN]
    layout.awaited()
    made = Turns() if layout.kind == NONE else _listed(layout, BM, BN) if layout.kind == BITS else _of_spans(layout, BM, BN)
    if not captured():  # what a captured graph makes is there only while the graph runs
        known[BM, BN] = made
        layout.made()
    return made


def _of_spans(layout: Layout, BM: int, BN: int) -> Turns:
    where = layout.by_keys(BM, BN)
    if where.bounds is None or layout.lo is None or layout.hi is None:
        raise RuntimeError("spans have two ends and bounds")
    keys, rows = -(-layout.m // BN), -(-layout.n // BM)
    bounds = where.bounds[..., : 4 * keys].unflatten(-1, (keys, 4)).long()  # (items, heads, key blocks, 4)
    first, behind = bounds[..., 0], bounds[..., 3]
    some = (behind > first).int()
    rank = some.cumsum(-1) - some
    begun = torch.zeros(*first.shape[:2], rows, dtype=torch.int64, device=first.device)
    base = begun.scatter_add_(2, first.clamp(max=rows - 1), some.long()).cumsum(-1) - 1
    j = torch.arange(layout.m, dtype=torch.int32, device=first.device).expand(*first.shape[:2], -1).contiguous()
    spans = (torch.searchsorted(x.contiguous(), j, right=True).int() for x in (layout.hi, layout.lo))
    base, rank, begin, behind = (pad_to_even(x) for x in (base.int(), rank.int(), *spans))
    strides = (*strides_of(base), *strides_of(rank), *strides_of(begin))
    return Turns(base, rank, begin, behind, None, None, None, None, None, *strides)


def _listed(layout: Layout, BM: int, BN: int) -> Turns:
    if layout.words is None:
        raise RuntimeError("lists are of bits")
    states = block_states(layout.words, layout.n, layout.m, BM, BN, True)  # (items, heads, row blocks, key blocks)
    slots = layout.words.table.repeat_interleave(SIDE // BM, 2).repeat_interleave(SIDE // BN, 3)
    slots = slots[:, :, : states.shape[2], : states.shape[3]]
    met = (states > 0).int()
    turn = met.flip(3).cumsum(3).flip(3) - met  # how many of later keys the rows meet
    slots = torch.where(states == 2, -1, slots)
    met, turn, slots = (pad(x.mT, (0, 0, 0, -x.shape[3] % EVEN)) for x in (met, turn, slots))
    chosen = met > 0
    counts = chosen.sum(-1).flatten().cumsum(0)
    start = torch.cat((counts.new_zeros(1), counts)).to(torch.int32)
    entry = chosen.nonzero()[:, -1].to(torch.int32).contiguous()
    slot, turn = (x[chosen].int().contiguous() for x in (slots, turn))
    return Turns(None, None, None, None, start, entry, slot, turn, _turned(layout.words.bits))


def _turned(bits: Tensor) -> Tensor:
    """Bits (slots, SIDE, SIDE / 32) with rows and keys exchanged."""
    shift = torch.arange(32, device=bits.device)
    parts = [
        (((part[..., None].long() >> shift) & 1).flatten(2).mT.unflatten(2, (-1, 32)) << shift).sum(-1).int()
        for part in bits.split(_TOGETHER)
    ]
    return torch.cat(parts)
