"""Attention of one range of rows to one range of keys: the engine that computes it, and its inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ..autograd.engine import Engine, MaybeTensors, Needs, required
from ..chunked.engine import ChunkedEngine
from ..core.rows import Rows
from ..core.spec import Spec
from ..core.tiling import TileSizes
from ..masks import Mask
from ..masks.base import FULL
from .layout import TokenRange
from .slices import slice_bias, slice_mask

__all__ = ["Block", "BlockAttention", "ChunkedBlockAttention", "block_bias", "block_spec"]


class Block(NamedTuple):
    """Some rows and some keys of the whole problem."""

    rows: TokenRange
    keys: TokenRange
    state: int  # PARTIAL or FULL


class BlockAttention(ABC):
    """Computes blocks. `x` is (query, key, value, bias, …) of this rank; `kv` are the keys and values of the block."""

    spec: Spec  # of all rows and keys
    observed: bool

    @abstractmethod
    def engine(self, block: Block) -> Engine:
        """The engine that computes a block."""

    def inputs(self, x: MaybeTensors, block: Block, kv: Sequence[Tensor]) -> MaybeTensors:
        """The engine's inputs for a block."""
        query, rows = required(x[0]), block.rows
        key, value = (t.to(query.dtype) for t in kv)
        return query.narrow(-2, rows.local_start, rows.size), key, value, self.bias(x[3], block), *x[4:]

    def forward(self, x: MaybeTensors, block: Block, kv: Sequence[Tensor]) -> Rows:
        """The partial rows of a block."""
        return self.engine(block).forward(self.inputs(x, block, kv))

    def vjp(
        self, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs, block: Block, kv: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The cotangents of a block's inputs; `rows` are the merged rows over all keys, and `g` their cotangents."""
        return self.engine(block).vjp(self.inputs(x, block, kv), rows, g, needs)

    def bias(self, bias: Tensor | None, block: Block) -> Tensor | None:
        """The part of the bias input, or of its gradient, that belongs to a block."""
        return block_bias(bias, block.rows, block.keys)


def block_spec(spec: Spec, local_mask_rows: int | None, block: Block) -> Spec:
    """The spec of a block, from that of all rows and keys; `local_mask_rows` as in `GroupCall`."""
    rows, keys, state = block
    mask: Mask | None = spec.mask
    if mask is not None:
        first = rows.start if local_mask_rows is None else rows.local_start
        mask = None if state == FULL else _cached_slice(mask, local_mask_rows or spec.n, spec.m, first, keys.start)
    bias = None if spec.bias is None else slice_bias(spec.bias, spec.n, spec.m, rows.start, keys.start)
    return replace(spec, n=rows.size, m=keys.size, mask=mask, bias=bias, corner=(rows.start, keys.start))


def _cached_slice(mask: Mask, n: int, m: int, row: int, key: int) -> Mask:
    """A slice of a mask; unless the mask is constant, it is cached, because kernels store their block masks with it."""
    if mask.constant:
        return slice_mask(mask, n, m, row, key)
    return mask.remembered(("slice", n, m, row, key), lambda: slice_mask(mask, n, m, row, key))


@dataclass(frozen=True, eq=False)
class ChunkedBlockAttention(BlockAttention):
    """Blocks in plain torch, on any device: inputs as in `FoldedProblem`, keys and values in any dtype."""

    spec: Spec  # of all rows and keys
    local_mask_rows: int | None
    tile_sizes: TileSizes
    observed: bool

    def spec_of(self, block: Block) -> Spec:
        """The spec of a block."""
        return block_spec(self.spec, self.local_mask_rows, block)

    def engine(self, block: Block) -> Engine:
        return ChunkedEngine(self.spec_of(block), self.tile_sizes, self.observed)


def block_bias(bias: Tensor | None, rows: TokenRange, keys: TokenRange) -> Tensor | None:
    """The part of a bias tensor (…, rows of this rank | 1, all keys | 1) that belongs to a block."""
    if bias is None:
        return None
    bias = bias if bias.shape[-2] == 1 else bias.narrow(-2, rows.local_start, rows.size)
    return bias if bias.shape[-1] == 1 else bias.narrow(-1, keys.start, keys.size)
