"""What an experiment refuses: choices of the wrong type, too low, too few, or contradictory."""

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
    """Invalid values for a field, judging by its default."""
    default = field.default
    assert default is not MISSING
    if isinstance(default, tuple):
        return [(), default[0], None, *((bad,) for bad in wrong_one(study, field.name, default[0]))]
    return wrong_one(study, field.name, default)


def wrong_one(study: type[Study], name: str, default: Any) -> list[Any]:
    if isinstance(default, bool):
        return [1, "yes", None]
    if isinstance(default, str):
        return ["no such thing", 3, None]
    least = study.least.get(name)
    low = [0, -1] if least is None else [least - 1] if math.isfinite(least) else []
    return [*low, math.nan, math.inf, "3", True, None, *([2.5] if isinstance(default, int) else [])]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=NAMES)
def test_an_invalid_choice_is_one_clear_error(name: str, field: Field[Any]) -> None:
    for value in wrong(lab.studies()[name], field):
        with pytest.raises((ArgumentError, BackendError)) as said:
            lab.run(name, **{field.name: value})
        assert field.name in str(said.value)


@pytest.mark.parametrize(
    ("name", "choices", "said"),
    [
        ("gradient-cascade", {"depths": (3, 3)}, "depths of gradient-cascade must be at least 2 different values"),
        ("online", {"lengths": (64,)}, "lengths of online must be at least 2 different values"),
        ("scores", {"words": 8, "sentence": 9}, "words of scores must be at least as many as a sentence has, 9"),
        ("memory", {"similarity": 1.0}, "similarity of memory must be below 1"),
        ("memory", {"bound": 0.75}, "bound of memory must be below 1 − similarity², 0.75"),
        ("saturation", {"claimed": (0.5, 0.5)}, "claimed of saturation must be 4 weights"),
        ("variance", {"scaling": "d²"}, "scaling of variance must be one of 'none', '√d', 'd'. Got 'd²'"),
    ],
)
def test_contradictory_choices_say_which(name: str, choices: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"lab: {said}"):
        lab.run(name, **choices)


def test_lists_work_like_tuples() -> None:
    as_list, as_tuple = (lab.run("variance", dims=kind((16, 64)), draws=20_000) for kind in (list, tuple))
    assert as_list.rows == as_tuple.rows


def test_two_lengths_are_enough_for_a_power() -> None:
    assert lab.run("online", lengths=(512, 1024), rows=(1, 64, 512)).rows
