"""Terminal output: alignments, bars and facts that rich can print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..display import shown

__all__ = ["Alignment", "bar", "facts", "shown"]

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LONGEST_QUERY, _LONGEST_KEY, _WIDEST_BAR = 16, 12, 8


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """Draw a share between 0 and 1 as a bar of `width` cells: a dot if it is too small for a bar, blank if it is 0.

    >>> bar(0.5, 5), bar(0.001, 5), bar(0.0, 5), bar(1.0, 3, ascii_only=True)
    ('██▌  ', '·    ', '     ', '###')
    """
    steps = 1 if ascii_only else 8
    full, part = divmod(round(min(share, 1.0) * width * steps), steps)
    if share > 0.0 and not full and not part:
        return ("." if ascii_only else "·").ljust(width)
    return (("#" if ascii_only else "█") * full + (_EIGHTHS[part] if part else "")).ljust(width)


def facts(rows: Mapping[str, str]) -> Table:
    """A table of names and facts, one per line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in rows.items():
        table.add_row(Text(name), Text(fact))
    return table


@dataclass(frozen=True)
class Alignment:
    """Which words attend to which: one row per query, one bar per key, and the statistics of the row.

    `strongest` holds the index of each row's strongest key, −1 if the row sees none.
    """

    queries: Sequence[str]
    keys: Sequence[str]
    weights: Sequence[Sequence[float]]
    strongest: Sequence[int]
    entropy: Sequence[float]
    perplexity: Sequence[float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the matrix of bars if it fits, else a list of the strongest keys."""
        ascii_only = options.ascii_only
        words = _clip(self.queries, _LONGEST_QUERY, ascii_only)
        keys = _clip(self.keys, _LONGEST_KEY, ascii_only)
        fixed = (
            max(map(cell_len, [*words, "query"])) + max(map(cell_len, [*keys, "strongest"])) + len("entropykeys") + 4
        )
        width = min((options.max_width - fixed) // max(len(keys), 1) - 1, max(_WIDEST_BAR, *map(cell_len, keys)))
        if width >= max(2, len(str(len(keys)))):
            yield from self._matrix(words, keys, width, ascii_only)
            dot = "." if ascii_only else "·"
            yield Text(f"\nbars: share of the row's attention; {dot} a trace, blank: hidden", style="dim")
        else:
            yield self._strongest_list(words, keys)
            yield Text()
        yield Text("entropy in nats; keys: exp(entropy), the number effectively attended to", style="dim")

    def _matrix(self, words: list[str], keys: list[str], width: int, ascii_only: bool) -> RenderResult:
        names_fit = all(cell_len(key) <= width for key in keys)
        table = _matrix_frame([Text(key if names_fit else str(place)) for place, key in enumerate(keys, 1)], width)
        for index, word in enumerate(words):
            best = self.strongest[index]
            bars = [
                Text(bar(share, width, ascii_only=ascii_only), style=_style(share, place == best))
                for place, share in enumerate(self.weights[index])
            ]
            table.add_row(Text(word), *bars, *self._statistics(index, keys))
        yield table
        if not names_fit:
            legend = Text("  ").join(Text.assemble((str(place), "dim"), f" {key}") for place, key in enumerate(keys, 1))
            yield Padding(legend, (1, 0, 0, 0))

    def _strongest_list(self, words: list[str], keys: list[str]) -> Table:
        table = Table.grid(padding=(0, 1))
        for head in ("query", "attends to", "entropy", "keys"):
            table.add_column(
                no_wrap=head != "attends to", justify="left" if head in ("query", "attends to") else "right"
            )
        table.add_row(*(Text(head, style="dim") for head in ("query", "attends to", "entropy", "keys")))
        for index, word in enumerate(words):
            row = self.weights[index]
            top = sorted((place for place, share in enumerate(row) if share > 0.0), key=lambda place: -row[place])[:3]
            attends = Text(", ").join(
                Text(f"{keys[place]} {row[place]:.0%}", style=_style(row[place], False)) for place in top
            )
            table.add_row(Text(word), attends or Text("nothing", style="dim"), *self._statistics(index, keys)[1:])
        return table

    def _statistics(self, index: int, keys: list[str]) -> list[Text]:
        best = self.strongest[index]
        strongest = Text(keys[best], style="bold") if best >= 0 else Text("nothing", style="dim")
        if best < 0:
            return [strongest, Text("-", style="dim"), Text("-", style="dim")]
        return [strongest, Text(f"{abs(self.entropy[index]):.2f}"), Text(f"{self.perplexity[index]:.1f}")]


def _matrix_frame(heads: Iterable[Text], width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    names = list(heads)
    for _ in names:
        table.add_column(width=width, no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("query", *names, "strongest", "entropy", "keys", style="dim")
    return table


def _clip(words: Sequence[str], longest: int, ascii_only: bool) -> list[str]:
    safe = [shown(word) for word in words]
    if ascii_only:
        safe = [word.encode("ascii", "backslashreplace").decode() for word in safe]
    end = "~" if ascii_only else "…"
    return [word if cell_len(word) <= longest else set_cell_size(word, longest - 1) + end for word in safe]


def _style(share: float, strongest: bool) -> str:
    if share <= 0.0:
        return "dim"
    if strongest:
        return "bold bright_cyan"
    return "cyan" if share >= 0.1 else "blue"
