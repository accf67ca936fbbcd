"""Order, offsets, aliases and the four terms."""

from __future__ import annotations

import math
from functools import cache

import pytest

import regard.lab

SMALL = {"length": 192, "dim": 32}


@cache
def found() -> regard.lab.Experiment:
    return regard.lab.run("positions", **SMALL)


def value(case: str) -> float:
    (row,) = (row for row in found().rows if row["case"] == case)
    return float(row["found"])


def test_positions_provide_the_order_that_attention_ignores() -> None:
    assert found().verdict
    assert value("tokens permuted") < 1e-12 < 0.01 < value("the same with positions")


def test_the_product_of_positions_is_the_cosine_of_their_offset() -> None:
    assert math.isclose(value("p_i·p_j at i−j = 2"), math.cos(math.pi / 2), abs_tol=1e-12)
    assert math.isclose(value("p_i·p_j at i−j = 4"), -1.0)


def test_the_first_alias_is_at_the_least_common_multiple() -> None:
    first = [value(f"first alias, periods {periods}") for periods in ("8", "8, 12", "8, 13")]
    assert first == [8, 24, 104]


@pytest.mark.parametrize("periods", [(8, 12), (8, 16), (6, 9)])
def test_periods_that_share_a_factor_are_no_cure(periods: tuple[int, int]) -> None:
    assert not regard.lab.run("positions", cure=periods, **SMALL).verdict


def test_the_shares_of_the_terms_sum_to_one_and_content_grows() -> None:
    terms = ("content-content", "content-position", "position-content", "position-position")
    shares = [[value(f"{term}, c = {size:g}") for term in terms] for size in (0.125, 0.5, 2.0)]
    assert all(math.isclose(sum(row), 1.0) for row in shares)
    assert shares[0][0] < 0.01 < shares[1][0] < 0.5 < shares[2][0]


def test_dividing_by_the_root_of_d_keeps_the_balance() -> None:
    assert math.isclose(value("content-content, c = 1"), value("content-content, c = 1, over √d"))


def test_the_figure_names_the_aliases() -> None:
    left, right = found().figure().axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        *("period 8: first alias at 8", "periods 8, 13: first alias at 104")
    ]
    assert len(right.collections) == 4
