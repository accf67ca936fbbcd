"""A mask of bits for every item and head, over several blocks of 128: each kernel must find the right ones."""

from __future__ import annotations

import torch
from torch import Tensor

import regard


def found(dtype: torch.dtype, backend: str, n: int, m: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 2, n, 8), (2, 1, m, 8), (2, 1, m, 4), (2, n, m))
    q, k, v, bias = (torch.randn(s).to(dtype).requires_grad_() for s in shapes)
    mask = torch.rand(2, 2, n, m) > 0.5
    seen = regard.observe(q, k, v, mask=mask, backend=backend)
    biased = regard.observe(q, k, v, mask=mask, bias=bias, backend=backend)
    grads = torch.autograd.grad(biased.output.sin().sum() + biased.entropy.sum(), (q, k, v, bias))
    late = [seen.map(1, 3), seen.received, seen.gradient_health, seen.top(2)[0]]
    return [x.detach().double() for x in (seen.output, seen.entropy, *late, *grads)]


def test_every_item_and_head_reads_its_own_bits() -> None:
    for x, true in zip(
        found(torch.float32, "triton", 140, 130), found(torch.float64, "reference", 140, 130), strict=True
    ):
        torch.testing.assert_close(x, true, atol=2e-5, rtol=2e-5)


def test_few_queries_read_their_own_bits() -> None:
    for x, true in zip(
        found(torch.float32, "triton", 1, 1030), found(torch.float64, "reference", 1, 1030), strict=True
    ):
        torch.testing.assert_close(x, true, atol=2e-5, rtol=2e-5)
