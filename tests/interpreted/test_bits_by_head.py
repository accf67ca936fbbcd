"""A mask of bits for every item and head, over several blocks of 128: each kernel must find the right ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import regard


def agree(look: Callable[..., list[Tensor]], n: int, m: int) -> None:
    """Hold what our kernels find, in the larger tiles of half precision, to what `reference` finds in float64."""
    torch.manual_seed(0)
    shapes = ((2, 2, n, 8), (2, 1, m, 8), (2, 1, m, 4), (2, n, m))
    tensors = [torch.randn(s).half() for s in shapes]
    mask = torch.rand(2, 2, n, m) > 0.5
    found = look(*(x.requires_grad_() for x in tensors), mask, "triton")
    true = look(*(x.detach().double().requires_grad_() for x in tensors), mask, "reference")
    for x, t in zip(found, true, strict=True):
        tolerance = 5e-3 if x.dtype == torch.float16 else 2e-5
        torch.testing.assert_close(x.double(), t, atol=tolerance, rtol=tolerance)


def test_every_item_and_head_reads_its_own_bits() -> None:
    """By every kernel that reads them; without a bias the contract's lists of blocks hold the same."""

    def look(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, backend: str) -> list[Tensor]:
        seen = regard.observe(q, k, v, mask=mask, bias=bias, backend=backend)
        grads = torch.autograd.grad(seen.output.sin().sum() + seen.entropy.sum(), (q, k, v, bias))
        return [seen.output, seen.entropy, seen.map(1, 3), seen.received, seen.gradient_health, seen.top(2)[0], *grads]

    agree(look, 140, 130)


def test_few_queries_read_their_own_bits() -> None:
    """In the forward pass, which alone splits the keys."""

    def look(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, backend: str) -> list[Tensor]:
        seen = regard.observe(q, k, v, mask=mask, backend=backend)
        return [seen.output, seen.lse, seen.entropy, seen.max_logit]

    agree(look, 1, 1030)
