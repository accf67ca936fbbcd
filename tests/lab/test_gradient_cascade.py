"""Gradients through stacks of attention."""

from __future__ import annotations

import pytest
import torch

from regard import attention
from regard.lab import Experiment
from regard.lab.gradient_cascade import GradientCascade
from regard.softmax import jacobian

SMALL = {"depths": (1, 4, 8), "chains": 16, "stacks": 3, "keys": 32, "dim": 64}


@pytest.fixture(scope="module")
def found() -> Experiment:
    return GradientCascade(**SMALL).run()


def test_a_gradient_passes_through_layers_scaled_by_the_root(found: Experiment) -> None:
    assert found.verdict is True
    assert [row["layers"] for row in found.rows] == [1, 4, 8]


@pytest.mark.parametrize("scaling", ["none", "d"])
def test_another_scaling_is_refuted(scaling: str) -> None:
    assert GradientCascade(**SMALL, scaling=scaling).run().verdict is False


def test_a_chain_that_keeps_its_gradient_unscaled_is_refuted(found: Experiment) -> None:
    study, rows = found.study, found.rows
    assert not study.holds([*rows[:-1], rows[-1] | {"chain, none": rows[0]["chain, none"]}])


def test_a_single_number_has_no_direction_for_a_gradient_to_turn() -> None:
    found = GradientCascade(**{**SMALL, "dim": 1}).run()
    assert found.verdict is False
    assert found.rows[0]["chain, √d"] == pytest.approx(0.0, abs=1e-12)


def test_a_residual_stack_that_keeps_its_gradient_unscaled_is_refuted(found: Experiment) -> None:
    study, rows = found.study, found.rows
    assert study.holds(rows)
    assert not study.holds([*rows[:-1], rows[-1] | {"residual, none": 1.0}])
    assert not study.holds([rows[0] | {"residual, √d": 50.0}, *rows[1:]])


def test_a_layer_of_the_chain_applies_the_jacobian_of_the_softmax() -> None:
    key, value = torch.randn(2, 6, 8, dtype=torch.float64)
    query = torch.randn(1, 8, dtype=torch.float64, requires_grad=True)
    ahead = torch.randn(1, 8, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((attention(query, key, value, scale=0.5) * ahead).sum(), query)
    weights = torch.softmax(query.detach() @ key.mT * 0.5, -1)
    torch.testing.assert_close(gradient, ahead @ value.mT @ jacobian(weights)[0] @ key * 0.5)


def test_it_draws_both_stacks(found: Experiment) -> None:
    left, right = found.figure().axes
    assert left.get_yscale() == right.get_yscale() == "log"
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["unscaled", "divided by √d", "divided by d"]
