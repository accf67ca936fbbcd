"""Strided: every k-th key, as in sparse transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from regard.masks.arguments import whole
from regard.masks.base import Mask, Span
from regard.masks.index import Index, indices
from regard.masks.span import interval
from regard.masks.tiles import tile_states

__all__ = ["Strided", "strided"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Strided(Mask):
    """Row i sees key j if (i − j) mod step = 0."""

    step: int

    factory: ClassVar[str] = "strided"

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return i % self.step == j % self.step  # one remainder per row and per key, not per pair

    def span(self, i: Tensor, n: int, m: int) -> Span:
        return interval(i, m, i % self.step, m - (m - 1 - i) % self.step, exact=self.step == 1 or self.step >= m)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        least = rows[:-1, None] - cols[1:] + 1  # the smallest i − j in the tile
        most = rows[1:, None] - cols[:-1] - 1
        seen = most // self.step * self.step >= least
        return tile_states(seen, seen if self.step == 1 else seen & (least == most))


def strided(step: int) -> Mask:
    """Let row i see every `step`-th key, counted from i in both directions.

    >>> print(strided(3).picture(5, 5))
    █··█·
    ·█··█
    ··█··
    █··█·
    ·█··█
    """
    return Strided(whole("strided", "step", step, least=1))
