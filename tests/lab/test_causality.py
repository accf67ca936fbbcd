"""Nothing comes from the future, and −1e9 is not −inf."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import regard.lab


@cache
def found() -> regard.lab.Experiment:
    return regard.lab.run("causality")


def by_case(check: str) -> dict[str, Any]:
    return {row["case"]: row["found"] for row in found().rows if row["check"] == check}


def test_nothing_comes_from_the_future() -> None:
    assert found().verdict
    gradients = by_case("gradient")
    assert all((size == 0.0) == (int(place) > 0) for place, size in gradients.items())
    assert by_case("rows whose bits the future changes") == {"sdpa": 0, "chunked": 0, "reference": 0}


def refuted(**choice: Any) -> set[tuple[str, str]]:
    """The rows that disagree for a wrong choice."""
    tried = regard.lab.run("causality", **choice)
    wrong = {(row["check"], row["case"]) for row in tried.rows if not row["agrees"]}
    assert tried.verdict == (not wrong)
    return wrong


def test_a_mask_that_shows_one_later_key_makes_it_fail() -> None:
    wrong = refuted(offset=1)
    assert {("gradient", "+1"), ("rows whose bits the future changes", "reference")} <= wrong
    assert ("gradient", "+2") not in wrong


def test_a_mask_that_hides_the_present_makes_it_fail() -> None:
    assert ("gradient", "0") in refuted(offset=-1)


def test_a_small_constant_leaks() -> None:
    wrong = refuted(constant=-10.0)
    assert {("rows that see keys and differ, -10", "chunked"), ("-10 stored as", "float16")} <= wrong


def test_a_moderate_constant_leaves_rows_that_see_none_their_softmax() -> None:
    wrong = refuted(constant=-1e4)
    assert ("the same with -10000: |output − mean of v|", "reference") in wrong
    assert ("rows that see keys and differ, -10000", "reference") not in wrong


def test_the_constant_gives_the_same_bits_on_longer_sequences() -> None:
    assert regard.lab.run("causality", length=40).verdict


def test_float16_cannot_represent_the_constant_and_bfloat16_can() -> None:
    stored = by_case("-1e+09 stored as")
    assert stored["float16"] == "−inf"
    assert float(stored["bfloat16"]) == pytest.approx(-1e9, rel=2**-8)


def test_a_row_that_sees_none_gives_all_its_weight_to_hidden_keys_unless_the_constant_is_infinite() -> None:
    blind = by_case("hidden weight, row that sees none")
    assert blind.pop("−inf") == 0.0
    assert list(blind.values()) == pytest.approx([1.0] * 6)


def test_the_figure_marks_exact_zeros() -> None:
    left, right = found().figure().axes
    zeros = next(line for line in left.lines if line.get_label() == "exactly 0")
    assert list(zeros.get_xdata()) == list(range(1, 8))
    assert len(right.lines) == 2
