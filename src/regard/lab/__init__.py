"""The laboratory: experiments that test why each part of the attention formula is there."""

from __future__ import annotations

import importlib
import pkgutil
from difflib import get_close_matches
from functools import cache
from typing import Any

from ..errors import ArgumentError
from .base import Experiment, Progress, Row, Study

__all__ = ["Experiment", "Row", "Study", "names", "run", "studies"]

_ORDER = (
    *("variance", "saturation", "gradient-cascade", "training", "temperature", "maximum-entropy", "kernel", "parity"),
    *("scores", "positions", "causality", "online", "complexity", "geometry", "memory", "masks", "alignment"),
    "precision",
)


@cache
def studies() -> dict[str, type[Study]]:
    """Every study by name, in reading order.

    >>> list(studies())[:2]
    ['variance', 'saturation']
    """
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for item in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(item, type) and issubclass(item, Study) and "name" in vars(item):
                found[item.name] = item
    order = [*(name for name in _ORDER if name in found), *sorted(found.keys() - set(_ORDER))]
    return {name: found[name] for name in order}


def names() -> list[str]:
    """The names of all experiments."""
    return list(studies())


def run(name: str, tell: Progress = lambda share: None, **choices: Any) -> Experiment:
    """Run an experiment by name; `choices` are fields of its study, and `tell` is called with the share done so far.

    >>> run("variance", dims=(16, 64), draws=20_000, scaling="d").verdict
    False
    """
    known = studies()
    if name not in known:
        close = "".join(f" Did you mean {one}?" for one in get_close_matches(name, known, n=1))
        raise ArgumentError(f"lab: there is no experiment {name!r}.{close} There are {', '.join(known)}.")
    try:
        study = known[name](**choices)
    except TypeError as error:
        fields = ", ".join(known[name].__dataclass_fields__) or "none"
        raise ArgumentError(f"lab: {name} takes the choices {fields}. Got {', '.join(choices)}.") from error
    return study.run(tell)
