"""Small inputs of attention, their gradients, and the backends that a test of all of them names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

__all__ = ["every_backend", "gradients", "inputs", "our_backends"]

OURS = ("reference", "chunked")
every_backend = pytest.mark.parametrize("backend", [*OURS, "auto"])
our_backends = pytest.mark.parametrize("backend", OURS)


def inputs(
    *lead: int,
    n: int = 9,
    m: int = 11,
    d: int = 8,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
    seed: int = 0,
) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    lead = lead or (2, 4)
    shapes = (*lead, n, d), (*lead, m, d), (*lead, m, d)
    return [torch.randn(s, generator=made).to(dtype).requires_grad_(grad) for s in shapes]


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return list(torch.autograd.grad(output, leaves, upstream))
