"""The alignment of two sentences."""

from __future__ import annotations

import math

import pytest

import regard.lab
from regard.errors import ArgumentError
from regard.report.example import SOURCE, TARGET


def test_words_attend_to_their_translations() -> None:
    found = regard.lab.run("alignment")
    assert found.verdict
    assert [row["query"] for row in found.rows] == list(TARGET)
    strongest = {row["query"]: row["strongest"] for row in found.rows}
    assert (strongest["chat"], strongest["noir"], strongest["lait"]) == ("cat", "black", "milk")


def test_the_weights_match_the_formula() -> None:
    rows = {row["query"]: row for row in regard.lab.run("alignment").rows}
    own, kin = math.exp((3.0**2 + 1.8**2) / math.sqrt(12)), math.exp(1.8**2 / math.sqrt(12))  # 12 features
    assert math.isclose(rows["le"]["the"], own / (own + 6), rel_tol=1e-5)
    assert math.isclose(rows["chat"]["cat"], own / (own + kin + 5), rel_tol=1e-5)
    assert math.isclose(rows["chat"]["milk"], kin / (own + kin + 5), rel_tol=1e-5)


def test_alignment_by_place_is_refuted() -> None:
    assert not regard.lab.run("alignment", rule="place").verdict


def test_a_temperature_that_spreads_the_weights_makes_it_fail() -> None:
    spread = regard.lab.run("alignment", temperature=20.0)
    assert not spread.verdict
    assert max(row[key] for row in spread.rows for key in SOURCE) < 0.3


def test_the_word_without_a_translation_must_spread_the_most() -> None:
    found = regard.lab.run("alignment")
    certain = [{**row, "entropy, nats": 0.0} if row["query"] == "du" else row for row in found.rows]
    assert not found.study.holds(certain)


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"'meaning', 'place'\. Got 'luck'"):
        regard.lab.run("alignment", rule="luck")


def test_the_picture_shows_every_word() -> None:
    matrix, effective = regard.lab.run("alignment").figure().axes
    assert [label.get_text() for label in matrix.get_yticklabels()] == list(TARGET)
    assert [label.get_text() for label in matrix.get_xticklabels()] == list(SOURCE)
    assert len(effective.patches) == len(TARGET)
