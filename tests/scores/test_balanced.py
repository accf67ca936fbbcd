"""`Balanced` scales both sides alike, so that half precision can hold them and their product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.scores import Balanced, Scaled


def halves(query: float, key: float, dim: int = 256) -> tuple[Tensor, Tensor]:
    return torch.full((1, dim), query, dtype=torch.float16), torch.full((1, dim), key, dtype=torch.float16)


@pytest.mark.parametrize(("dim", "side"), [(1, 1.0), (16, 0.5), (256, 0.25)])
def test_each_side_is_scaled_by_the_fourth_root_of_the_dim(dim: int, side: float) -> None:
    query, key = torch.randn(2, 3, dim), torch.randn(2, 5, dim)
    prepared = Balanced().prepare(query, key)
    assert torch.equal(prepared.query, query * side)
    assert torch.equal(prepared.key, key * side)
    assert prepared.shared == ()


def test_a_sum_that_overflows_float16_unscaled_does_not_overflow() -> None:
    query, key = halves(32.0, 32.0)
    assert (query @ key.mT).isinf().all()
    prepared = Balanced().prepare(query, key)
    assert prepared.query.dtype == prepared.key.dtype == torch.float16
    assert (prepared.query @ prepared.key.mT).item() == 32 * 32 * 256 / 16


@pytest.mark.parametrize("small", ["query", "key"])
def test_neither_side_underflows_in_float16_as_it_would_with_the_whole_scale(small: str) -> None:
    tiny, large = 2.0**-22, 2.0**10
    query, key = halves(tiny, large) if small == "query" else halves(large, tiny)
    assert not (torch.tensor(tiny, dtype=torch.float16) * 256**-0.5).item()
    prepared = Balanced().prepare(query, key)
    assert (prepared.query @ prepared.key.mT).item() == tiny * large * 256 / 16


def test_its_logits_and_its_factor_are_those_of_the_scaled_product() -> None:
    query, key = torch.randn(2, 3, 24), torch.randn(2, 5, 24)
    torch.testing.assert_close(Balanced()(query, key), Scaled()(query, key))
    assert Balanced().factor(query) == pytest.approx(24**-0.5)
