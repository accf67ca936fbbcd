"""The variance of scores, and what each scaling leaves of it."""

from __future__ import annotations

import math

import pytest
import torch

from regard.lab import Experiment
from regard.lab.variance import Variance

SMALL = {"dims": (16, 64, 256), "draws": 10_000}


@pytest.fixture(scope="module")
def found() -> Experiment:
    return Variance(**SMALL).run()


def test_the_variance_is_d_and_after_division_by_the_root_it_is_1(found: Experiment) -> None:
    assert found.verdict is True
    moments = found.rows[:3]
    assert [row["d"] for row in moments] == [16, 64, 256]
    for row in moments:
        assert row["variance, none"] == pytest.approx(row["d"], rel=0.05)
        assert row["variance, √d"] == pytest.approx(1.0, rel=0.05)
        assert row["variance, d"] == pytest.approx(1 / row["d"], rel=0.05)


@pytest.mark.parametrize("scaling", ["none", "d"])
def test_another_scaling_is_refuted(scaling: str) -> None:
    assert Variance(**SMALL, scaling=scaling).run().verdict is False


def test_the_gradient_of_a_score_by_the_query_is_the_key(found: Experiment) -> None:
    query, key = torch.randn(2, 8, 64).unbind()
    query.requires_grad_()
    (gradient,) = torch.autograd.grad((query * key).sum() / 8, query)
    torch.testing.assert_close(gradient, key / 8)
    for row in found.rows[:3]:
        assert row["gradient², none"] == pytest.approx(row["d"], rel=0.05)
        assert row["gradient², √d"] == pytest.approx(1.0, rel=0.05)


def test_scores_of_variance_1_leave_the_entropy_half_a_nat_below_uniform() -> None:
    row = Variance(dims=(256,), draws=1000, keys=1024).run().rows[0]
    assert row["entropy share, √d"] * math.log(1024) == pytest.approx(math.log(1024) - 0.5, abs=0.1)
    assert row["entropy share, none"] < 0.2
    assert row["entropy share, d"] > 0.99


def test_95_percent_of_scaled_scores_are_within_2(found: Experiment) -> None:
    for row in found.rows[3:6]:
        assert row["±2σ, none"] == pytest.approx(2 * math.sqrt(row["d"]), rel=0.05)
        assert row["±2σ, √d"] == pytest.approx(2.0, rel=0.05)
        assert row["within ±2, √d"] == pytest.approx(0.954, abs=0.01)
    study, rows = found.study, found.rows
    assert not study.holds([*rows[:3], rows[3] | {"within ±2, √d": 0.9}, *rows[4:]])


def test_the_scores_of_a_model_have_the_size_of_its_heads_and_not_of_its_width(found: Experiment) -> None:
    models = {row["model"]: row for row in found.rows[6:]}
    assert models["GPT-2"]["σ, unscaled"] == pytest.approx(8.0, rel=0.03)
    assert models["GPT-3 175B"]["σ, unscaled"] == pytest.approx(11.3, rel=0.03)
    assert models["GPT-3 175B"]["±2σ, / √d_k"] == pytest.approx(2.0, rel=0.03)
    assert found.verdict
    assert not Variance(**SMALL, width="d_model").run().verdict


def test_it_draws_variance_entropy_and_the_models(found: Experiment) -> None:
    left, middle, right = found.figure().axes
    assert [len(axes.lines) for axes in (left, middle)] == [3, 3]
    assert left.get_xlabel() == middle.get_xlabel() == "d"
    assert [text.get_text() for text in right.texts][:2] == ["±16", "±16"]
    assert len(right.patches) == 2 * len(found.rows[6:])


def test_it_is_seeded_and_leaves_the_generator_of_torch_as_it_was(found: Experiment) -> None:
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    again = Variance(**SMALL).run()
    assert torch.equal(torch.randn(3), expected)
    assert again.rows == found.rows
