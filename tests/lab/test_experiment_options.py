"""What an experiment refuses: choices of another kind than the usual ones, too low, too few, or not to be had."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, fields
from typing import Any

import pytest

from regard import lab
from regard.errors import ArgumentError, BackendError
from regard.lab import Study

FIELDS = [(name, field) for name, study in lab.studies().items() for field in fields(study)]
NAMES = [f"{name}, {field.name}" for name, field in FIELDS]


def wrong(study: type[Study], field: Field[Any]) -> list[Any]:
    """Values that a field cannot have, by what it has by default."""
    usual = field.default
    assert usual is not MISSING
    if isinstance(usual, tuple):
        return [(), usual[0], None, *((bad,) for bad in wrong_one(study, field.name, usual[0]))]
    return wrong_one(study, field.name, usual)


def wrong_one(study: type[Study], name: str, usual: Any) -> list[Any]:
    if isinstance(usual, bool):
        return [1, "yes", None]
    if isinstance(usual, str):
        return ["no such thing", 3, None]
    least = study.least.get(name)
    low = [0, -1] if least is None else [least - 1] if math.isfinite(least) else []
    return [*low, math.nan, math.inf, "3", True, None, *([2.5] if isinstance(usual, int) else [])]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=NAMES)
def test_a_choice_that_cannot_be_is_one_clear_error(name: str, field: Field[Any]) -> None:
    for value in wrong(lab.studies()[name], field):
        with pytest.raises((ArgumentError, BackendError)) as said:
            lab.run(name, **{field.name: value})
        assert field.name in str(said.value)


@pytest.mark.parametrize(
    ("name", "choices", "said"),
    [
        ("gradient-cascade", {"depths": (3, 3)}, "depths of gradient-cascade must be at least 2 different ones"),
        ("online", {"lengths": (64,)}, "lengths of online must be at least 2 different ones"),
        ("scores", {"words": 8, "sentence": 9}, "words of scores must be at least as many as a sentence has, 9"),
        ("memory", {"similarity": 1.0}, "similarity of memory must be below 1"),
        ("memory", {"bound": 0.75}, "bound of memory must be below 1 − similarity², 0.75"),
        ("saturation", {"claimed": (0.5, 0.5)}, "claimed of saturation must be 4 weights"),
        ("variance", {"scaling": "d²"}, "scaling of variance must be among 'none', '√d', 'd'. Got 'd²'"),
    ],
)
def test_choices_that_do_not_go_together_say_which(name: str, choices: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"lab: {said}"):
        lab.run(name, **choices)


def test_lists_do_as_tuples_do() -> None:
    as_list, as_tuple = (lab.run("variance", dims=kind((16, 64)), draws=20_000) for kind in (list, tuple))
    assert as_list.rows == as_tuple.rows


def test_two_lengths_are_enough_for_a_power() -> None:
    assert lab.run("online", lengths=(512, 1024), rows=(1, 64, 512)).rows
