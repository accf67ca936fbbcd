"""A temperature is positive, can be learned, and is known from the first call on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError, DtypeError
from regard.scores import Temperature


def vectors(dim: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 2, 3, dim, dtype=torch.float64), torch.randn(1, 2, 5, dim, dtype=torch.float64)


def test_it_starts_at_the_root_of_the_first_dim_and_stays_there() -> None:
    score = Temperature(heads=2)
    assert score.temperature.isnan().all()
    score(*vectors(16))
    assert score.temperature.tolist() == [4.0, 4.0]
    score(*vectors(64))
    assert score.temperature.tolist() == [4.0, 4.0]


def test_at_the_start_it_is_exactly_the_scaled_product() -> None:
    query, key = vectors()
    assert torch.equal(Temperature()(query, key), query / 4 @ key.mT)
    assert torch.equal(Temperature(0.3, learnable=False)(query, key), query / 0.3 @ key.mT)


def test_the_temperature_is_known_after_loading_without_a_call() -> None:
    used = Temperature()
    used(*vectors())
    with torch.no_grad():
        used.log_ratio.add_(1.0)
    fresh = Temperature(init=77.0)
    fresh.load_state_dict(used.state_dict())
    assert fresh.temperature.item() == used.temperature.item()


def test_a_state_saved_before_the_first_call_still_waits_for_it() -> None:
    score = Temperature()
    score(*vectors(64))
    score.load_state_dict(Temperature().state_dict())
    score(*vectors(16))
    assert score.temperature.item() == 4.0


def test_the_first_call_may_be_a_functional_one() -> None:
    score = Temperature()
    query, key = vectors()
    ratio = torch.zeros(())
    gradient = torch.func.grad(lambda r: torch.func.functional_call(score, {"log_ratio": r}, (query, key)).sum())(ratio)
    torch.testing.assert_close(gradient, -(query @ key.mT).sum().float() / 4)
    assert score.temperature.item() == 4.0


def test_no_step_of_an_optimiser_makes_it_negative() -> None:
    score = Temperature(0.1)
    optimiser = torch.optim.SGD(score.parameters(), lr=1.0)
    for _ in range(5):
        optimiser.zero_grad()
        score.temperature.backward()
        optimiser.step()
    assert 0 < score.temperature.item() < 0.1


def test_an_invalid_temperature_is_refused() -> None:
    for init in (0.0, -1.0, float("nan")):
        with pytest.raises(ArgumentError, match="Temperature: init must be"):
            Temperature(init)
    with pytest.raises(DtypeError, match="Temperature: heads must be an integer"):
        Temperature(heads=2.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Temperature: heads must be at least 1"):
        Temperature(heads=0)
