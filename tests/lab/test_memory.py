"""Memory: what a noisy key retrieves, by dimension and temperature."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from regard import lab
from regard.lab.memory import _share_above

SMALL = {"dims": (16, 24, 32, 40), "most": 2048, "questions": 256, "shown": (16, 256)}


@pytest.fixture(scope="module")
def found() -> lab.Experiment:
    return lab.run("memory", **SMALL)


def test_the_claim_holds(found: lab.Experiment) -> None:
    assert found.verdict


def test_capacity_that_grows_only_linearly_is_refuted() -> None:
    assert not lab.run("memory", **SMALL, growth="linear").verdict


def test_at_a_high_temperature_the_capacity_is_tiny() -> None:
    wrong = lab.run("memory", **SMALL, temperature=1.0)
    assert not wrong.verdict
    assert max(row["capacity, items"] for row in wrong.rows if "d" in row) <= 2


def test_the_error_rises_with_temperature_to_that_of_the_mean_of_all(found: lab.Experiment) -> None:
    for items in SMALL["shown"]:
        curve = [row for row in found.rows if row.get("items") == items]
        assert all(row["error"] <= after["error"] + 0.01 for row, after in pairwise(curve))
        assert all(row["weight on the right"] >= after["weight on the right"] - 0.01 for row, after in pairwise(curve))
        assert curve[-1]["error"] == pytest.approx((1 - 1 / items) / 2, abs=0.05)  # half the distance² to the mean


def test_the_share_of_a_sphere_beyond_a_cosine_is_that_of_known_caps() -> None:
    assert _share_above(0.0, 7) == pytest.approx(0.5, abs=1e-4)
    assert _share_above(0.5, 2) == pytest.approx(1 / 3, abs=1e-4)  # 60° to both sides of a circle
    assert _share_above(0.5, 3) == pytest.approx(1 / 4, abs=1e-4)  # a sphere's caps go with their height
    x = torch.nn.functional.normalize(torch.randn(100_000, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    assert _share_above(0.3, 8) == pytest.approx((x[:, 0] > 0.3).double().mean().item(), abs=0.005)


def test_the_figure_draws(found: lab.Experiment) -> None:
    assert len(found.figure().axes) == 2
