"""Prefix: every row sees the first keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from regard.masks.arguments import one_or_per_item
from regard.masks.base import Mask, Span
from regard.masks.index import Index, expand_to_pairs, indices, per_item
from regard.masks.span import interval

__all__ = ["Prefix", "prefix"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """Every row sees key j if j < length."""

    length: int | Tensor

    factory: ClassVar[str] = "prefix"
    items: ClassVar[dict[str, int]] = {"length": 0}
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return expand_to_pairs(j < per_item(self.length, j), i, j)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        return interval(i, m, 0, per_item(self.length, i))


def prefix(length: int | Tensor | Sequence[int]) -> Mask:
    """Let every row see the first `length` keys: one number, or one per batch item.

    >>> from regard.masks import causal
    >>> print((causal() | prefix(2)).picture(4, 4))
    ██··
    ██··
    ███·
    ████
    """
    return Prefix(one_or_per_item("prefix", "length", length, least=0))
