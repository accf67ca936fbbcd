"""Blocks computed by our Triton kernels, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..autograd.engine import Engine, MaybeTensors, Needs, required
from ..biases import Alibi, Relative
from ..core.rows import Rows
from ..core.spec import Spec
from ..kernels.arguments import BIAS_ALIBI, BIAS_NONE, BIAS_RELATIVE, BIAS_TENSOR
from ..kernels.block_mask import block_mask
from ..kernels.engine import TritonEngine
from .blocks import Block, BlockAttention, block_bias, block_spec

__all__ = ["TritonBlockAttention", "bias_kind"]


def bias_kind(bias: object) -> int:
    """The kernels' constant for this kind of bias."""
    if bias is None:
        return BIAS_NONE
    return BIAS_ALIBI if isinstance(bias, Alibi) else BIAS_RELATIVE if isinstance(bias, Relative) else BIAS_TENSOR


@dataclass(frozen=True, eq=False)
class TritonBlockAttention(BlockAttention):
    """Blocks of inputs as in `kernels.engine.Inputs`, without a sink. Rows are (L, H, n, …), in float32."""

    spec: Spec  # of all rows and keys
    local_mask_rows: int | None
    bias_kind: int
    scale: float
    observed: bool
    device: torch.device

    def engine(self, block: Block) -> Engine:
        spec = block_spec(self.spec, self.local_mask_rows, block)
        tiles = block_mask(spec.mask, spec.n, spec.m, self.device, spec.inner)
        offset = spec.bias.offset if isinstance(spec.bias, Alibi | Relative) else None
        return TritonEngine(spec, tiles, self.bias_kind, offset or 0, self.scale, self.observed)

    def bias(self, bias: Tensor | None, block: Block) -> Tensor | None:
        return block_bias(bias, block.rows, block.keys) if self.bias_kind == BIAS_TENSOR else bias

    def forward(self, x: MaybeTensors, block: Block, kv: Sequence[Tensor]) -> Rows:
        rows = super().forward(x, block, kv)
        entropy = torch.zeros_like(rows.lse) if rows.entropy is None else rows.entropy
        return rows._replace(output=rows.output.float(), entropy=entropy)  # merged in float32, rounded once at the end

    def vjp(
        self, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs, block: Block, kv: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        dO, *d_statistics = g
        dO = torch.zeros_like(rows.output) if dO is None else dO
        rows = Rows(*(t.contiguous() for t in rows))
        return super().vjp(x, rows, (dO.to(required(x[0]).dtype), *d_statistics), needs, block, kv)
