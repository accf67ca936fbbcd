"""A saved experiment: everything the page shows, in one JSON file beside its two figures."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from ..report.files import json_safe
from .base import Experiment, Row

__all__ = ["Saved", "is_file_name", "saved_in"]


@dataclass(frozen=True)
class Saved:
    """What the page shows of an experiment; `choices` are the fields of its study, as `repr` writes them."""

    name: str
    claim: str
    test: str
    caption: str
    choices: dict[str, str]
    rows: list[Row]
    verdict: bool

    @classmethod
    def from_experiment(cls, experiment: Experiment) -> Self:
        """Collect it from an experiment."""
        study = experiment.study
        choices = {one.name: repr(getattr(study, one.name)) for one in fields(study)}
        return cls(study.name, study.claim, study.test, study.caption, choices, experiment.rows, experiment.verdict)

    def text(self) -> str:
        """As JSON; a number that is not finite is null."""
        rows = [{key: json_safe(value) for key, value in row.items()} for row in self.rows]
        return json.dumps({**vars(self), "rows": rows}, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def is_file_name(name: str) -> bool:
    """Whether a name can serve as a file name and as an id in the page.

    >>> is_file_name("gradient-cascade"), is_file_name("../x")
    (True, False)
    """
    return re.fullmatch(r"[a-z0-9-]+", name) is not None


def saved_in(folder: Path) -> list[Saved]:
    """The experiments saved in a folder; other files are ignored."""
    names = [path.stem for path in sorted(folder.glob("*.json"))]
    complete = [
        name for name in names if is_file_name(name) and all((folder / one).is_file() for one in _figures(name))
    ]
    return [one for one in (_read(folder / f"{name}.json") for name in complete) if one is not None]


def _figures(name: str) -> tuple[str, str]:
    return f"{name}.svg", f"{name}-dark.svg"


def _read(path: Path) -> Saved | None:
    """Read a file, or return None if it is not a valid experiment."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.keys() != Saved.__dataclass_fields__.keys():
        return None
    texts = [data[name] for name in ("name", "claim", "test", "caption")]
    valid = all(isinstance(text, str) for text in texts) and isinstance(data["verdict"], bool)
    valid = valid and data["name"] == path.stem and _is_dict_of(data["choices"], str)
    valid = valid and isinstance(data["rows"], list) and all(_is_dict_of(row, _CELLS) for row in data["rows"])
    return Saved(**data) if valid else None


_CELLS = (str, int, float, bool, type(None))


def _is_dict_of(given: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(given, dict) and all(isinstance(value, kinds) for value in given.values())
