"""Strided: every k-th key, as in sparse transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from regard.masks.arguments import offset_like, whole
from regard.masks.base import Mask, Span
from regard.masks.index import Index, diagonal_offset, indices
from regard.masks.span import interval
from regard.masks.tiles import tile_states

__all__ = ["Strided", "strided"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Strided(Mask):
    """Row i sees key j if (i + offset − j) mod step = 0."""

    step: int
    offset: int | Tensor | None = None

    factory: ClassVar[str] = "strided"
    items: ClassVar[dict[str, int]] = {"offset": 0}

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        at = i + diagonal_offset(self.offset, i, n, m)
        return at % self.step == j % self.step  # one remainder per row and per key, not per pair

    def span(self, i: Tensor, n: int, m: int) -> Span:
        at = i + diagonal_offset(self.offset, i, n, m)
        return interval(i, m, at % self.step, m - (m - 1 - at) % self.step, exact=self.step == 1 or self.step >= m)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        if isinstance(self.offset, Tensor):
            return super().cover(rows, cols, n, m)
        at = rows + (m - n if self.offset is None else self.offset)
        least = at[:-1, None] - cols[1:] + 1  # the smallest i + offset − j in the tile
        most = at[1:, None] - cols[:-1] - 1
        seen = most // self.step * self.step >= least
        return tile_states(seen, seen if self.step == 1 else seen & (least == most))


def strided(step: int, offset: int | Tensor | Sequence[int] | None = None) -> Mask:
    """Let row i see every `step`-th key, counted from key i + offset in both directions; `None` aligns the ends.

    >>> print(strided(3).picture(5, 5))
    █··█·
    ·█··█
    ··█··
    █··█·
    ·█··█
    """
    return Strided(whole("strided", "step", step, least=1), offset_like("strided", offset))
