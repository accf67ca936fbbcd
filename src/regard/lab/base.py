"""What an experiment is: a claim, a measurement, a stated test of the claim, and a figure."""

from __future__ import annotations

import base64
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, TypeVar

import torch
from rich.console import RenderableType

from ..display import block, escaped, note, paragraph, table
from ..errors import ArgumentError, MissingPackageError
from ..report.files import json_safe
from ..report.tables import as_text
from .cells import Row, cell, is_number, tables
from .terminal import summary

if TYPE_CHECKING:
    import matplotlib.figure

__all__ = ["Experiment", "Figure", "Progress", "Row", "Study", "canvas", "counted"]

Figure: TypeAlias = "matplotlib.figure.Figure"
Progress = Callable[[float], None]
"""A callback that takes the share of the work done, from 0 to 1."""
Item = TypeVar("Item")


def counted(items: Collection[Item], progress: Progress, start: float = 0.0, stop: float = 1.0) -> Iterator[Item]:
    """Iterate over items, and report each that is done; together they are the shares from `start` to `stop`."""
    for done, item in enumerate(items, 1):
        yield item
        progress(start + (stop - start) * done / len(items))


@dataclass(frozen=True)
class Study(ABC):
    """A claim about attention and an experiment on it; the fields are its parameters, so that a wrong choice can fail.

    `measure` returns rows of plain numbers and strings, `holds` says whether they support the claim, by the test that
    `test` states in words, and `draw` plots them.
    """

    name: ClassVar[str]
    brief: ClassVar[str] = ""
    """What it is about, in at most 60 characters."""
    claim: ClassVar[str]
    test: ClassVar[str]
    caption: ClassVar[str]
    """What the figure shows."""
    least: ClassVar[dict[str, float]] = {}
    """The minimum of a numeric field; fields not listed must be above 0."""
    fewest: ClassVar[dict[str, int]] = {}
    """The minimum number of distinct values of a tuple field; fields not listed need one."""
    among: ClassVar[dict[str, Collection[str]]] = {}
    """The allowed values of a string field; fields not listed take any string."""

    @abstractmethod
    def measure(self, progress: Progress) -> list[Row]:
        """Run the experiment; call `progress` with the share of the work done."""

    @abstractmethod
    def holds(self, rows: list[Row]) -> bool:
        """Whether the measurement supports the claim."""

    @abstractmethod
    def draw(self, rows: list[Row]) -> Figure:
        """Plot the measurement."""

    def run(self, tell: Progress = lambda share: None) -> Experiment:
        """Measure with a fixed seed, without touching torch's global generator, and reach a verdict."""
        self._validate()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            rows = self.measure(tell)
        tell(1.0)
        return Experiment(self, rows, bool(self.holds(rows)))

    def suit(self) -> None:  # noqa: B027  (most studies accept every combination)
        """Raise an error if the choices contradict each other."""

    def refuse(self, name: str, must: str) -> NoReturn:
        """Raise an error about one choice."""
        raise ArgumentError(f"lab: {name} of {self.name} must be {must}. Got {getattr(self, name)!r}.")

    def _validate(self) -> None:
        """Refuse choices of the wrong type, below their minimum, or too few."""
        for field in fields(self):
            name, given, default = field.name, getattr(self, field.name), field.default
            if not isinstance(default, tuple):
                self._validate_one(name, given, default)
                continue
            if not isinstance(given, tuple | list):
                self.refuse(name, f"a tuple or list, such as {default}")
            for one in given:
                self._validate_one(name, one, default[0])
            fewest = self.fewest.get(name, 1)
            if len(set(given)) < fewest:
                self.refuse(name, "a tuple of one or more" if fewest == 1 else f"at least {fewest} different values")
        self.suit()

    def _validate_one(self, name: str, value: Any, default: Any) -> None:
        """Check one value: a choice, or one element of a tuple."""
        if isinstance(default, bool):
            right, what = isinstance(value, bool), "True or False"
        elif isinstance(default, str):
            known = self.among.get(name)
            right = isinstance(value, str) and (known is None or value in known)
            what = "a string" if known is None else f"one of {', '.join(map(repr, known))}"
        else:
            whole, least = isinstance(default, int), self.least.get(name)
            kind = Integral if whole else Real
            right = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
            right = right and (value > 0 if least is None else value >= least)
            what = "a whole number" if whole else "a finite number"
            what += " above 0" if least is None else f" of at least {least:g}" if least > -math.inf else ""
        if not right:
            self.refuse(name, what)


@dataclass(frozen=True, repr=False)
class Experiment:
    """The result of a study: its rows and its verdict. `str` prints it in full, and notebooks show it with its figure.

    >>> import regard
    >>> found = regard.lab.run("variance", dims=(16, 64), draws=20_000)
    >>> found.verdict, found.rows[0]["d"]
    (True, 16)
    """

    study: Study
    rows: list[Row]
    verdict: bool

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return self.study.name

    @property
    def claim(self) -> str:
        """The claim that was tested."""
        return self.study.claim

    @property
    def test(self) -> str:
        """The test by which the verdict was reached."""
        return self.study.test

    def __rich__(self) -> RenderableType:
        return summary(self.claim, self.rows, self.test, self.verdict)

    def __repr__(self) -> str:
        return as_text(self, width=100)

    def _repr_html_(self) -> str:
        numbers = []
        for some in tables(self.rows):
            right = [at for at, name in enumerate(some[0]) if all(is_number(row[name]) for row in some)]
            numbers.append(table(list(some[0]), ([cell(value) for value in row.values()] for row in some), right))
        verdict = "supports" if self.verdict else "does not support"
        said = note(f"test: {self.test}") + paragraph(f"verdict: the measurement {verdict} the claim")
        return block(self.name, paragraph(self.claim), self._drawn(), *numbers, said)

    def _drawn(self) -> str:
        """The figure as an image, on a light card; none without matplotlib."""
        try:
            figure = self.figure()
        except MissingPackageError as missing:
            return note(str(missing))
        out = io.BytesIO()
        figure.savefig(out, format="svg", facecolor="white")
        data = base64.b64encode(out.getvalue()).decode("ascii")
        return f'<img class="card" alt="{escaped(self.study.caption)}" src="data:image/svg+xml;base64,{data}">'

    def figure(self) -> Figure:
        """Plot it with matplotlib."""
        return self.study.draw(self.rows)

    def to_object(self) -> dict[str, Any]:
        """Name, claim, rows and verdict, ready for JSON: a number that is not finite is None."""
        rows = [{key: json_safe(value) for key, value in row.items()} for row in self.rows]
        return {"name": self.name, "claim": self.claim, "rows": rows, "verdict": self.verdict}


def canvas(width: float = 7.0, height: float = 4.0, columns: int = 1) -> tuple[Figure, Any]:
    """A matplotlib figure without a window, and its axes: one, or an array of several side by side."""
    try:
        import matplotlib.figure as plots
    except ImportError as missing:
        raise MissingPackageError(
            "lab: figures need matplotlib: pip install 'regard[viz]'. Rows and verdict work without it."
        ) from missing
    figure = plots.Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns)
    for one in [axes] if columns == 1 else axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    return figure, axes
