"""Complexity: FLOP and bytes by operation, and their powers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from regard import lab
from regard.lab.complexity import Complexity, count, product_flop
from regard.softmax import stable

SMALL = {"n": 64, "m": 96, "dim": 32, "value_dim": 16, "rounds": 2}


@pytest.fixture(scope="module")
def found() -> lab.Experiment:
    return lab.run("complexity", n=128, m=192, rounds=5)


def test_the_products_grow_with_the_dim_and_the_rest_does_not(found: lab.Experiment) -> None:
    assert found.verdict
    powers = {row["operation"]: [row[f"{size}: power"] for size in ("n", "m", "d", "d_v")] for row in operations(found)}
    assert powers["scores"] == [1, 1, 1, 0]
    assert powers["average"] == [1, 1, 0, 1]
    assert powers["scaling"] == [1, 1, 0, 0]
    assert powers["softmax"] == pytest.approx([1, 1, 0, 0], abs=0.01)


def operations(experiment: lab.Experiment) -> list[lab.Row]:
    return [row for row in experiment.rows if "operation" in row]


@pytest.mark.parametrize(
    "wrong",
    [{"scores": "n·m"}, {"scores": "n·m·d²"}, {"scaling": "n²"}, {"softmax": "n·m·d"}, {"average": "n·m·d"}],
    ids=str,
)
def test_a_wrong_power_is_refuted(found: lab.Experiment, wrong: dict[str, Any]) -> None:
    study = found.study
    assert isinstance(study, Complexity)
    assert study.holds(found.rows)
    assert not replace(study, **wrong).holds(found.rows)


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        ({"operation": "softmax"}, "share of time", 0.0),
        ({"backend": "chunked"}, "FLOP of its products", 1),
        ({"growing": "n = m"}, "softmax, FLOP", 1e9),
    ],
)
def test_any_other_outcome_is_refuted(found: lab.Experiment, row: lab.Row, column: str, value: float) -> None:
    others = {"softmax": {"share of time": 0.0}, "scaling": {"share of time": 0.0}} if "operation" in row else {}
    rows = [
        {**r, **others.get(r.get("operation", ""), {}), **({column: value} if row.items() <= r.items() else {})}
        for r in found.rows
    ]
    assert not found.study.holds(rows)


def test_flop_and_bytes_are_those_of_the_arithmetic() -> None:
    n, m, d, d_v = 6, 10, 4, 3
    q, k, v, s = torch.randn(n, d), torch.randn(m, d), torch.randn(m, d_v), torch.randn(n, m)
    scores, scaling, average = count(lambda: q @ k.mT), count(lambda: s * 0.5), count(lambda: s @ v)
    assert (scores.flop, scores.bytes) == (2 * n * m * d, 4 * (n * d + m * d + n * m))
    assert (scaling.flop, scaling.bytes) == (n * m, 4 * 2 * n * m)
    assert (average.flop, average.bytes) == (2 * n * m * d_v, 4 * (n * m + m * d_v + n * d_v))
    assert count(lambda: s.mT[2:]).flop == 0
    five = 5 * n * m  # maximum, difference, exponential, sum and quotient
    assert five <= count(lambda: stable(s)).flop <= five + 4 * n


def test_every_product_iscounted() -> None:
    assert product_flop(lambda: (torch.ones(2, 3) @ torch.ones(3, 4)) @ torch.ones(4, 5)) == 2 * (24 + 40)
    assert product_flop(lambda: torch.ones(2, 3) @ torch.ones(3)) == 2 * 6
    assert product_flop(lambda: torch.ones(2, 3) + 1) == 0


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    lab.run("complexity", **SMALL)
    assert torch.get_num_threads() == before


def test_the_figure_has_flop_against_two_sizes_and_shares(found: lab.Experiment) -> None:
    by_n, by_d, shares = found.figure().axes
    assert len(by_n.lines) == len(by_d.lines) == 4
    assert len(shares.patches) == 12
