"""Causal: no row sees the future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from regard.masks.arguments import offset_like
from regard.masks.base import Mask, Span
from regard.masks.index import Index, diagonal_offset, indices
from regard.masks.span import interval

__all__ = ["Causal", "causal"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """Row i sees key j if j ≤ i + offset."""

    offset: int | Tensor | None = None

    factory: ClassVar[str] = "causal"
    items: ClassVar[dict[str, int]] = {"offset": 0}
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return j <= i + diagonal_offset(self.offset, i, n, m)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        return interval(i, m, 0, i + diagonal_offset(self.offset, i, n, m) + 1)


def causal(offset: int | Tensor | Sequence[int] | None = None) -> Mask:
    """Let row i see the keys up to i + offset; `None` aligns the last row with the last key.

    >>> print(causal().picture(4, 4))
    █···
    ██··
    ███·
    ████
    """
    return Causal(offset_like("causal", offset))
