"""Tables of heads and findings, for the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..display import block, note, paragraph, shown, table
from .labels import layer_label, layer_legend

__all__ = ["NOTHING_FOUND", "NOTHING_SEEN", "STATISTIC_COLUMNS", "HeadTable", "as_text", "findings"]

NOTHING_FOUND = "no rule found anything wrong or notable"
NOTHING_SEEN = (
    "no attention was seen: call the model inside `with regard.watch(model) as seen:`. Attention that a model computes "
    "by hand is seen only if it calls regard.attention, or torch's function"
)
STATISTIC_COLUMNS = {
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
    "entropy",
    "self_share",
    "first_share",
    "saturated_share",
    "previous_share",
)


@dataclass(frozen=True, repr=False)
class HeadTable:
    """One row per head: (layer, head, numbers by name). `str` gives plain text; rich and notebooks print it, too.

    `layers` are the layers of the model in order, by which L0, L1 and so on are counted; by default, those of the rows.
    `lines` of text come before the table.

    >>> print(HeadTable([("attn", "0", {"entropy": 1.5, "max_logit": 12.25})]))
    layer  head  entropy  max logit
    L0        0     1.50       12.2
    L0: attn
    >>> HeadTable([])
    there are no heads to show
    """

    rows: list[tuple[str, str, dict[str, float]]]
    signed: bool = False
    layers: Sequence[str] = ()
    lines: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (Text(shown(line)) for line in self.lines)
        if self.rows:
            yield self._table(self._fitting_columns(options.max_width))
            yield from (Text(line, style="dim") for line in layer_legend(self._order))
        elif not self.lines:
            yield Text("there are no heads to show")

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rest = [as_text(replace(self, lines=()))] if self.rows or not self.lines else []
        return "\n".join([*map(shown, self.lines), *rest])

    def _repr_html_(self) -> str:
        above = [paragraph(line) for line in self.lines]
        if not self.rows:
            return block("", *(above or [note("there are no heads to show")]))
        head = ["layer", "head", *(STATISTIC_COLUMNS.get(name, name) for name in self._names)]
        cells = ((label, number, *self._cells(numbers, self._names)) for label, number, numbers in self._labelled())
        legend = (note(line) for line in layer_legend(self._order))
        return block("", *above, table(head, cells, numbers=range(1, len(head))), *legend)

    @property
    def _names(self) -> list[str]:
        return list(self.rows[0][2]) if self.rows else []

    @property
    def _order(self) -> list[str]:
        return list(self.layers) or list(dict.fromkeys(layer for layer, *_ in self.rows))

    def _labelled(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        for layer, head, numbers in self.rows:
            yield layer_label(layer, self._order), head, numbers

    def _cells(self, numbers: dict[str, float], names: Sequence[str]) -> list[str]:
        return [_number(numbers[name], self.signed) for name in names]

    def _fitting_columns(self, width: int) -> list[str]:
        """The columns that fit, after dropping the less informative ones first."""
        names, gap = self._names, 2
        labels = [("layer", "head"), *((label, head) for label, head, _ in self._labelled())]
        taken = sum(max(map(len, column)) for column in zip(*labels, strict=True)) + gap
        widths = {
            name: gap
            + max(
                len(STATISTIC_COLUMNS.get(name, name)), *(len(_number(row[name], self.signed)) for *_, row in self.rows)
            )
            for name in names
        }
        for name in _DROPPED_FIRST:
            if taken + sum(widths[one] for one in names) <= width:
                break
            names = [column for column in names if column != name]
        return names

    def _table(self, names: list[str]) -> Table:
        lines = Table(box=None, pad_edge=False, header_style="bold")
        lines.add_column("layer", no_wrap=True)
        lines.add_column("head", justify="right", no_wrap=True)
        for name in names:
            lines.add_column(STATISTIC_COLUMNS.get(name, name), justify="right", no_wrap=True)
        for label, head, numbers in self._labelled():
            lines.add_row(Text(label), head, *self._cells(numbers, names))
        return lines


def as_text(what: RenderableType, width: int = 160) -> str:
    """What rich prints, as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False, force_jupyter=False)
    console.print(what, highlight=False)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").splitlines())


class FindingLike(Protocol):
    """Anything with the level and the text of a finding."""

    @property
    def level(self) -> str: ...
    @property
    def text(self) -> str: ...


def findings(found: Sequence[FindingLike]) -> Table:
    """Findings, one per line, problems marked."""
    lines = Table.grid(padding=(0, 1))
    for finding in found:
        problem = finding.level == "problem"
        lines.add_row(Text("!" if problem else "·", style="bold red" if problem else "cyan"), Text(shown(finding.text)))
    if not found:
        lines.add_row(Text(NOTHING_FOUND))
    return lines


def _number(x: float, signed: bool) -> str:
    if math.isnan(x):
        return "–"
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    digits = max(0, 2 - max(0, math.floor(math.log10(abs(x))) if x else 0))
    return f"{x:+.{digits}f}" if signed else f"{x:.{digits}f}"
