"""The kernels for rows with lists of keys: they agree with `chunked`, which gathers the keys in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels.portable import chosen_launch
from regard.masks import Mask


def lists(*shape: int, below: int) -> Tensor:
    return torch.randint(-1, below, shape, generator=torch.Generator().manual_seed(7))


def inputs(query_heads: int, key_heads: int, n: int, m: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    sizes = ((query_heads, n, 8), (key_heads, m, 8), (key_heads, m, 4))
    return [torch.randn(1, *size, generator=made) for size in sizes]


def gradients(x: list[Tensor], mask: Mask, backend: str, **options: Any) -> list[Tensor]:
    """Output, lse, entropy, received, top keys, and what a loss of the first three gives to the inputs."""
    x = [t.clone().requires_grad_() for t in x]
    torch.manual_seed(0)
    seen = regard.observe(*x, mask=mask, backend=backend, **options)
    lse = torch.where(seen.lse > -torch.inf, seen.lse, 0.0)
    loss = (seen.output * torch.arange(seen.output.numel()).view(seen.output.shape).cos()).sum()
    loss = loss + (lse * 0.3).square().sum() + seen.entropy.sin().sum()
    return [seen.output, lse, seen.entropy, seen.received, *seen.top(4), *torch.autograd.grad(loss, x)]


CASES: dict[str, tuple[tuple[int, int, int, int], Mask, dict[str, Any]]] = {
    "one list for all heads, in two tiles": ((17, 1, 3, 9), regard.chosen(lists(3, 6, below=9)), {}),
    "lists by key head, beside a causal mask": (
        (4, 2, 5, 9),
        regard.chosen(lists(1, 2, 5, 6, below=9)) & regard.causal(),
        {"softcap": 2.0},
    ),
    "lists by query head, with dropout": ((2, 1, 4, 9), regard.chosen(lists(2, 4, 5, below=9)), {"dropout": 0.4}),
    "blocks of keys for several rows, in two tiles": (
        (4, 1, 11, 13),
        regard.chosen(lists(2, 2, below=5), size=3, rows=8) & regard.window(6),
        {"sink": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_gathered_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, mask, options = CASES[name]
    monkeypatch.setattr(chosen_launch, "_MOST_ROWS", 16)
    monkeypatch.setattr(chosen_launch, "_BUFFER", 2**12)  # several chunks of lists
    x = inputs(*sizes)
    ours, gathered = (gradients(x, mask, backend, **options) for backend in ("triton", "chunked"))
    for found, wanted in zip(ours, gathered, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
