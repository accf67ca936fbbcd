"""A short training run with three scalings."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from regard import lab
from regard.lab.training import Training, _Models

SMALL = {"seeds": 1, "steps": 100}


@cache
def found() -> lab.Experiment:
    return lab.run("training", **SMALL)


def row(scaling: str) -> lab.Row:
    return next(r for r in found().rows if r.get("scaling") == scaling)


def test_unscaled_the_loss_stays_at_guessing_and_the_gradient_is_the_largest() -> None:
    assert found().verdict
    assert row("none")["loss at end"] > 0.9 * math.log(8) > 10 * row("√d")["loss at end"]
    assert row("none")["of W_q, W_k"] > row("√d")["of W_q, W_k"] > row("d")["of W_q, W_k"]
    assert row("none")["entropy at start"] < 0.5 < row("√d")["entropy at start"] < 0.95 < row("d")["entropy at start"]


@pytest.mark.parametrize("scaling", ["none", "d"])
def test_another_scaling_is_refuted(scaling: str) -> None:
    study = found().study
    assert isinstance(study, Training)
    assert not replace(study, scaling=scaling).holds(found().rows)


@pytest.mark.parametrize(
    ("scaling", "column", "wrong"),
    [
        ("none", "loss at end", 1.5),
        ("√d", "loss at end", 0.5),
        ("none, rate ÷ 3", "loss at end", 2.08),
        ("none", "gradient at start", 1.0),
        ("none", "mean gradient", 1.0),
        ("none", "of W_q, W_k", 0.4),
        ("d", "of W_q, W_k", 0.4),
        ("none", "cosine of two batches", 0.4),
        ("d", "loss halved at step", None),
        ("d", "loss halved at step", 20),
    ],
)
def test_any_other_outcome_is_refuted(scaling: str, column: str, wrong: Any) -> None:
    assert column in row(scaling)
    assert not found().study.holds([{**r, column: wrong} if r.get("scaling") == scaling else r for r in found().rows])


def test_seeds_are_trained_independently_of_each_other() -> None:
    study = Training(seeds=2, dim=8, words=4, layers=1, steps=20)
    models = _Models(study, 1.0)
    values = torch.randint(8, (1, 3, 4)).expand(2, -1, -1)
    asked = torch.randint(4, (1, 3, 2)).expand(2, -1, -1)
    first, second = models(values, asked)
    assert not torch.equal(first, second)
    gradients = torch.autograd.grad(first.sum(), [*models.parameters()])
    assert all(gradient[0].any() and not gradient[1].any() for gradient in gradients)


def test_the_curves_have_a_row_every_ten_steps_and_the_figure_draws_them() -> None:
    curve = [r for r in found().rows if "step" in r]
    assert [r["step"] for r in curve] == list(range(10, 301, 10))
    assert curve[9]["loss, √d"] == pytest.approx(row("√d")["loss at end"])
    assert curve[10]["loss, √d"] is None
    loss, gradient, start = found().figure().axes
    assert len(gradient.lines) == 4
    assert len(loss.lines) == 5
    assert len(start.lines) == 4
