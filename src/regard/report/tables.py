"""Tables of heads: given names and numbers, something that prints."""

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

_TITLES = {
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
_LESS_TELLING = (
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
    """Heads, one a row: (layer, which of its heads, numbers by name). `str` gives it as text; rich prints it in colour.

    >>> print(HeadTable([("attn", "0", {"entropy": 1.5, "max_logit": 12.25})]))
    layer  head  entropy  max logit
    attn      0     1.50       12.2
    >>> print(HeadTable([]))
    there are no heads to show
    """

    rows: list[tuple[str, str, dict[str, float]]]
    signed: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._drawn(self._fitting(options.max_width)) if self.rows else Text("there are no heads to show")

    def _fitting(self, width: int) -> list[str]:
        """The columns that fit, the less telling left out first."""
        names = list(self.rows[0][2]) if self.rows else []
        room = width - min(32, max((len(layer) for layer, *_ in self.rows), default=0)) - 8
        for name in _LESS_TELLING:
            if sum(max(6, len(_TITLES.get(kept, kept))) + 2 for kept in names) <= room:
                break
            names = [kept for kept in names if kept != name]
        return names

    def _drawn(self, names: list[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("layer", overflow="fold", min_width=8)
        table.add_column("head", justify="right")
        for name in names:
            table.add_column(_TITLES.get(name, name), justify="right", no_wrap=True)
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


class Found(Protocol):
    """What a finding tells."""

    @property
    def level(self) -> str: ...
    @property
    def text(self) -> str: ...


def findings(found: Sequence[Found]) -> Table:
    """Findings, one a line, problems marked."""
    table = Table.grid(padding=(0, 1))
    for finding in found:
        problem = finding.level == "problem"
        table.add_row(Text("!" if problem else "·", style="bold red" if problem else "cyan"), Text(shown(finding.text)))
    if not found:
        table.add_row(Text("nothing is wrong or notable by our rules"))
    return table


def _number(x: float, signed: bool) -> str:
    if math.isnan(x):
        return "–"
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    digits = max(0, 2 - max(0, math.floor(math.log10(abs(x))) if x else 0))
    return f"{x:+.{digits}f}" if signed else f"{x:.{digits}f}"
