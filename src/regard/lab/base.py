"""What an experiment is: a claim, a measurement, a stated test of the one by the other, and a picture."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from ..errors import ArgumentError, MissingPackageError
from ..report.files import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Experiment", "Row", "Study", "Tell", "canvas"]

Row = dict[str, Any]
Tell = Callable[[float], None]
"""Is told how much of the work is done, from 0 to 1."""


@dataclass(frozen=True)
class Study(ABC):
    """A claim about attention and how to try it; the fields are sizes and choices, so that a wrong one can fail.

    `measure` gives rows of plain numbers and texts, `holds` says whether they support the claim, by the test that
    `test` puts in words, and `draw` shows them.
    """

    name: ClassVar[str]
    claim: ClassVar[str]
    test: ClassVar[str]
    caption: ClassVar[str]
    """What to see in the picture."""
    least: ClassVar[dict[str, float]] = {}
    """The lowest that a number may be; of fields that are not named, anything above 0."""
    fewest: ClassVar[dict[str, int]] = {}
    """How many different ones a field of several must have; of fields that are not named, one."""
    among: ClassVar[dict[str, Collection[str]]] = {}
    """What a text may be; of fields that are not named, anything."""

    @abstractmethod
    def measure(self, tell: Tell) -> list[Row]:
        """Run it; `tell` drives a progress bar."""

    @abstractmethod
    def holds(self, rows: list[Row]) -> bool:
        """Say whether the measurement supports the claim."""

    @abstractmethod
    def draw(self, rows: list[Row]) -> Figure:
        """Show the measurement."""

    def run(self, tell: Tell = lambda share: None) -> Experiment:
        """Measure with a seed of its own, leaving torch's generator as it was, and judge."""
        self._check()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            rows = self.measure(tell)
        tell(1.0)
        return Experiment(self, rows, bool(self.holds(rows)))

    def suit(self) -> None:  # noqa: B027  (most choices go together)
        """Refuse choices that do not go together."""

    def refuse(self, name: str, must: str) -> NoReturn:
        """One clear error about a choice."""
        raise ArgumentError(f"lab: {name} of {self.name} must be {must}. Got {getattr(self, name)!r}.")

    def _check(self) -> None:
        """Refuse choices that are of another kind than the usual ones, too low or too few."""
        for field in fields(self):
            name, given, usual = field.name, getattr(self, field.name), field.default
            if not isinstance(usual, tuple):
                self._check_one(name, given, usual)
                continue
            if not isinstance(given, tuple | list):
                self.refuse(name, f"several, such as {usual}")
            for one in given:
                self._check_one(name, one, usual[0])
            fewest = self.fewest.get(name, 1)
            if len(set(given)) < fewest:
                self.refuse(name, "one or more" if fewest == 1 else f"at least {fewest} different ones")
        self.suit()

    def _check_one(self, name: str, value: Any, usual: Any) -> None:
        """A choice, or one of several."""
        if isinstance(usual, bool):
            right, what = isinstance(value, bool), "True or False"
        elif isinstance(usual, str):
            known = self.among.get(name)
            right = isinstance(value, str) and (known is None or value in known)
            what = "a text" if known is None else f"among {', '.join(map(repr, known))}"
        else:
            whole, least = isinstance(usual, int), self.least.get(name)
            kind = Integral if whole else Real
            right = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
            right = right and (value > 0 if least is None else value >= least)
            what = "a whole number" if whole else "a finite number"
            what += " above 0" if least is None else f" of at least {least:g}" if least > -math.inf else ""
        if not right:
            self.refuse(name, what)


@dataclass(frozen=True)
class Experiment:
    """A study that was run.

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
        """What it is called."""
        return self.study.name

    @property
    def claim(self) -> str:
        """What textbooks say."""
        return self.study.claim

    @property
    def test(self) -> str:
        """The test by which the verdict was reached."""
        return self.study.test

    def figure(self) -> Figure:
        """Draw it with matplotlib."""
        return self.study.draw(self.rows)

    def to_object(self) -> dict[str, Any]:
        """Give name, claim, rows and verdict as JSON can hold them: a number that is not finite is None."""
        rows = [{key: plain(value) for key, value in row.items()} for row in self.rows]
        return {"name": self.name, "claim": self.claim, "rows": rows, "verdict": self.verdict}


def canvas(width: float = 7.0, height: float = 4.0, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes (one, or an array of several side by side), free of any window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise MissingPackageError(
            "lab: pictures need the package matplotlib: pip install 'regard[viz]'. Rows and verdict need none."
        ) from missing
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns)
    for one in [axes] if columns == 1 else axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    return figure, axes
