"""Blocks: the sequence in blocks of one size, each of which sees only itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from regard.masks.arguments import offset_like, whole
from regard.masks.base import Mask, Span
from regard.masks.index import Index, diagonal_offset, indices
from regard.masks.span import interval

__all__ = ["Blocks", "blocks"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    """Row i sees key j if (i + offset) // size = j // size."""

    size: int
    offset: int | Tensor | None = None

    factory: ClassVar[str] = "blocks"
    items: ClassVar[dict[str, int]] = {"offset": 0}
    rising: ClassVar[bool] = True

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return (i + diagonal_offset(self.offset, i, n, m)) // self.size == j // self.size

    def span(self, i: Tensor, n: int, m: int) -> Span:
        start = (i + diagonal_offset(self.offset, i, n, m)) // self.size * self.size
        return interval(i, m, start, start + self.size)


def blocks(size: int, offset: int | Tensor | Sequence[int] | None = None) -> Mask:
    """Let tokens see those in the same block of `size` tokens: row i is at key i + offset; `None` aligns the ends.

    >>> print(blocks(2).picture(5, 5))
    ██···
    ██···
    ··██·
    ··██·
    ····█

    A row that is decoded alone sees the last block:

    >>> print(blocks(2).picture(1, 6))
    ····██
    """
    return Blocks(whole("blocks", "size", size, least=1), offset_like("blocks", offset))
