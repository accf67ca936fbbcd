"""Blocks by our kernels, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..autograd.engine import Engine, MaybeTensors, Needs
from ..biases import Alibi, Relative
from ..core.rows import Rows
from ..core.spec import Spec
from ..kernels.arguments import BIAS_ALIBI, BIAS_NONE, BIAS_RELATIVE, BIAS_TENSOR
from ..kernels.block_mask import block_mask
from ..kernels.engine import Inputs, KernelSpec, TritonEngine
from .blocks import Blocks, block_bias, block_spec
from .layout import Piece

__all__ = ["Tiles", "bias_kind"]


def bias_kind(bias: object) -> int:
    """Which kind of bias kernels take it for."""
    if bias is None:
        return BIAS_NONE
    return BIAS_ALIBI if isinstance(bias, Alibi) else BIAS_RELATIVE if isinstance(bias, Relative) else BIAS_TENSOR


@dataclass(frozen=True, eq=False)
class Tiles(Blocks):
    """Blocks of inputs as in `fusion.Inputs`, without a sink. Rows are (L, H, n, …), and in float32."""

    spec: Spec  # of all rows and keys
    mask_rows: int | None  # how many rows the mask has, if it has those of this rank alone
    kind: int  # of the bias
    scale: float
    observed: bool
    device: torch.device

    def engine(self, row: Piece, key: Piece, state: int) -> Engine:
        spec = block_spec(self.spec, self.mask_rows, row, key, state)
        seen = block_mask(spec.mask, spec.n, spec.m, self.device, spec.inner)
        offset = spec.bias.offset if isinstance(spec.bias, Alibi | Relative) else None
        return TritonEngine(KernelSpec(spec, seen, self.kind, offset or 0, self.scale, self.observed))

    def inputs(self, x: MaybeTensors, row: Piece, key: Piece, visitor: Sequence[Tensor]) -> MaybeTensors:
        query, _, _, bias, *others = x
        if query is None:
            raise RuntimeError("a rank has queries")
        k, v = (t.to(query.dtype) for t in visitor)
        return Inputs(query.narrow(-2, row.here, row.size), k, v, self.bias(bias, row, key), *others)

    def bias(self, bias: Tensor | None, row: Piece, key: Piece) -> Tensor | None:
        return block_bias(bias, row, key) if self.kind == BIAS_TENSOR else bias

    def forward(self, x: MaybeTensors, row: Piece, key: Piece, state: int, visitor: Sequence[Tensor]) -> Rows:
        found = super().forward(x, row, key, state, visitor)
        return found._replace(output=found.output.float())  # what is merged is rounded once, at the end

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
        query = x[0]
        if query is None:
            raise RuntimeError("a rank has queries")
        dO = torch.zeros_like(found.output) if g[0] is None else g[0]
        found = Rows(*(t.contiguous() for t in found))
        return super().vjp(x, found, (dO.to(query.dtype), *g[1:]), needs, row, key, state, visitor)
