"""Five scores, trained on one task."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import regard.lab
from regard.lab.scores import Scores

SMALL = {"words": 40, "sentence": 8, "steps": 60, "length": 128}


@cache
def found() -> regard.lab.Experiment:
    return regard.lab.run("scores", **SMALL)


def row(score: str, projections: bool = False) -> regard.lab.Row:
    return next(r for r in found().rows if (r["score"], r["projections"]) == (score, projections))


def test_scores_with_matrices_of_their_own_learn_the_alignment_and_the_others_need_projections() -> None:
    assert found().verdict
    assert row("dot")["trained words"] < 0.4 < 0.95 < row("dot", projections=True)["trained words"]


@pytest.mark.parametrize("learners", [("dot", "bilinear", "additive"), ("bilinear",), ()])
def test_a_wrong_list_of_learners_is_refuted(learners: tuple[str, ...]) -> None:
    study = found().study
    assert isinstance(study, Scores)
    assert not replace(study, learners=learners).holds(found().rows)


@pytest.mark.parametrize(
    ("score", "column", "wrong"),
    [
        ("bilinear", "unseen words", 0.5),
        ("additive", "unseen words", 0.9),
        ("additive", "time / dot", 1.0),
        ("additive", "plain keeps, MiB", 0.01),
        ("cosine", "trained words", 0.5),
    ],
)
def test_any_other_outcome_is_refuted(score: str, column: str, wrong: float) -> None:
    rows = [{**r, column: wrong} if r["score"] == score else r for r in found().rows]
    assert not found().study.holds(rows)


def test_an_untrained_model_learns_nothing() -> None:
    assert not regard.lab.run("scores", **{**SMALL, "steps": 1, "length": 32}).verdict


def test_parameters_are_counted() -> None:
    d, hidden = 16, 32
    assert row("dot")["parameters"] == 1
    assert row("bilinear")["parameters"] == d * d
    assert row("additive")["parameters"] == hidden * (2 * d + 1)
    assert row("cosine", projections=True)["parameters"] == 1 + 2 * d * d


def test_the_plain_additive_score_saves_every_hidden_unit_of_every_pair_and_ours_does_not() -> None:
    pairs = 128 * 128 * 4 / 2**20
    assert 32 * pairs < row("additive")["plain keeps, MiB"] < 36 * pairs
    assert row("additive")["regard keeps, MiB"] < 2 * pairs


def test_the_figure_has_accuracy_and_costs() -> None:
    alone, projected, costs = found().figure().axes
    assert len(alone.patches) == len(projected.patches) == len(costs.patches) == 10
