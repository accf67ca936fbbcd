"""Errors of the dtypes against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import regard.lab
from regard.errors import ArgumentError

SMALL = {"logit_scales": (0.5, 4.0, 32.0), "length": 48}


def test_float32_arithmetic_keeps_half_precisions_at_their_own_rounding() -> None:
    found = regard.lab.run("precision", **SMALL)
    assert found.verdict
    assert [(row["dtype"], row["logit scale"]) for row in found.rows[:4]] == [
        *(("float32", 0.5), ("float32", 4.0), ("float32", 32.0), ("float16", 0.5))
    ]
    assert all({"sdpa", "chunked", "reference"} <= row.keys() for row in found.rows if "dtype" in row)


def test_storing_every_step_is_refuted() -> None:
    assert not regard.lab.run("precision", arithmetic="as stored", **SMALL).verdict


def test_the_result_is_rounded_once() -> None:
    for row in regard.lab.run("precision", logit_scales=(32.0,), length=48).rows:
        if row.get("dtype") in ("float16", "bfloat16"):
            unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[row["dtype"]]
            assert row["chunked"] < 4.0 * unit  # values below 4 are stored to within 2u


def test_an_error_above_the_bound_makes_it_fail() -> None:
    found = regard.lab.run("precision", **SMALL)
    worse = [{**row, "sdpa": row["bound"] * 1.01} if row.get("dtype") == "bfloat16" else row for row in found.rows]
    assert not found.study.holds(worse)


def test_an_unknown_arithmetic_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"'float32', 'as stored'\. Got 'luck'"):
        regard.lab.run("precision", arithmetic="luck", **SMALL)


def overflow_row(entry: float) -> regard.lab.Row:
    return next(row for row in regard.lab.run("precision", **SMALL).rows if row.get("entries") == entry)


def test_entries_of_60_overflow_the_plain_form_in_float16_and_not_the_balanced_one() -> None:
    q, k, v = (torch.full((4, 64), 60.0, dtype=torch.float16) for _ in range(3))
    plain = torch.softmax(q @ k.T / 8, -1) @ v
    balanced = torch.softmax((q / 64**0.25) @ (k / 64**0.25).T, -1) @ v
    assert plain.isnan().all()
    torch.testing.assert_close(balanced, v)
    torch.testing.assert_close(regard.attention(q, k, v), v)
    row = overflow_row(60.0)
    assert (row["gives NaN"], math.isnan(row["plain"])) == ("plain", True)
    assert row["regard"] < row["bound"] < row["balanced"]


def test_balanced_scaling_overflows_too_where_the_logit_itself_does() -> None:
    row = overflow_row(120.0)
    assert row["largest logit"] > 65504
    assert row["gives NaN"] == "plain, query first, balanced"
    assert row["regard"] < row["bound"]


@pytest.mark.parametrize("wrong", [{"rescue": "plain"}, {"entries": (15.0, 30.0)}, {"entries": (120.0,)}], ids=str)
def test_a_wrong_claim_about_overflow_is_refuted(wrong: dict[str, Any]) -> None:
    assert not regard.lab.run("precision", **SMALL, **wrong).verdict


@pytest.mark.parametrize("column", ["plain", "balanced", "regard"])
def test_any_other_overflow_is_refuted(column: str) -> None:
    found = regard.lab.run("precision", **SMALL)
    wrong = 1.0 if column == "plain" else math.nan
    assert not found.study.holds([{**row, column: wrong} if row.get("entries") == 60.0 else row for row in found.rows])


def test_entries_that_float16_cannot_hold_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"entries of precision must be at most 32752"):
        regard.lab.run("precision", entries=(60.0, 1e5))


def test_the_figure_has_three_lines_per_dtype_and_marks_nan() -> None:
    left, right = regard.lab.run("precision", **SMALL).figure().axes
    assert len(left.lines) == 9
    crosses = [line for line in right.lines if line.get_marker() == "x"]
    assert [len(line.get_xdata()) for line in crosses] == [2, 1, 1, 0]
