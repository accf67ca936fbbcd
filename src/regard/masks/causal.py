"""Causal: no row sees the future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from regard.compat.torch import causal_bias
from regard.masks.arguments import offset_like
from regard.masks.base import Mask, Span
from regard.masks.index import Index, diagonal_offset, indices
from regard.masks.span import interval

__all__ = ["Causal", "causal", "causal_of_torch"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """Row i sees key j if j ≤ i + offset."""

    offset: int | Tensor | None = None
    size: tuple[int, int] | None = None  # the only rows and keys that it fits, if it comes from torch's CausalBias

    factory: ClassVar[str] = "causal"
    items: ClassVar[dict[str, int]] = {"offset": 0}
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return j <= i + diagonal_offset(self.offset, i, n, m)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        return interval(i, m, 0, i + diagonal_offset(self.offset, i, n, m) + 1)

    def misfit(self, n: int, m: int) -> str | None:
        if self.size is None or self.size == (n, m):
            return None
        return f"causal: the CausalBias is for {self.size[0]} rows and {self.size[1]} keys; there are {n} and {m}."


def causal(offset: int | Tensor | Sequence[int] | None = None) -> Mask:
    """Let row i see the keys up to i + offset; `None` aligns the last row with the last key.

    >>> print(causal().picture(4, 4))
    █···
    ██··
    ███·
    ████
    """
    return Causal(offset_like("causal", offset))


def causal_of_torch(x: Tensor) -> Mask | None:
    """Give the mask that a `CausalBias` of torch stands for; None for any other tensor."""
    sizes = causal_bias(x)
    if sizes is None:
        return None
    aligned = sizes.aligns_ends or sizes.rows == sizes.keys
    return Causal(None if aligned else 0, size=(sizes.rows, sizes.keys))
