"""Everything: the mask that hides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from regard.masks.base import FULL, Mask, Span
from regard.masks.index import Index, expand_to_pairs, indices
from regard.masks.span import interval
from regard.masks.tiles import uniform_cover

__all__ = ["Everything", "everything"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Everything(Mask):
    """Every row sees every key."""

    factory: ClassVar[str] = "everything"
    rising: ClassVar[bool] = True
    trivial: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return expand_to_pairs(torch.ones((), dtype=torch.bool, device=i.device), i, j)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        return interval(i, m, 0, m)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        return uniform_cover(rows, cols, FULL)


def everything() -> Mask:
    """Let every row see every key.

    >>> print((~everything() | everything()).picture(2, 4))
    ████
    ████
    """
    return Everything()
