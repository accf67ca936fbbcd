"""Even and odd scores."""

from __future__ import annotations

import pytest

from regard.lab import Experiment
from regard.lab.parity import Parity

SMALL = {"queries": 16, "keys": 24, "units": 48}


@pytest.fixture(scope="module")
def found() -> Experiment:
    return Parity(**SMALL).run()


def test_products_are_even_and_additive_scores_odd_and_neither_explains_the_other(found: Experiment) -> None:
    assert found.verdict is True
    assert [row["score"] for row in found.rows] == ["dot product", "cosine", "bilinear", "Gaussian", "additive"]
    assert [row["even"] for row in found.rows] == pytest.approx([1, 1, 1, 1, 0], abs=1e-12)
    assert [row["odd"] for row in found.rows] == pytest.approx([0, 0, 0, 0, 1], abs=1e-12)


def test_an_additive_score_with_a_bias_has_no_parity() -> None:
    found = Parity(**SMALL, bias=True).run()
    assert found.verdict is False
    additive = found.rows[-1]
    assert 0.01 < additive["even"] < 0.99
    assert additive["even"] + additive["odd"] == pytest.approx(1.0)


def test_each_kind_explains_its_own_and_a_bias_explains_both(found: Experiment) -> None:
    by = {row["score"]: row for row in found.rows}
    assert by["dot product"]["by products"] == pytest.approx(1.0)
    assert by["bilinear"]["by products"] == pytest.approx(1.0)
    assert by["additive"]["by tanh units"] > 0.8
    assert by["dot product"]["by tanh units, bias"] > 0.2


def test_no_number_of_units_brings_an_odd_score_nearer_to_an_even_one() -> None:
    for units in (4, 48):
        for row in Parity(**{**SMALL, "units": units}).run().rows[:-1]:
            assert row["by tanh units"] == pytest.approx(0.0, abs=1e-12)


def test_a_score_that_can_be_imitated_is_refuted(found: Experiment) -> None:
    study, rows = found.study, found.rows
    assert not study.holds([rows[0] | {"by tanh units": 0.01}, *rows[1:]])
    assert not study.holds([*rows[:-1], rows[-1] | {"by products": 0.01}])
    assert not study.holds([rows[0] | {"odd": 0.01}, *rows[1:]])


def test_it_draws_a_group_of_bars_for_each_score(found: Experiment) -> None:
    (axes,) = found.figure().axes
    assert len(axes.patches) == 15
    assert [text.get_text().splitlines()[1] for text in axes.get_xticklabels()] == ["(even)"] * 4 + ["(odd)"]
