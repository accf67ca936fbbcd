"""Attention against kernel regression."""

from __future__ import annotations

import pytest
import torch

from regard import attention
from regard.lab import Experiment
from regard.lab.kernel import Kernel

SMALL = {"queries": 8, "keys": 24}


@pytest.fixture(scope="module")
def found() -> Experiment:
    return Kernel(**SMALL).run()


def test_attention_is_kernel_regression_and_gaussian_is_dot_product_for_unit_keys(found: Experiment) -> None:
    assert found.verdict is True
    assert [row["differ by"] < 1e-13 for row in found.rows] == [True] * 5 + [False] * 5 + [True] * 2


@pytest.mark.parametrize("spread", [0.001, 0.1, 0.5])
def test_keys_of_different_norms_make_the_kernels_differ(spread: float) -> None:
    assert Kernel(**SMALL, spread=spread).run().verdict is False


def test_a_small_spread_makes_the_kernels_differ_in_proportion(found: Experiment) -> None:
    gaps = {row["spread"]: row["differ by"] for row in found.rows if row["beside"] == "dot product"}
    assert gaps[0.01] / gaps[0.001] == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize("row", [0, 3, 10, 11])
def test_an_identity_that_fails_is_refuted(found: Experiment, row: int) -> None:
    rows = [*found.rows[:row], found.rows[row] | {"differ by": 1e-9}, *found.rows[row + 1 :]]
    assert found.study.holds(found.rows)
    assert not found.study.holds(rows)


def test_keys_of_different_norms_that_make_no_difference_are_refuted(found: Experiment) -> None:
    rows = [row | {"differ by": 1e-16} if row["spread"] == 0.3 else row for row in found.rows]
    assert not found.study.holds(rows)


def test_regression_of_equal_keys_gives_the_mean_of_their_values() -> None:
    value = torch.randn(5, 2, dtype=torch.float64)
    output = attention(torch.randn(3, 4, dtype=torch.float64), torch.ones(5, 4, dtype=torch.float64), value)
    torch.testing.assert_close(output, value.mean(0).expand(3, 2))


def test_it_draws_the_curve_and_the_differences(found: Experiment) -> None:
    left, right = found.figure().axes
    points, line, dots = left.lines
    assert len(points.get_xdata()) == 40
    assert dots.get_ydata().tolist() == pytest.approx(line.get_ydata()[::4].tolist(), abs=1e-12)
    assert right.get_yscale() == "log"
