"""A survey in one tensor: one is made sooner than a dozen, and cut up when somebody looks."""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .statistics import RowTotals, Survey

__all__ = ["StackedSurvey", "SurveySizes"]

_WORD = 8  # bytes of a number of the tensor
_ALIGNED = 16  # bytes; each part begins at a multiple of them


class _Part(NamedTuple):
    """Where a part of the survey begins in bytes, and what it is."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SurveySizes(NamedTuple):
    """The sizes of a survey; `row_blocks` are the parts of its totals."""

    items: int
    heads: int
    rows: int
    keys: int
    height: int
    width: int
    row_blocks: int

    @property
    def parts(self) -> dict[str, _Part]:
        """Every part by its name in Survey."""
        return _parts(self)[0]

    @property
    def words(self) -> int:
        """How many int64 numbers the whole takes."""
        return _parts(self)[1] // _WORD


@lru_cache
def _parts(sizes: SurveySizes) -> tuple[dict[str, _Part], int]:
    items, heads, rows, keys, height, width, row_blocks = sizes
    of_rows = (items, heads, rows)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "map": ((items, heads, height, width), torch.float32),
        "received": ((items, heads, keys), torch.float32),
        **dict.fromkeys(("health", "distance", "first", "own", "previous", "largest"), (of_rows, torch.float32)),
        **dict.fromkeys(("key", "visible"), (of_rows, torch.int64)),
        "totals": ((items, heads, row_blocks, len(RowTotals._fields)), torch.float32),
        "peaks": ((items, heads, width, 3), torch.float64),
    }
    taken = [-(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for shape, dtype in shapes.values()]
    *begins, size = accumulate(taken, initial=0)
    made = zip(shapes, begins, shapes.values(), strict=True)
    return {name: _Part(begin, shape, dtype) for name, begin, (shape, dtype) in made}, size


class StackedSurvey:
    """A survey whose parts lie in one tensor of int64, as `SurveySizes` has them.

    >>> sizes = SurveySizes(1, 2, 4, 6, 2, 3, 1)
    >>> StackedSurvey(torch.zeros(sizes.words, dtype=torch.int64), sizes).survey.received.shape
    torch.Size([1, 2, 6])
    """

    def __init__(self, memory: Tensor, sizes: SurveySizes) -> None:
        self._memory, self._sizes = memory, sizes

    @cached_property
    def survey(self) -> Survey:
        """The survey, as views."""
        return Survey(**{name: self._view(part) for name, part in self._sizes.parts.items()})

    def _view(self, part: _Part) -> Tensor:
        flat = self._memory if part.dtype == torch.int64 else self._memory.view(part.dtype)
        begin = part.begin // part.dtype.itemsize
        return flat[begin : begin + prod(part.shape)].view(part.shape)
