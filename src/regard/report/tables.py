"""Tables of heads and findings, for the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from .terminal import shown

__all__ = ["HeadTable", "findings"]

_HEADERS = {
    "entropy": "entropy",
    "relative_entropy": "relative",
    "effective_keys": "effective",
    "max_logit": "max logit",
    "first_share": "first",
    "self_share": "self",
    "previous_share": "previous",
    "saturated_share": "saturated",
    "distance": "distance",
    "concentration": "Σp²",
}
_DROPPED_FIRST = (
    "concentration",
    "effective_keys",
    "distance",
    "saturated_share",
    "self_share",
    "first_share",
    "entropy",
)


@dataclass(frozen=True)
class HeadTable:
    """One row per head: (layer, head, numbers by name). `str` gives plain text; rich prints it in colour.

    >>> print(HeadTable([("attn", "0", {"entropy": 1.5, "max_logit": 12.25})]))
    layer  head  entropy  max logit
    attn      0     1.50       12.2
    >>> print(HeadTable([]))
    there are no heads to show
    """

    rows: list[tuple[str, str, dict[str, float]]]
    signed: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table(self._fitting_columns(options.max_width)) if self.rows else Text("there are no heads to show")

    def _fitting_columns(self, width: int) -> list[str]:
        """The columns that fit, after dropping the less informative ones first."""
        names = list(self.rows[0][2]) if self.rows else []
        available = width - min(32, max((len(layer) for layer, *_ in self.rows), default=0)) - 8
        for name in _DROPPED_FIRST:
            if sum(max(6, len(_HEADERS.get(column, column))) + 2 for column in names) <= available:
                break
            names = [column for column in names if column != name]
        return names

    def _table(self, names: list[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("layer", overflow="fold", min_width=8)
        table.add_column("head", justify="right")
        for name in names:
            table.add_column(_HEADERS.get(name, name), justify="right", no_wrap=True)
        last = None
        for layer, head, numbers in self.rows:
            label = Text(shown(layer) or "(model)") if layer != last else Text("")
            table.add_row(label, head, *(_number(numbers[name], self.signed) for name in names))
            last = layer
        return table

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=160, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").splitlines())


class FindingLike(Protocol):
    """Anything with the level and the text of a finding."""

    @property
    def level(self) -> str: ...
    @property
    def text(self) -> str: ...


def findings(found: Sequence[FindingLike]) -> Table:
    """Findings, one per line, problems marked."""
    table = Table.grid(padding=(0, 1))
    for finding in found:
        problem = finding.level == "problem"
        table.add_row(Text("!" if problem else "·", style="bold red" if problem else "cyan"), Text(shown(finding.text)))
    if not found:
        table.add_row(Text("no rule found anything wrong or notable"))
    return table


def _number(x: float, signed: bool) -> str:
    if math.isnan(x):
        return "–"
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    digits = max(0, 2 - max(0, math.floor(math.log10(abs(x))) if x else 0))
    return f"{x:+.{digits}f}" if signed else f"{x:.{digits}f}"
