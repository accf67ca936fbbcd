"""The example (20, 22, 18, 21), and the Jacobian of the softmax as scores grow."""

from __future__ import annotations

import math

import pytest
import torch

from regard.lab import Experiment
from regard.lab.saturation import Saturation
from regard.softmax import stable

SMALL = {"queries": 16, "keys": 32, "sizes": (0.25, 1.0, 4.0, 16.0, 64.0)}
PRINTED = (0.018, 0.731, 0.002, 0.249)


@pytest.fixture(scope="module")
def found() -> Experiment:
    return Saturation(**SMALL).run()


def test_large_scores_saturate_and_the_example_is_what_arithmetic_gives(found: Experiment) -> None:
    assert found.verdict is True
    example, printed, scaled = found.rows[:3]
    assert example["weights"] == "0.089 0.657 0.012 0.242"
    assert scaled["weights"] == "0.247 0.270 0.226 0.258"
    assert printed["claimed"] == "0.018 0.731 0.002 0.249"
    assert printed["off by"] == pytest.approx(0.731 - 1 / (1 + math.exp(-1) + math.exp(-2) + math.exp(-4)), abs=1e-9)


def test_the_decimals_that_texts_print_are_refuted() -> None:
    assert Saturation(**SMALL, claimed=PRINTED).run().verdict is False
    assert Saturation(**SMALL, claimed_scaled=(0.25, 0.25, 0.25, 0.25)).run().verdict is False


def test_one_digit_off_by_one_is_refuted() -> None:
    assert Saturation(**SMALL, claimed=(0.090, 0.657, 0.012, 0.242)).run().verdict is False


def test_no_factor_before_the_softmax_gives_what_texts_print() -> None:
    factors = torch.linspace(0.0, 8.0, 4001, dtype=torch.float64)[:, None]
    weights = stable(torch.tensor([20.0, 22.0, 18.0, 21.0], dtype=torch.float64) * factors)
    off = (weights - torch.tensor(PRINTED, dtype=torch.float64)).abs().amax(-1)
    assert off.min() > 0.04


def test_scores_that_are_small_to_begin_with_do_not_saturate() -> None:
    halved = tuple(stable(torch.tensor([10.0, 11.0, 9.0, 10.5])).tolist())
    found = Saturation(**SMALL, dim=4, claimed_scaled=halved).run()
    assert found.rows[2]["off by"] < 1e-6
    assert found.verdict is False


def test_near_uniform_the_jacobian_has_norm_1_over_m() -> None:
    rows = Saturation(sizes=(1e-6,), queries=4, keys=32).run().rows
    assert rows[3]["norm of J"] == pytest.approx(1 / 32, rel=1e-4)
    assert rows[3]["trace of J"] == pytest.approx(1 - 1 / 32, rel=1e-4)


def test_a_jacobian_that_does_not_fall_is_refuted(found: Experiment) -> None:
    study, rows = found.study, found.rows
    assert study.holds(rows)
    *before, last, peak = rows
    assert not study.holds([*before, last | {"trace of J": 1.0}, peak])
    assert not study.holds([*before, last | {"norm of J": 0.5}, peak])


def test_the_diagonal_of_the_jacobian_is_largest_where_the_weight_is_a_half(found: Experiment) -> None:
    peak = found.rows[-1]
    assert (peak["largest diagonal of J"], peak["its weight"]) == pytest.approx((0.25, 0.5), abs=5e-3)
    for wrong in (1 / 32, 0.49, 1.0):
        assert not Saturation(**SMALL, claimed_peak=wrong).run().verdict
    assert not found.study.holds([*found.rows[:-1], peak | {"largest diagonal of J": 0.3}])


def test_it_draws_the_example_and_the_jacobian(found: Experiment) -> None:
    left, right = found.figure().axes
    assert len(left.patches) == 12
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["trace Σ p(1 − p)", "norm"]


def test_its_rows_without_a_claim_are_plain_json(found: Experiment) -> None:
    rows = found.to_object()["rows"]
    assert rows[3]["off by"] is None
    assert rows[0]["off by"] < 5e-4
