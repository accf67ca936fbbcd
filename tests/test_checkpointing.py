"""Activation checkpointing gives the same gradients, with dropout and with statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from attention_inputs import every_backend, gradients, inputs, our_backends


@every_backend
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_checkpoint_gives_the_same_gradients(backend: str, reentrant: bool, dropout: float) -> None:
    def attend(*leaves: Tensor) -> Tensor:
        hidden = regard.attention(*leaves, mask=regard.causal(), dropout=dropout, backend=backend)
        return regard.attention(hidden, *leaves[1:], dropout=dropout, backend=backend)

    tensors = inputs(grad=True)
    torch.manual_seed(3)
    expected = attend(*tensors)
    wanted = gradients(expected, tensors)
    torch.manual_seed(3)
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = checkpoint(attend, *leaves, use_reentrant=reentrant)
    torch.manual_seed(999)
    found.backward(torch.randn(found.shape, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(found, expected)
    for x, y in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(x.grad, y)


@our_backends
def test_a_checkpoint_of_statistics_gives_the_same_gradients(backend: str) -> None:
    def look(*leaves: Tensor) -> Tensor:
        seen = regard.observe(*leaves, backend=backend)
        return seen.output.sum(-1) + seen.entropy + seen.lse

    tensors = inputs(grad=True)
    wanted = gradients(look(*tensors), tensors)
    found = gradients(checkpoint(look, *tensors, use_reentrant=False), tensors)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)
