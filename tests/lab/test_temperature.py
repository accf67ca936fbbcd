"""Entropy and temperature."""

from __future__ import annotations

import math

import pytest

from regard.lab import Experiment
from regard.lab.temperature import Temperature

SMALL = {"temperatures": (0.0625, 0.5, 1.0, 4.0, 64.0, 1024.0), "queries": 4}


@pytest.fixture(scope="module")
def found() -> Experiment:
    return Temperature(**SMALL).run()


def test_entropy_rises_between_the_two_limits_by_the_variance_of_the_scores(found: Experiment) -> None:
    assert found.verdict is True
    first, last = found.rows[0], found.rows[-1]
    assert first["entropy"] < 1e-6
    assert last["entropy"] == pytest.approx(math.log(32), abs=1e-4)


@pytest.mark.parametrize("power", [1, 2, 4])
def test_another_power_of_the_temperature_is_refuted(power: int) -> None:
    assert Temperature(**SMALL, power=power).run().verdict is False


def test_temperatures_that_go_down_do_not_raise_the_entropy() -> None:
    study = Temperature(**{**SMALL, "temperatures": (0.0625, 4.0, 1.0, 1024.0)})
    assert study.run().verdict is False


def test_temperatures_that_stay_in_the_middle_are_far_from_the_limits() -> None:
    assert Temperature(**{**SMALL, "temperatures": (1.0, 1024.0)}).run().verdict is False
    assert Temperature(**{**SMALL, "temperatures": (0.0625, 4.0)}).run().verdict is False


def test_each_row_has_its_slope_three_ways(found: Experiment) -> None:
    for row in found.rows[1:]:
        assert row["autograd"] == pytest.approx(row["Var/T^3"], rel=1e-9)
        assert row["differences"] == pytest.approx(row["Var/T^3"], rel=1e-5)


def test_the_mean_is_approached_as_one_over_the_temperature() -> None:
    rows = Temperature(**{**SMALL, "temperatures": (256.0, 1024.0)}).run().rows
    assert rows[0]["from the mean"] / rows[1]["from the mean"] == pytest.approx(4.0, rel=0.05)


def test_it_draws_the_slope_and_the_limits(found: Experiment) -> None:
    left, right = found.figure().axes
    entropy, _, *slopes = left.lines
    assert max(entropy.get_ydata()) < math.log(32)
    assert len(slopes) == 3
    assert len(right.lines) == 2
