"""An experiment as a folder keeps it: all that the page tells of it, in one JSON file beside its two pictures."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from ..report.files import plain
from .base import Experiment, Row

__all__ = ["Saved", "fits", "kept"]


@dataclass(frozen=True)
class Saved:
    """What a page tells of an experiment; `choices` are the study's, as Python writes them."""

    name: str
    claim: str
    test: str
    caption: str
    choices: dict[str, str]
    rows: list[Row]
    verdict: bool

    @classmethod
    def of(cls, experiment: Experiment) -> Self:
        """Take it from an experiment that was run."""
        study = experiment.study
        choices = {one.name: repr(getattr(study, one.name)) for one in fields(study)}
        return cls(study.name, study.claim, study.test, study.caption, choices, experiment.rows, experiment.verdict)

    def text(self) -> str:
        """Give it as JSON: a number that is not finite is null."""
        rows = [{key: plain(value) for key, value in row.items()} for row in self.rows]
        return json.dumps({**vars(self), "rows": rows}, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def fits(name: str) -> bool:
    """Whether files, and a place in a page, can have this name.

    >>> fits("gradient-cascade"), fits("../x")
    (True, False)
    """
    return re.fullmatch(r"[a-z0-9-]+", name) is not None


def kept(folder: Path) -> list[Saved]:
    """The experiments whose files are in a folder; what else is there is passed over."""
    names = [path.stem for path in sorted(folder.glob("*.json"))]
    whole = [name for name in names if fits(name) and all((folder / one).is_file() for one in _pictures(name))]
    return [one for one in (_read(folder / f"{name}.json") for name in whole) if one is not None]


def _pictures(name: str) -> tuple[str, str]:
    return f"{name}.svg", f"{name}-dark.svg"


def _read(path: Path) -> Saved | None:
    """What the file tells, if it is one of ours: anyone may have written it."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or told.keys() != Saved.__dataclass_fields__.keys():
        return None
    texts = [told[name] for name in ("name", "claim", "test", "caption")]
    right = all(isinstance(text, str) for text in texts) and isinstance(told["verdict"], bool)
    right = right and told["name"] == path.stem and _flat(told["choices"], str)
    right = right and isinstance(told["rows"], list) and all(_flat(row, _CELLS) for row in told["rows"])
    return Saved(**told) if right else None


_CELLS = (str, int, float, bool, type(None))


def _flat(given: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(given, dict) and all(isinstance(value, kinds) for value in given.values())
