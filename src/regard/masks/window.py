"""Window: each row sees its neighbourhood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from regard.masks.arguments import offset_like, whole
from regard.masks.base import Mask, Span
from regard.masks.index import Index, diagonal_offset, expand_to_pairs, indices
from regard.masks.span import interval

__all__ = ["Window", "window"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """Row i sees key j if i + offset − left ≤ j ≤ i + offset + right; a side that is `None` has no limit."""

    left: int | None
    right: int | None = 0
    offset: int | Tensor | None = None

    factory: ClassVar[str] = "window"
    items: ClassVar[dict[str, int]] = {"offset": 0}
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        centre = i + diagonal_offset(self.offset, i, n, m)
        seen = torch.ones_like(centre, dtype=torch.bool)
        seen = seen if self.left is None else seen & (j >= centre - self.left)
        return expand_to_pairs(seen if self.right is None else seen & (j <= centre + self.right), i, j)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        centre = i + diagonal_offset(self.offset, i, n, m)
        lo = torch.zeros_like(centre) if self.left is None else centre - self.left
        return interval(i, m, lo, m if self.right is None else centre + self.right + 1)


def window(left: int | None, right: int | None = 0, offset: int | Tensor | Sequence[int] | None = None) -> Mask:
    """Let row i see `left` keys before i + offset, that key, and `right` keys after it; `None` means no limit.

    >>> print(window(1, right=1).picture(5, 5))
    ██···
    ███··
    ·███·
    ··███
    ···██
    """
    return Window(
        None if left is None else whole("window", "left", left, least=0),
        None if right is None else whole("window", "right", right, least=0),
        offset_like("window", offset),
    )
