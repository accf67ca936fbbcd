"""Lists: for each row, or for several rows together, the keys that it may see at most."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["NONE", "Lists", "first_times", "in_order", "joined", "narrower"]

NONE = 2**31 - 1
"""The entry of a list that stands for no key; it comes after every key in order."""


class Lists(NamedTuple):
    """Rows see only keys of their list; `rest` says which of those, or is None if they see all of them."""

    entries: Tensor  # int32 (B, H, lists, K): keys or blocks of keys in order, repeated ones too, then NONE
    size: int  # keys of a block; entry e is the keys e · size up to (e + 1) · size
    rows: int  # consecutive rows that share a list
    rest: Any = None  # a mask, or None

    @property
    def width(self) -> int:
        """The number of keys that a list has room for."""
        return self.entries.shape[-1] * self.size

    def and_also(self, mask: Any) -> Lists:
        """The same lists, of which rows see what another mask allows too."""
        return self._replace(rest=mask if self.rest is None else self.rest & mask)


def in_order(entries: Tensor) -> Tensor:
    """Sort the entries of each list, with NONE for −1: int32, contiguous."""
    entries = entries.to(torch.int32)
    return entries.masked_fill(entries < 0, NONE).sort(dim=-1).values


def first_times(entries: Tensor) -> Tensor:
    """Say which entries of sorted lists are keys and no repetition of the one before: bool."""
    fresh = entries != NONE
    fresh[..., 1:] &= entries[..., 1:] != entries[..., :-1]
    return fresh


def narrower(a: Lists | None, b: Lists | None, left: Any, right: Any) -> Lists | None:
    """The lists of the pairs that two masks both allow: those of one of them, and the other mask as the rest."""
    if a is None or (b is not None and b.width < a.width):
        return None if b is None else b.and_also(left)
    return a.and_also(right)


def joined(a: Lists | None, b: Lists | None, either: Any) -> Lists | None:
    """The lists of the pairs that at least one of two masks allows; None if one of them has no lists of this kind."""
    if a is None or b is None or (a.size, a.rows) != (b.size, b.rows) or a.entries.shape[2] != b.entries.shape[2]:
        return None
    lead = [max(x, y) if 0 not in (x, y) else 0 for x, y in zip(a.entries.shape[:2], b.entries.shape[:2], strict=True)]
    if any(size not in (1, whole) for x in (a, b) for size, whole in zip(x.entries.shape[:2], lead, strict=True)):
        return None  # heads in groups of different sizes
    both = torch.cat([x.entries.expand(*lead, -1, -1) for x in (a, b)], -1).sort(dim=-1).values
    return Lists(both, a.size, a.rows, None if a.rest is None and b.rest is None else either)
