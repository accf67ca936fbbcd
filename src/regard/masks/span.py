"""Span: the interval of keys that a row can see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks.index import joint

__all__ = ["Span", "interval", "true_ends"]


class Span(NamedTuple):
    """Rows see only keys in [lo, hi); if `exact`, they see all of them."""

    lo: Tensor
    hi: Tensor
    exact: bool


def interval(i: Tensor, m: int, lo: int | Tensor, hi: int | Tensor, exact: bool = True) -> Span:
    """Make the span [lo, hi), cut to the `m` keys there are, with one entry for each row of `i`."""
    low, high = _cut(lo, i, m), _cut(hi, i, m)
    shape = joint(i.shape, low.shape, high.shape)
    return Span(low.expand(shape), high.expand(shape), exact)


def true_ends(table: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Give for each row of a bool table (…, m) the first True, one beyond the last, and if all between are True."""
    seen, m = table.view(torch.uint8), table.shape[-1]
    count = table.sum(-1, dtype=torch.int32)
    lo = torch.where(count > 0, seen.argmax(-1), 0)  # argmax gives the first of the largest
    hi = torch.where(count > 0, m - seen.flip(-1).argmax(-1), 0)
    return lo, hi, bool((hi - lo == count).all())


def _cut(bound: int | Tensor, i: Tensor, m: int) -> Tensor:
    if isinstance(bound, Tensor):
        return bound.clamp(0, m).to(torch.int64)
    return torch.full((), min(max(bound, 0), m), dtype=torch.int64, device=i.device)
