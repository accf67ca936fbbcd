"""Torch's CPU kernel for small masked problems in compiled graphs: eager mode takes it for them too, and it is faster.

The mask is written out, which is allowed up to a constant number of pairs, and remembered with the mask. A mask
that is a tensor is written out already, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd.engine import MaybeTensors, required
from ..compat.torch import cpu_flash_attention, cpu_flash_attention_backward, fused_sdpa_kernel
from ..core.rows import Rows
from ..masks.dense import Dense
from .engine import ChunkedEngine

__all__ = ["forward", "takes", "vjp"]

_MOST_PAIRS = 2**16
_FLASH = 1  # the number of this kernel where torch chooses one


def takes(engine: ChunkedEngine, x: MaybeTensors) -> bool:
    """Whether the kernel computes this problem, whose tensors are finite."""
    query, key, value, bias, *shared = x
    spec, mask = engine.spec, engine.spec.mask
    if query is None or key is None or value is None or mask is None or bias is not None or shared:
        return False
    if engine.observed or engine.lse_is_read or spec.softcap is not None or spec.dropout:
        return False
    if spec.pairwise or spec.inner != 1:
        return False
    items, heads = mask.lead
    pairs = items * heads * spec.n * spec.m
    laid_out = isinstance(mask, Dense) or pairs <= _MOST_PAIRS
    if not (query.is_cpu and laid_out and pairs and query.numel() and key.shape[-1] == value.shape[-1]):
        return False
    grouped = query.shape[2] != 1
    return fused_sdpa_kernel(query.flatten(1, 2), key, value, None, False, 1.0, grouped) == _FLASH


def forward(engine: ChunkedEngine, x: MaybeTensors) -> Rows:
    """The output and the lse, which is all that the backward pass reads."""
    query, key, value = map(required, x[:3])
    output, lse = cpu_flash_attention(query.flatten(1, 2), key, value, _added(engine, query), False, 1.0)
    output, lse = output.contiguous(), lse.contiguous()
    groups = query.shape[1:3]
    nothing = (torch.zeros_like(lse).unflatten(1, groups) for _ in range(3))
    return Rows(output.unflatten(1, groups), lse.unflatten(1, groups), *nothing)


def vjp(engine: ChunkedEngine, x: MaybeTensors, rows: Rows, g: MaybeTensors) -> Sequence[Tensor | None]:
    """The gradients of query, key and value."""
    if g[1] is not None or g[2] is not None:
        raise RuntimeError("torch's kernel has no gradient of lse and entropy")
    query, key, value = map(required, x[:3])
    grad = torch.zeros_like(rows.output) if g[0] is None else g[0]
    saved = (query.flatten(1, 2), key, value, rows.output.flatten(1, 2), rows.lse.flatten(1, 2))
    dq, dk, dv = cpu_flash_attention_backward(grad.flatten(1, 2), saved, _added(engine, query), False, 1.0)
    return dq.unflatten(1, query.shape[1:3]), dk, dv, *(None for _ in x[3:])


def _added(engine: ChunkedEngine, like: Tensor) -> Tensor:
    """The mask as the kernel adds it: 0 where a row may attend to a key, −inf elsewhere."""
    mask, n, m = engine.spec.mask, engine.spec.n, engine.spec.m
    if mask is None:
        raise RuntimeError("only masked problems come here")

    def make() -> Tensor:
        allowed = mask.dense(n, m, like.device)
        added = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill_(~allowed, -torch.inf)
        return added if added.dim() == 4 else added[None, None]

    kept = (mask.constant or mask.tensors) and n * m <= _MOST_PAIRS
    return mask.remembered(("added", n, m, like.dtype), make) if kept else make()
