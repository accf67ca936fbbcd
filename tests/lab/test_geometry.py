"""Geometry: angles, norms and volumes against their closed forms."""

from __future__ import annotations

import math

import pytest

from regard import lab

SMALL = {"dims": (4, 16, 64), "draws": 5_000}


@pytest.fixture(scope="module")
def found() -> lab.Experiment:
    return lab.run("geometry", **SMALL)


def test_the_claim_holds(found: lab.Experiment) -> None:
    assert found.verdict


def test_a_variance_that_falls_with_the_root_of_d_is_refuted() -> None:
    assert not lab.run("geometry", **SMALL, power=0.5).verdict


def test_directions_that_share_their_signs_are_not_orthogonal() -> None:
    wrong = lab.run("geometry", **SMALL, directions="positive")
    assert not wrong.verdict
    assert wrong.rows[2]["mean of u·v"] == pytest.approx(2 / math.pi, abs=0.03)  # E|x|² / E x² for normal x


def test_the_mean_norm_is_that_of_the_chi_distribution(found: lab.Experiment) -> None:
    for row in found.rows[:3]:
        d = row["d"]
        mean = math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2)) / math.sqrt(d)
        assert row["norm / √d"] == pytest.approx(mean, abs=0.02)
        assert row["its spread"] == pytest.approx(math.sqrt(1 - mean**2), rel=0.1)


def test_the_dot_product_grows_where_the_cosine_cannot(found: lab.Experiment) -> None:
    scores = found.rows[3:]
    assert scores[-1]["largest |q·k|"] > 10 > 1 > scores[-1]["largest |cos θ|"]


def test_the_figure_draws(found: lab.Experiment) -> None:
    assert len(found.figure().axes) == 3
