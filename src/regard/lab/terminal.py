"""Experiments in the terminal, printed with rich."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..report.terminal import shown
from .cells import Row, cell, is_number, tables

__all__ = ["RowTable", "listing", "summary"]

_GAP = 2


def listing(briefs: Mapping[str, str]) -> Table:
    """The names of the experiments, and what each is about, one per line."""
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for name, brief in briefs.items():
        table.add_row(Text(shown(name)), Text(shown(brief)))
    return table


def summary(claim: str, rows: list[Row], test: str, verdict: bool) -> Group:
    """An experiment in full: its claim, the measurement, the test and the verdict."""
    parts: list[RenderableType] = [_labelled("claim", claim), Text()]
    for some in tables(rows):
        parts += [RowTable(some), Text()]
    if verdict:
        said = _labelled("verdict", "the measurement supports the claim", "bold green")
    else:
        said = _labelled("verdict", "the measurement does not support the claim", "bold red")
    return Group(*parts, _labelled("test", test), said)


@dataclass(frozen=True)
class RowTable:
    """Rows with the same columns, numbers rounded; columns that do not fit continue below, after the first column."""

    rows: list[Row]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As many tables as it takes to show every column within the width."""
        for number, names in enumerate(self._column_groups(options.max_width)):
            if number:
                yield Text()
            yield self._table(names, self._widths(names, options.max_width))

    def _column_groups(self, width: int) -> list[list[str]]:
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
        """The minimum width of a column: its name may wrap between words, its values may not."""
        words = shown(name).split() or [""]
        return max(map(cell_len, [*words, *(shown(cell(row[name])) for row in self.rows)]))

    def _widths(self, names: list[str], spare: int) -> list[int]:
        """Minimum widths, widened from the left while there is spare, so that few names wrap."""
        widths = [self._width(name) for name in names]
        spare -= sum(widths) + _GAP * (len(names) - 1)
        for place, name in enumerate(names):
            more = max(0, min(cell_len(shown(name)) - widths[place], spare))
            widths[place] += more
            spare -= more
        return widths

    def _table(self, names: list[str], widths: list[int]) -> Table:
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
