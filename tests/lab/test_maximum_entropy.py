"""Softmax as the distribution of largest entropy among those with the same mean score."""

from __future__ import annotations

import pytest
import torch

from regard.lab import Experiment
from regard.lab.maximum_entropy import MaximumEntropy
from regard.softmax import stable

SMALL = {"temperatures": (0.5, 2.0), "noises": (0.01, 3.0), "others": 200}


@pytest.fixture(scope="module")
def found() -> Experiment:
    return MaximumEntropy(**SMALL).run()


def test_no_distribution_with_the_same_mean_score_is_as_spread_as_the_softmax(found: Experiment) -> None:
    assert found.verdict
    near, far = found.rows[:2]
    assert 0 < near["least shortfall"] < 1e-3 < 0.1 < far["median shortfall"]


@pytest.mark.parametrize("ratio", [0.5, 0.999, 1.001, 2.0])
def test_a_wrong_temperature_is_refuted(ratio: float) -> None:
    assert not MaximumEntropy(**SMALL, ratio=ratio).run().verdict


def test_each_part_of_the_test_can_fail(found: Experiment) -> None:
    study, (first, *others) = found.study, found.rows
    assert study.holds([first, *others])
    for wrong in ({"least shortfall": 0.0}, {"mean score off by": 1e-6}, {"shortfall − KL": 1e-6}):
        assert not study.holds([first | wrong, *others])


def test_the_largest_entropy_falls_with_the_mean_score_by_1_over_the_temperature() -> None:
    scores, T, step = torch.randn(16, dtype=torch.float64), 0.7, 1e-5
    rows = [stable(scores / (T * factor)) for factor in (1 - step, 1 + step)]
    entropy, mean = ([f(p).item() for p in rows] for f in (lambda p: torch.special.entr(p).sum(), scores.dot))
    assert (entropy[1] - entropy[0]) / (mean[1] - mean[0]) == pytest.approx(-1 / T, rel=1e-6)


def test_with_two_keys_there_is_no_choice() -> None:
    with pytest.raises(ValueError, match="keys of maximum-entropy must be a whole number of at least 3"):
        MaximumEntropy(keys=2).run()


def test_it_draws_the_competitors_below_the_curve(found: Experiment) -> None:
    left, right = found.figure().axes
    *spans, curve = left.lines
    assert all(max(span.get_ydata()) < max(curve.get_ydata()) for span in spans)
    assert len(right.lines) == 2
