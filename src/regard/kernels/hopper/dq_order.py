"""The order in which key blocks add to dQ, the first keys first; and the mask by keys: which rows see each key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ahead
from ..block_lists import BITS, MASK_BLOCK, MULTIPLE, NONE, addresses, block_states, pad_to_multiple, strides_of
from ..block_mask import BlockMask

__all__ = ["DqOrder", "dq_order", "dq_order_for_launch"]


class DqOrder(NamedTuple):
    """The tensors that a kernel gets; None where the mask's kind does not need them. Strides are multiples of 16, as in `BlockLists`.

    The position of a key block is how many key blocks add to the same row block before it. For spans it is rank − base, and
    the rows that see a key are a span too. For bits, the row blocks that each key block visits are listed, in ascending order,
    with their positions.
    """

    base: Tensor | None = None  # int32 (items, heads, row blocks): the rank of the first key block that it visits
    rank: Tensor | None = None  # int32 (items, heads, key blocks): how many key blocks before it are visible to some row
    begin: Tensor | None = None  # int32 (items, heads, m): the first row that sees a key, never decreasing …
    end: Tensor | None = None  # … and one past the last; not above it if no row does
    start: Tensor | None = None  # int32 (items · heads · key blocks + 1,): where the row blocks of each key block begin …
    entry: Tensor | None = None  # … which they are …
    slot: Tensor | None = None  # … the slot of their bits, −1 where the block is full …
    position: Tensor | None = None  # … and how many key blocks add to them before
    bits: Tensor | None = None  # int32 (slots, MASK_BLOCK, MASK_BLOCK / 32): bit i of word w is row 32·w + i
    row_item: int = 0  # strides of base
    row_head: int = 0
    key_item: int = 0  # strides of rank
    key_head: int = 0
    span_item: int = 0  # strides of begin and end
    span_head: int = 0


_UNPACKED = 512  # slots that are unpacked together


def dq_order(block_mask: BlockMask, BM: int, BN: int) -> DqOrder:
    """The order for a block mask that is visited by keys, in blocks of BM rows and BN keys; built once."""
    cached: dict[tuple[int, int], DqOrder] = block_mask.dq_orders
    known = cached.get((BM, BN))
    if known is not None:
        block_mask.wait(known)
        return known
    made = block_mask.key_order(BM, BN)
    if made is not None:
        order = _with_strides(*(x.view(*block_mask.lead, -1) for x in (made.base, made.rank, made.begin, made.end)))
        if ahead.may_keep():
            cached[BM, BN] = order
        return order
    block_mask.wait()
    order = DqOrder() if block_mask.kind == NONE else _of_bits(block_mask, BM, BN) if block_mask.kind == BITS else _of_spans(block_mask, BM, BN)
    if ahead.may_keep():
        cached[BM, BN] = order
        block_mask.record()
    return order


def dq_order_for_launch(block_mask: BlockMask, BM: int, BN: int) -> DqOrder:
    """The same with addresses in place of tensors that the block mask keeps, as in `BlockMask.for_launch`."""
    order = dq_order(block_mask, BM, BN)
    if block_mask.dq_orders.get((BM, BN)) is not order:
        return order
    known: tuple[DqOrder, DqOrder] | None = block_mask.dq_addresses.get((BM, BN))
    if known is None or known[0] is not order:
        known = block_mask.dq_addresses[BM, BN] = order, addresses(order)
    return known[1]


def _of_spans(block_mask: BlockMask, BM: int, BN: int) -> DqOrder:
    lists = block_mask.by_keys(BM, BN)
    if lists.bounds is None or block_mask.lo is None or block_mask.hi is None:
        raise RuntimeError("spans have two ends and bounds")
    keys, rows = -(-block_mask.m // BN), -(-block_mask.n // BM)
    bounds = lists.bounds[..., : 4 * keys].unflatten(-1, (keys, 4)).long()  # (items, heads, key blocks, 4)
    first, last = bounds[..., 0], bounds[..., 3]
    some = (last > first).int()
    rank = some.cumsum(-1) - some
    ended = torch.zeros(*first.shape[:2], rows + 1, dtype=torch.int64, device=first.device)
    base = ended.scatter_add_(2, last, some.long()).cumsum(-1)[..., :rows]
    j = torch.arange(block_mask.m, dtype=torch.int32, device=first.device).expand(*first.shape[:2], -1).contiguous()
    spans = (torch.searchsorted(x.contiguous(), j, right=True).int() for x in (block_mask.hi, block_mask.lo))
    return _with_strides(*(pad_to_multiple(x) for x in (base.int(), rank.int(), *spans)))


def _with_strides(base: Tensor, rank: Tensor, begin: Tensor, end: Tensor) -> DqOrder:
    (row_item, row_head), (key_item, key_head), (span_item, span_head) = (strides_of(x) for x in (base, rank, begin))
    return DqOrder(
        base=base, rank=rank, begin=begin, end=end, row_item=row_item, row_head=row_head, key_item=key_item, key_head=key_head,
        span_item=span_item, span_head=span_head,
    )  # fmt: skip


def _of_bits(block_mask: BlockMask, BM: int, BN: int) -> DqOrder:
    if block_mask.mask_bits is None:
        raise RuntimeError("lists are of bits")
    states = block_states(block_mask.mask_bits, block_mask.n, block_mask.m, BM, BN, True)  # (items, heads, row blocks, key blocks)
    slots = block_mask.mask_bits.table.repeat_interleave(MASK_BLOCK // BM, 2).repeat_interleave(MASK_BLOCK // BN, 3)
    slots = slots[:, :, : states.shape[2], : states.shape[3]]
    visited = (states > 0).int()
    position = visited.cumsum(3) - visited  # how many earlier key blocks the rows visit
    slots = torch.where(states == 2, -1, slots)
    visited, position, slots = (pad(x.mT, (0, 0, 0, -x.shape[3] % MULTIPLE)) for x in (visited, position, slots))
    chosen = visited > 0
    counts = chosen.sum(-1).flatten().cumsum(0)
    start = torch.cat((counts.new_zeros(1), counts)).to(torch.int32)
    entry = chosen.nonzero()[:, -1].to(torch.int32).contiguous()
    slot, position = (x[chosen].int().contiguous() for x in (slots, position))
    return DqOrder(start=start, entry=entry, slot=slot, position=position, bits=_transposed(block_mask.mask_bits.bits))


def _transposed(bits: Tensor) -> Tensor:
    """Bits (slots, MASK_BLOCK, MASK_BLOCK / 32) with rows and keys exchanged."""
    shift = torch.arange(32, device=bits.device)
    parts = [
        (((part[..., None].long() >> shift) & 1).flatten(2).mT.unflatten(2, (-1, 32)) << shift).sum(-1).int()
        for part in bits.split(_UNPACKED)
    ]
    return torch.cat(parts)
