"""Attention between one piece of rows and one piece of keys: which engine computes it, and from which parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..autograd.engine import Engine, MaybeTensors, Needs
from ..chunked.engine import ChunkedEngine
from ..core.rows import Rows
from ..core.spec import Spec
from ..core.tiling import TileSizes
from ..masks import Mask
from ..masks.base import FULL
from .layout import Piece
from .slices import part_of_bias, part_of_mask

__all__ = ["Blocks", "Strips", "block_bias", "block_spec"]


class Blocks(ABC):
    """A way to compute blocks. Inputs are (query, key, value, bias, …), of this rank's rows and of keys that visit."""

    observed: bool

    @abstractmethod
    def engine(self, row: Piece, key: Piece, state: int) -> Engine:
        """The engine of a block, which is PARTIAL or FULL."""

    @abstractmethod
    def inputs(self, x: MaybeTensors, row: Piece, key: Piece, visitor: Sequence[Tensor]) -> MaybeTensors:
        """The inputs of a block, of those of this rank and the keys and values that visit."""

    def forward(self, x: MaybeTensors, row: Piece, key: Piece, state: int, visitor: Sequence[Tensor]) -> Rows:
        """What a block says of its rows."""
        return self.engine(row, key, state).forward(self.inputs(x, row, key, visitor))

    def vjp(
        self,
        x: MaybeTensors,
        found: Rows,
        g: MaybeTensors,
        needs: Needs,
        row: Piece,
        key: Piece,
        state: int,
        visitor: Sequence[Tensor],
    ) -> Sequence[Tensor | None]:
        """The cotangents of a block's inputs, for what all keys said of its rows and its rows' cotangents."""
        return self.engine(row, key, state).vjp(self.inputs(x, row, key, visitor), found, g, needs)

    def bias(self, bias: Tensor | None, row: Piece, key: Piece) -> Tensor | None:
        """The part of the fourth input that belongs to a block."""
        return block_bias(bias, row, key)


def block_spec(spec: Spec, mask_rows: int | None, row: Piece, key: Piece, state: int) -> Spec:
    """The rule of a block, from one for all rows and keys; a mask of this rank's rows alone says how many these are."""
    mask: Mask | None = spec.mask
    if mask is not None:
        first = row.start if mask_rows is None else row.here
        mask = None if state == FULL else _part(mask, mask_rows or spec.n, spec.m, first, key.start)
    bias = None if spec.bias is None else part_of_bias(spec.bias, spec.n, spec.m, row.start, key.start)
    corner = (row.start, key.start)
    return replace(spec, n=row.size, m=key.size, mask=mask, bias=bias, corner=corner)


def _part(mask: Mask, n: int, m: int, row: int, key: int) -> Mask:
    """A part of a mask; one that is costly to read is remembered, for kernels keep with it what they have read."""
    if mask.constant:
        return part_of_mask(mask, n, m, row, key)
    part: Mask = mask.remembered(("part", n, m, row, key), lambda: part_of_mask(mask, n, m, row, key))
    return part


@dataclass(frozen=True, eq=False)
class Strips(Blocks):
    """Blocks by strips of plain torch, on any device: inputs as in `Canonical`, keys and values in any dtype."""

    spec: Spec  # of all rows and keys
    mask_rows: int | None  # how many rows the mask has, if it has those of this rank alone
    tile_sizes: TileSizes
    observed: bool

    def spec_of(self, row: Piece, key: Piece, state: int) -> Spec:
        """The rule of a block."""
        return block_spec(self.spec, self.mask_rows, row, key, state)

    def engine(self, row: Piece, key: Piece, state: int) -> Engine:
        return ChunkedEngine(self.spec_of(row, key, state), self.tile_sizes, self.observed)

    def inputs(self, x: MaybeTensors, row: Piece, key: Piece, visitor: Sequence[Tensor]) -> MaybeTensors:
        query, _, _, bias, *shared = x
        if query is None:
            raise RuntimeError("a rank has queries")
        k, v = (t.to(query.dtype) for t in visitor)
        return query.narrow(-2, row.here, row.size), k, v, self.bias(bias, row, key), *shared


def block_bias(bias: Tensor | None, row: Piece, key: Piece) -> Tensor | None:
    """The part of a bias tensor (…, rows of this rank | 1, all keys | 1) that belongs to a block."""
    if bias is None:
        return None
    bias = bias if bias.shape[-2] == 1 else bias.narrow(-2, row.here, row.size)
    return bias if bias.shape[-1] == 1 else bias.narrow(-1, key.start, key.size)
