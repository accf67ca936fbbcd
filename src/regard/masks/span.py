"""Span: the interval of keys that a row can see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks.index import broadcast_shapes

__all__ = ["Span", "interval", "true_ends"]


class Span(NamedTuple):
    """Rows see only keys in [lo, hi); if `exact`, they see all of them."""

    lo: Tensor
    hi: Tensor
    exact: bool


def interval(i: Tensor, m: int, lo: int | Tensor, hi: int | Tensor, exact: bool = True) -> Span:
    """Give the span [lo, hi), clamped to the `m` keys, with one entry per row of `i`."""
    low, high = _clamp(lo, i, m), _clamp(hi, i, m)
    shape = broadcast_shapes(i.shape, low.shape, high.shape)
    return Span(low.expand(shape), high.expand(shape), exact)


def true_ends(table: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Give the first True of each row of a bool table (…, m), one past the last, and whether all between are True."""
    seen, m = table.view(torch.uint8), table.shape[-1]
    count = table.sum(-1, dtype=torch.int32)
    lo = torch.where(count > 0, seen.argmax(-1), 0)  # argmax gives the first maximum
    hi = torch.where(count > 0, m - seen.flip(-1).argmax(-1), 0)
    return lo, hi, bool((hi - lo == count).all())


def _clamp(bound: int | Tensor, i: Tensor, m: int) -> Tensor:
    if isinstance(bound, Tensor):
        return bound.clamp(0, m).to(torch.int64)
    return torch.full((), min(max(bound, 0), m), dtype=torch.int64, device=i.device)
