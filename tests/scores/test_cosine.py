"""Cosines of vectors of any size, zero included."""

from __future__ import annotations

import pytest
import torch

from regard.errors import ArgumentError
from regard.scores import Cosine


def test_a_zero_vector_has_cosine_zero_and_no_gradient() -> None:
    query = torch.randn(2, 4, requires_grad=True)
    key = torch.stack([torch.zeros(4), torch.ones(4)]).requires_grad_()
    logits = Cosine()(query, key)
    assert logits[:, 0].tolist() == [0.0, 0.0]
    gradients = torch.autograd.grad(logits.sum(), (query, key), create_graph=True)
    assert gradients[1][0].tolist() == [0.0] * 4
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (query, key))
    assert all(g.isfinite().all() for g in (*gradients, *second))


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_the_size_of_a_vector_does_not_matter(size: float) -> None:
    query, key = torch.randn(3, 4), torch.randn(5, 4)
    torch.testing.assert_close(Cosine()(query * size, key), Cosine()(query, key))


def test_cosines_stay_within_one_over_the_temperature() -> None:
    x = torch.randn(50, 3)
    assert Cosine(0.07, learnable=True)(x, x).abs().max() <= 1 / 0.07 * (1 + 1e-5)


def test_a_temperature_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Cosine: temperature must be above 0"):
        Cosine(0.0)
