"""Five scores, trained on one task."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import regard.lab
from regard.lab.scores import Scores
from regard.scores import Bilinear

SMALL = {"words": 40, "sentence": 8, "steps": 60, "length": 128, "dims": (16, 32)}


@cache
def found() -> regard.lab.Experiment:
    return regard.lab.run("scores", **SMALL)


def row(score: str, projections: bool = False) -> regard.lab.Row:
    return next(r for r in found().rows if (r.get("score"), r.get("projections")) == (score, projections))


def cost(score: str, dim: int) -> regard.lab.Row:
    return next(r for r in found().rows if (r.get("cost of"), r.get("d")) == (score, dim))


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
        ("cosine", "trained words", 0.5),
    ],
)
def test_any_other_accuracy_is_refuted(score: str, column: str, wrong: float) -> None:
    rows = [{**r, column: wrong} if r.get("score") == score else r for r in found().rows]
    assert not found().study.holds(rows)


@pytest.mark.parametrize(
    ("score", "column", "wrong"),
    [
        ("additive", "time / dot", 1.0),
        ("bilinear", "time / dot", 1e6),
        ("additive", "plain keeps, MiB", 0.01),
        ("additive", "FLOP of logits", 1),
        ("bilinear", "FLOP of products", 1),
    ],
)
def test_any_other_cost_at_one_d_is_refuted(score: str, column: str, wrong: float) -> None:
    rows = [{**r, column: wrong} if (r.get("cost of"), r.get("d")) == (score, 32) else r for r in found().rows]
    assert not found().study.holds(rows)


def test_a_bilinear_score_costs_one_product_per_query_and_not_per_pair() -> None:
    n, d = 128, 32
    assert cost("dot", d)["FLOP of products"] == 2 * n * n * d
    assert cost("bilinear", d)["FLOP of products"] == 2 * n * n * d + 2 * n * d * d
    study = found().study
    assert isinstance(study, Scores)
    assert not replace(study, folded=False).holds(found().rows)
    score, (q, k) = Bilinear(d, d), torch.randn(2, n, d)
    torch.testing.assert_close(score(q, k), torch.einsum("ia,ab,jb->ij", q, score.weight, k))


def test_an_additive_score_runs_its_network_for_every_pair() -> None:
    n, d = 128, 32
    network = 4 * n * n * d  # a sum, a tanh, a product and a sum per pair and hidden unit
    assert cost("additive", d)["FLOP of logits"] == network + 2 * 2 * n * d * d


def test_an_untrained_model_learns_nothing() -> None:
    assert not regard.lab.run("scores", **{**SMALL, "steps": 1, "length": 32, "dims": (16,)}).verdict


def test_parameters_are_counted() -> None:
    d, hidden = 16, 32
    assert row("dot")["parameters"] == 1
    assert row("bilinear")["parameters"] == d * d
    assert row("additive")["parameters"] == hidden * (2 * d + 1)
    assert row("cosine", projections=True)["parameters"] == 1 + 2 * d * d


def test_the_plain_additive_score_saves_every_hidden_unit_of_every_pair_and_ours_does_not() -> None:
    pairs = 128 * 128 * 4 / 2**20
    assert 32 * pairs < cost("additive", 32)["plain keeps, MiB"] < 36 * pairs
    assert cost("additive", 32)["regard keeps, MiB"] < 3 * pairs


def test_the_figure_has_accuracy_and_costs() -> None:
    alone, projected, costs = found().figure().axes
    assert len(alone.patches) == len(projected.patches) == 10
    assert len(costs.lines) == 10
