"""Which keys each row sees, as one interval per row or two that do not overlap."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..compat.torch import is_traced, lacks_values, transforms_are_active
from ..core.spec import Spec
from ..core.tiling import Tile
from ..masks import Mask
from ..masks.base import And, Not, Or, Span

__all__ = ["Intervals", "intervals_of"]


class Intervals(NamedTuple):
    """Row i sees keys j with lo[i] ≤ j < hi[i]; int32, which is compared twice as fast as int64."""

    lo: Tensor  # (N, 1)
    hi: Tensor
    keys: Tensor  # (M,)

    def visible(self, tile: Tile) -> Tensor:
        """Which pairs of a tile are visible: bool (r, c)."""
        rows, cols = tile.rows, tile.cols
        return self.between(rows.start, rows.stop - rows.start, cols.start, cols.stop - cols.start)

    def at(self, row: int, height: int, key: int, width: int) -> Intervals:
        """Those of so many rows and keys from these on, counted from the first of them."""
        lo, hi = (end.narrow(0, row, height) - key for end in (self.lo, self.hi))
        return Intervals(lo, hi, self.keys[:width].clone())

    def between(self, row: int, height: int, key: int, width: int) -> Tensor:
        """Which of so many keys, from `key` on, each of so many rows, from `row` on, sees."""
        keys = self.keys.narrow(0, key, width)
        return (keys >= self.lo.narrow(0, row, height)).bitwise_and_(keys < self.hi.narrow(0, row, height))


@torch.no_grad()
def intervals_of(spec: Spec) -> tuple[Intervals, ...]:
    """The keys of every row as one interval or two, if all items and heads see the same; none if rows see others."""
    mask = spec.mask
    if mask is None or mask.lead != (1, 1) or transforms_are_active() or is_traced() or lacks_values(*mask.tensors):
        return ()
    if any(t.device.type != "cpu" or t.numel() > spec.n + spec.m for t in mask.tensors):  # a table is read tile by tile
        return ()
    spec.check_unchanged()
    rows = torch.arange(spec.n, device="cpu")
    keys = torch.arange(spec.m, dtype=torch.int32, device="cpu")
    ends = [
        [end.to(torch.int32).reshape(-1, 1).expand(spec.n, 1) for end in (span.lo, span.hi)]
        for span in _spans(mask, rows, spec.n, spec.m)
    ]
    return tuple(Intervals(lo, hi, keys) for lo, hi in ends)


def _spans(mask: Mask, i: Tensor, n: int, m: int) -> tuple[Span, ...]:
    """One span or two, exact and without a common key; none if the mask is not known to have them."""
    whole = mask.span(i, n, m)
    if whole.exact:
        return (whole,)
    if isinstance(mask, Not):
        part = mask.part.span(i, n, m)
        return _outside(part, m) if part.exact else ()
    if isinstance(mask, Or):
        a, b = mask.left.span(i, n, m), mask.right.span(i, n, m)
        return _union(a, b) if a.exact and b.exact else ()
    if isinstance(mask, And):
        left, right = _spans(mask.left, i, n, m), _spans(mask.right, i, n, m)
        return tuple(_common(x, y) for x in left for y in right) if 1 in (len(left), len(right)) else ()
    return ()


def _common(a: Span, b: Span) -> Span:
    return Span(torch.maximum(a.lo, b.lo), torch.minimum(a.hi, b.hi), True)


def _outside(a: Span, m: int) -> tuple[Span, Span]:
    """The keys before a span and those behind it; all of them before, where it is empty."""
    empty = a.hi <= a.lo
    start, stop = torch.zeros_like(a.lo), torch.full_like(a.hi, m)
    return Span(start, a.lo.masked_fill(empty, m), True), Span(a.hi.masked_fill(empty, m), stop, True)


def _union(a: Span, b: Span) -> tuple[Span, Span]:
    """The keys of two spans, the first keys in the first; where the spans meet, it has them all."""
    no_a, no_b = a.hi <= a.lo, b.hi <= b.lo
    meet = ~no_a & ~no_b & (a.lo <= b.hi) & (b.lo <= a.hi)
    a_first = no_b | ~no_a & (a.lo <= b.lo)
    lo, hi = torch.where(a_first, a.lo, b.lo), torch.where(a_first, a.hi, b.hi)
    rest, end = torch.where(a_first, b.lo, a.lo), torch.where(a_first, b.hi, a.hi)
    first = Span(lo, torch.where(meet, torch.maximum(hi, end), hi), True)
    return first, Span(rest.masked_fill(meet, 0), end.masked_fill(meet, 0), True)
