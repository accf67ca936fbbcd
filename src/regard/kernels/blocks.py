"""Which blocks of keys a block of rows meets, and the other way round: row vectors, block lists, packed bits.

A mask reaches a kernel as a `Layout` of one of three kinds. NONE: everything is seen. SPANS: row i sees the keys
lo[i] ≤ j < hi[i], both ends never falling; blocks inside every row's span need no mask at all. BITS: any other mask, as
a list of the blocks of 128 × 128 pairs that are not hidden, each with a slot of bits; slot 0 is all ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BITS", "NONE", "SIDE", "SPANS", "Layout", "Where", "Words"]

NONE, SPANS, BITS = 0, 1, 2
SIDE = 128  # rows and keys of a block in the lists; the blocks of a kernel divide it


class Words(NamedTuple):
    """Block lists and bits: entries of row block r of (item, head) are start[…, r] : start[…, r + 1]."""

    start: Tensor  # int32 (items · heads · row blocks + 1,)
    entry: Tensor  # int32 (entries,): the key block of each
    slot: Tensor  # int32 (entries,): where its bits are
    turned_start: Tensor  # the same by key blocks …
    turned_entry: Tensor  # … : the row block of each
    turned_slot: Tensor
    table: Tensor  # int32 (items, heads, row blocks, key blocks): the slot of each block, −1 where hidden
    bits: Tensor  # int32 (slots, SIDE, SIDE / 32): bit j of word w says of key 32·w + j


class Where(NamedTuple):
    """What a kernel gets of a layout; None where its kind has no such thing."""

    lo: Tensor | None = None  # int32 (items, heads, n)
    hi: Tensor | None = None
    bounds: Tensor | None = None  # int32 (items, heads, blocks, 4): first, first full, behind the full, behind the last
    start: Tensor | None = None
    entry: Tensor | None = None
    slot: Tensor | None = None
    bits: Tensor | None = None
    item: int = 0  # strides of lo, hi in items and heads
    head: int = 0
    block_item: int = 0  # the same of blocks: of `bounds`, or of `start`
    block_head: int = 0
    inner: int = 1  # batch items that share one item of the mask


@dataclass(eq=False)
class Layout:
    """A mask over n rows and m keys as kernels read it."""

    n: int
    m: int
    lo: Tensor | None = None  # int32 (items, heads, n)
    hi: Tensor | None = None
    words: Words | None = None
    lead: tuple[int, int] = (1, 1)  # items and heads that it tells apart
    inner: int = 1
    _known: dict[tuple[int, int, bool], Where] = field(default_factory=dict)

    @property
    def kind(self) -> int:
        return BITS if self.words is not None else SPANS if self.lo is not None else NONE

    def by_rows(self, BM: int, BN: int) -> Where:
        """For kernels that hold BM rows and walk over key blocks of BN."""
        return self._remembered(BM, BN, False)

    def by_keys(self, BM: int, BN: int) -> Where:
        """For kernels that hold BN keys and walk over row blocks of BM."""
        return self._remembered(BM, BN, True)

    def _remembered(self, BM: int, BN: int, turned: bool) -> Where:
        if (BM, BN, turned) not in self._known:
            self._known[BM, BN, turned] = self._where(BM, BN, turned)
        return self._known[BM, BN, turned]

    def _where(self, BM: int, BN: int, turned: bool) -> Where:
        items, heads = self.lead
        if self.words is not None:
            w = self.words
            blocks = -(-(self.m if turned else self.n) // SIDE)
            chosen = (w.turned_start, w.turned_entry, w.turned_slot) if turned else (w.start, w.entry, w.slot)
            strides = (blocks * heads if items > 1 else 0, blocks if heads > 1 else 0)
            return Where(None, None, None, *chosen, w.bits, 0, 0, *strides, self.inner)
        if self.lo is None or self.hi is None:
            return Where()
        make = _bounds_by_keys if turned else _bounds_by_rows
        bounds = make(self.lo, self.hi, self.n, self.m, BM, BN)
        blocks = bounds.shape[2]
        return Where(
            self.lo,
            self.hi,
            bounds,
            item=self.n * heads if items > 1 else 0,
            head=self.n if heads > 1 else 0,
            block_item=4 * blocks * heads if items > 1 else 0,
            block_head=4 * blocks if heads > 1 else 0,
            inner=self.inner,
        )


def _bounds_by_rows(lo: Tensor, hi: Tensor, n: int, m: int, BM: int, BN: int) -> Tensor:
    """For each block of BM rows, in blocks of BN keys: the first it meets, the full ones, one behind the last."""
    last = torch.arange(BM - 1, n + BM - 1, BM, device=lo.device).clamp_(max=n - 1)  # (blocks,)
    first_lo, first_hi, last_lo, last_hi = lo[..., ::BM], hi[..., ::BM], lo[..., last], hi[..., last]
    some = last_hi > first_lo
    first = torch.where(some, first_lo // BN, 0)
    behind = torch.where(some, (last_hi + BN - 1) // BN, 0)
    return _four(first, (last_lo + BN - 1) // BN, first_hi // BN, behind)


def _bounds_by_keys(lo: Tensor, hi: Tensor, n: int, m: int, BM: int, BN: int) -> Tensor:
    """For each block of BN keys, in blocks of BM rows; both ends of the spans never fall, so rows are found by search."""
    left = torch.arange(0, m, BN, device=lo.device, dtype=torch.int32)  # (blocks,)
    right = (left + BN).clamp_(max=m)
    shape = (*lo.shape[:2], len(left))
    left, right = left.expand(shape).contiguous(), right.expand(shape).contiguous()
    lo, hi = lo.contiguous(), hi.contiguous()
    first = torch.searchsorted(hi, left, right=True)  # the first row with hi > left
    behind = torch.searchsorted(lo, right)  # one behind the last row with lo < right
    full = torch.searchsorted(hi, right)  # the first row with hi ≥ right
    until = torch.searchsorted(lo, left, right=True)  # one behind the last row with lo ≤ left
    some = behind > first
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
