"""Slices of a mask and of a structured bias: some rows and keys of the whole, or some heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from ..biases import Alibi, Bias, Relative
from ..masks import Mask
from ..masks.base import Span
from ..masks.index import Index

__all__ = ["slice_bias", "slice_bias_heads", "slice_mask"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class _MaskSlice(Mask):
    """A mask of n × m pairs, from (row, key) on."""

    whole: Mask
    n: int
    m: int
    row: int
    key: int

    factory: ClassVar[str] = "slice_mask"

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        return self.whole.allows(i + self.row, j + self.key, self.n, self.m)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        lo, hi, exact = self.whole.span(i + self.row, self.n, self.m)
        return Span((lo - self.key).clamp(0, m), (hi - self.key).clamp(0, m), exact)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        return self.whole.cover(rows + self.row, cols + self.key, self.n, self.m)

    @property
    def monotone(self) -> bool:
        return self.whole.monotone

    @property
    def lead(self) -> tuple[int, int]:
        return self.whole.lead

    @property
    def constant(self) -> bool:
        return self.whole.constant

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        return self._with_parts(lambda part: part.bind(batch, heads, headless))


def slice_mask(whole: Mask, n: int, m: int, row: int, key: int) -> Mask:
    """A mask over n × m pairs, seen from (row, key) on.

    >>> import regard
    >>> print(slice_mask(regard.causal(), 6, 6, 2, 3).picture(3, 3))
    ···
    █··
    ██·
    """
    return _MaskSlice(whole, n, m, row, key)


@final
@dataclass(frozen=True, eq=False)
class _BiasSlice(Bias):
    """A structured bias of n × m pairs, from (row, key) on."""

    whole: Bias
    n: int
    m: int
    row: int
    key: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.whole.tensors

    @property
    def heads(self) -> int:
        return self.whole.heads

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        return self.whole.tile(tensors, i + self.row, j + self.key, self.n, self.m)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, whole=self.whole.to(device))


def slice_bias(whole: Bias, n: int, m: int, row: int, key: int) -> Bias:
    """A structured bias over n × m pairs, seen from (row, key) on; a bias of distances only changes its offset."""
    if isinstance(whole, Alibi | Relative):
        return replace(whole, offset=(m - n if whole.offset is None else whole.offset) + row - key)
    return _BiasSlice(whole, n, m, row, key)


def slice_bias_heads(whole: Bias, table: Tensor, heads: slice) -> Bias | None:
    """The structured bias of some heads, with `table` in place of its own tensor; None if its class is not known."""
    if isinstance(whole, Alibi):
        return replace(whole, slopes=table[heads])
    if isinstance(whole, Relative):
        return replace(whole, table=table[heads] if whole.heads > 1 else table)
    return None
