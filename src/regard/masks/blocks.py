"""Blocks: the sequence in blocks of one size, each of which sees only itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from regard.masks.arguments import whole
from regard.masks.base import Mask, Span
from regard.masks.index import Index, indices
from regard.masks.span import interval

__all__ = ["Blocks", "blocks"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    """Row i sees key j if i // size = j // size."""

    size: int

    factory: ClassVar[str] = "blocks"
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return i // self.size == j // self.size

    def span(self, i: Tensor, n: int, m: int) -> Span:
        start = i // self.size * self.size
        return interval(i, m, start, start + self.size)


def blocks(size: int) -> Mask:
    """Let tokens see those in the same block of `size` tokens.

    >>> print(blocks(2).picture(5, 5))
    ██···
    ██···
    ··██·
    ··██·
    ····█
    """
    return Blocks(whole("blocks", "size", size, least=1))
