"""Errors of the dtypes against float64."""

from __future__ import annotations

import pytest

import regard.lab
from regard.errors import ArgumentError

SMALL = {"logit_scales": (0.5, 4.0, 32.0), "length": 48}


def test_float32_arithmetic_keeps_half_precisions_at_their_own_rounding() -> None:
    found = regard.lab.run("precision", **SMALL)
    assert found.verdict
    assert [(row["dtype"], row["logit scale"]) for row in found.rows[:4]] == [
        *(("float32", 0.5), ("float32", 4.0), ("float32", 32.0), ("float16", 0.5))
    ]
    assert all({"sdpa", "chunked", "reference"} <= row.keys() for row in found.rows)


def test_storing_every_step_is_refuted() -> None:
    assert not regard.lab.run("precision", arithmetic="as stored", **SMALL).verdict


def test_the_result_is_rounded_once() -> None:
    for row in regard.lab.run("precision", logit_scales=(32.0,), length=48).rows:
        if row["dtype"] != "float32":
            unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[row["dtype"]]
            assert row["chunked"] < 4.0 * unit  # values below 4 are stored to within 2u


def test_an_error_above_the_bound_makes_it_fail() -> None:
    found = regard.lab.run("precision", **SMALL)
    worse = [{**row, "sdpa": row["bound"] * 1.01} if row["dtype"] == "bfloat16" else row for row in found.rows]
    assert not found.study.holds(worse)


def test_an_unknown_arithmetic_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"'float32', 'as stored'\. Got 'luck'"):
        regard.lab.run("precision", arithmetic="luck", **SMALL)


def test_the_figure_has_three_lines_per_dtype() -> None:
    (axes,) = regard.lab.run("precision", **SMALL).figure().axes
    assert len(axes.lines) == 9
