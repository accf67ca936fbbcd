"""A score inside torch.func.functional_call uses the parameters of the call, and these get its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import regard
from attention_inputs import every_backend, gradients, inputs
from score_cases import SCORES


@pytest.mark.parametrize("name", ["scaled", "cosine", "bilinear", "additive", "gaussian", "temperature"])
@every_backend
def test_a_score_works_in_a_functional_call_with_gradients_of_its_parameters(name: str, backend: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = SCORES[name]()

        def forward(self, *tensors: Tensor) -> Tensor:
            return regard.attention(*tensors, score=self.score, backend=backend)

    torch.manual_seed(0)
    layer, tensors = Layer(), inputs()
    layer(*tensors)
    other = {key: torch.rand_like(p).requires_grad_() for key, p in layer.named_parameters()}
    found = torch.func.functional_call(layer, other, tuple(tensors))
    got = gradients(found, list(other.values()))
    with torch.no_grad():
        for key, p in layer.named_parameters():
            p.copy_(other[key])
    expected = layer(*tensors)
    torch.testing.assert_close(found, expected)
    for a, b in zip(got, gradients(expected, list(layer.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
