"""What it takes to pose calls of other libraries: their masks as numbers, and their functions of single indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..compat.torch import tensor_indices_in_vmap
from ..masks.index import broadcast_shapes

__all__ = ["vmapped", "with_infinities"]


def with_infinities(bias: Tensor) -> Tensor:
    """Replace the lowest finite numbers, which many models use for −inf, by −inf in rows that see something."""
    lowest = bias <= torch.finfo(bias.dtype).min / 2
    return torch.where(lowest & ~lowest.all(-1, keepdim=True), -torch.inf, bias)


def vmapped(function: Callable[..., Tensor], *indices: Tensor) -> Tensor:
    """Apply a function of single indices, such as a mask_mod or a score_mod, to many at once."""
    shape = broadcast_shapes(*(x.shape for x in indices))
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.bool, device=indices[0].device)
    with tensor_indices_in_vmap():
        found: Tensor = torch.vmap(function)(*(x.expand(shape).flatten() for x in indices))
    return found.reshape(shape)
