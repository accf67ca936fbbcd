"""Gradients of 65 to 96 dims, and of keys of 129 to 192, on the chip: exact, and the same bits every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from gpu.test_kernels_on_gpu import DEVICE, inputs, same_bits
from regard import biases

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="the Hopper kernels need a GPU of compute capability 9.0"),
]
CASES: dict[str, Any] = {
    "full": dict,
    "causal": lambda: {"mask": regard.causal(), "softcap": 5.0},
    "window": lambda: {"mask": regard.window(170, 9)},
    "padding": lambda: {"mask": regard.padding([1000, 64])},
    "alibi": lambda: {"bias": biases.alibi(torch.linspace(0.1, 0.4, 8, device=DEVICE))},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("d", "dv"), [(72, 72), (96, 96), (136, 72), (192, 128)])
def test_two_chunks_are_exact_and_give_the_same_bits(d: int, dv: int, name: str) -> None:
    q, k, v = inputs(1025, 1150, d, heads=8, kv_heads=4)
    tensors, kwargs = [q, k, v.detach()[..., :dv].contiguous().requires_grad_()], CASES[name]()
    grads = []
    for _ in range(20):
        seen = regard.observe(*tensors, **kwargs, backend="triton")
        grads.append(torch.autograd.grad(seen.output.float().square().sum() + seen.entropy.sum(), tensors))
    assert all(same_bits(list(other), list(grads[0])) for other in grads[1:])
    wide = [x.detach().double().requires_grad_() for x in tensors]
    seen = regard.observe(*wide, **kwargs, backend="chunked")
    for found, true in zip(
        grads[0], torch.autograd.grad(seen.output.square().sum() + seen.entropy.sum(), wide), strict=True
    ):
        assert float((found - true).norm() / true.norm()) < 1e-2
