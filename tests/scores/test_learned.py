"""Bilinear, additive and Gaussian: their initial values, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from regard.errors import ArgumentError, DtypeError
from regard.scores import Additive, Bilinear, Gaussian


def test_inputs_of_variance_one_give_logits_of_the_order_of_one() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(200, 48), torch.randn(200, 32)
    assert 0.8 < Bilinear(48, 32)(query, key).std() < 1.2
    assert 0.4 < Additive(48, 32, hidden=64)(query, key).std() < 1.0


def test_the_gaussian_score_makes_attention_kernel_regression() -> None:
    x, y = torch.linspace(0, 1, 9)[:, None], torch.linspace(0, 1, 7)[:, None]
    weights = torch.exp(-((y - x.mT) ** 2) / (2 * 0.1**2))
    torch.testing.assert_close(torch.softmax(Gaussian(0.1)(y, x), -1), weights / weights.sum(-1, keepdim=True))


def test_the_gaussian_score_is_not_above_zero_beyond_rounding() -> None:
    x = torch.randn(20, 8)
    logits = Gaussian(1.0)(x, x)
    assert logits.max() < 1e-5
    assert logits.diagonal().abs().max() < 1e-5


def test_invalid_sizes_and_bandwidths_are_refused() -> None:
    with pytest.raises(ArgumentError, match="Bilinear: key_dim must be at least 1"):
        Bilinear(2, 0)
    with pytest.raises(DtypeError, match="Additive: hidden must be an integer"):
        Additive(2, 2, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Gaussian: bandwidth must be above 0"):
        Gaussian(-1.0)
