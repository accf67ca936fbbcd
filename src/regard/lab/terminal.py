"""An experiment in a terminal: things that rich can print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..report.terminal import shown
from .base import Experiment, Row, Study
from .cells import cell, is_number, tables

__all__ = ["RowTable", "account", "listing", "verdict"]

_GAP = 2


def listing(studies: Mapping[str, type[Study]]) -> Table:
    """The names of the experiments, each with its claim."""
    table = Table.grid(padding=(0, _GAP, 1, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, study in studies.items():
        table.add_row(Text(shown(name)), Text(shown(study.claim)))
    return table


def account(experiment: Experiment) -> Group:
    """All that an experiment tells: its claim, what was measured, the test and the verdict."""
    parts: list[RenderableType] = [_labelled("claim", experiment.claim), Text()]
    for some in tables(experiment.rows):
        parts += [RowTable(some), Text()]
    return Group(*parts, _labelled("test", experiment.test), verdict(experiment))


def verdict(experiment: Experiment) -> Table:
    """The verdict in words: whether what was measured supports the claim."""
    if experiment.verdict:
        said, style = "the measurement supports the claim", "bold green"
    else:
        said, style = "the measurement does not support the claim", "bold red"
    return _labelled("verdict", said, style)


@dataclass(frozen=True)
class RowTable:
    """Rows of the same columns, numbers rounded; columns that do not fit go below, beside the first again."""

    rows: list[Row]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many tables as it takes to show every column within the width."""
        for number, names in enumerate(self._fitting(options.max_width)):
            if number:
                yield Text()
            yield self._drawn(names, self._widths(names, options.max_width))

    def _fitting(self, width: int) -> list[list[str]]:
        first, *others = self.rows[0]
        parts, taken = [[first]], self._width(first)
        for name in others:
            if taken + _GAP + self._width(name) > width and len(parts[-1]) > 1:
                parts.append([first])
                taken = self._width(first)
            parts[-1].append(name)
            taken += _GAP + self._width(name)
        return parts

    def _width(self, name: str) -> int:
        """How narrow a column can be: its name may break between words, its values may not."""
        words = shown(name).split() or [""]
        return max(map(cell_len, [*words, *(shown(cell(row[name])) for row in self.rows)]))

    def _widths(self, names: list[str], room: int) -> list[int]:
        """Narrow columns, widened from the left while there is room, so that as few names as can be are broken."""
        widths = [self._width(name) for name in names]
        room -= sum(widths) + _GAP * (len(names) - 1)
        for place, name in enumerate(names):
            more = max(0, min(cell_len(shown(name)) - widths[place], room))
            widths[place] += more
            room -= more
        return widths

    def _drawn(self, names: list[str], widths: list[int]) -> Table:
        table = Table.grid(padding=(0, _GAP, 0, 0))
        for name, width in zip(names, widths, strict=True):
            numbers = all(is_number(row[name]) for row in self.rows)
            table.add_column(justify="right" if numbers else "left", width=width, vertical="bottom", overflow="fold")
        table.add_row(*(Text(shown(name), style="bold") for name in names))
        for row in self.rows:
            table.add_row(*(Text(shown(cell(row[name]))) for name in names))
        return table


def _labelled(label: str, text: str, style: str = "") -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=len("verdict"))
    table.add_column(overflow="fold")
    table.add_row(label, Text(shown(text), style=style))
    return table
