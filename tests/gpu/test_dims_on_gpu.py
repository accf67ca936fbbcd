"""Heads of 64 to 576 dims on the chip: exact, and the same bits every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
    "bits by head": lambda: {
        "mask": torch.rand(8, 1025, 1150, generator=torch.Generator().manual_seed(4)).to(DEVICE) < 0.7
    },
    "alibi": lambda: {"bias": biases.alibi(torch.linspace(0.1, 0.4, 8, device=DEVICE))},
}


# One chunk of columns, two chunks, keys of 192 dims, the wide kernel, and the portable backward of the widest.
DIMS = [(64, 64), (72, 72), (96, 96), (128, 128), (136, 72), (192, 128), (256, 256), (512, 512), (576, 512)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("d", "dv"), DIMS)
def test_all_dims_are_exact_and_give_the_same_bits_a_hundred_times(d: int, dv: int, name: str) -> None:
    q, k, v = inputs(1025, 1150, max(d, dv), heads=8, kv_heads=4)
    tensors = [x.detach()[..., :size].contiguous().requires_grad_() for x, size in ((q, d), (k, d), (v, dv))]
    kwargs = CASES[name]()

    def results(backend: str, given: list[Tensor]) -> list[Tensor]:
        seen = regard.observe(*given, **kwargs, backend=backend)
        loss = seen.output.to(torch.promote_types(torch.float32, seen.output.dtype)).square().sum() + seen.entropy.sum()
        grads = torch.autograd.grad(loss, given) if d <= 512 else ()
        return [seen.output.detach(), seen.lse.detach(), seen.entropy.detach(), *grads]

    first = results("triton", tensors)
    assert all(same_bits(results("triton", tensors), first) for _ in range(100))
    true = results("chunked", [x.detach().double().requires_grad_() for x in tensors])
    for x, y in zip(first, true, strict=True):
        assert float((x - y).norm() / y.norm()) < 1e-2
