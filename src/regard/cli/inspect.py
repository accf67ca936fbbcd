"""`regard inspect`: the attention of a whole model while it reads a text."""

from __future__ import annotations

from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from regard.display import shown
from regard.report.tables import STATISTIC_COLUMNS, HeadTable, findings

from .model_input import (
    MAX_TOKENS,
    Allowed,
    FileOption,
    MaxTokensOption,
    RandomOption,
    TextOption,
    TrustOption,
    load_and_tokenize,
    read_text,
    reading,
)
from .output import check_writable, errors_as_messages, progress

if TYPE_CHECKING:
    from regard.models.findings import Finding
    from regard.models.loading import LoadedModel, TokenizedText
    from regard.models.seen import Seen
    from regard.report.look import Look

__all__ = ["inspect"]

_MANY_HEADS = 64
_MORE = "--html report.html writes a report; regard atlas shows maps to zoom into."
_COLUMNS = {header.lower().replace(" ", "-"): name for name, header in STATISTIC_COLUMNS.items() if header.isascii()}


class Shown(NamedTuple):
    """Which rows the table has, and in which order."""

    every_head: bool
    layer: str | None
    sort: str | None

    def table(self, seen: Seen) -> HeadTable:
        """Every head, or means per layer if the table would fill more than a screen or two."""
        layer = None if self.layer is None else _layer(self.layer, seen)
        few = self.every_head or layer is not None or self.sort is not None or len(seen.heads) <= _MANY_HEADS
        return seen.table(by_layer=not few, layer=layer, sort=self.sort)


def inspect(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]", help="A folder, or a model name from the hub.", show_default="the built-in model"
        ),
    ] = None,
    text: TextOption = None,
    file: FileOption = None,
    heads: Annotated[bool, typer.Option("--heads", help="Show every head, even if there are many.")] = False,
    layer: Annotated[str | None, typer.Option(help="Show the heads of one layer: 3, L3, or its name.")] = None,
    sort: Annotated[
        str | None, typer.Option(help=f"Sort the heads, the largest first, by {', '.join(_COLUMNS)}.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report to this file, as one HTML page.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the statistics to this file.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show the difference between two models, or two text files.")
    ] = False,
    max_tokens: MaxTokensOption = MAX_TOKENS,
    trust: TrustOption = False,
    random_weights: RandomOption = False,
) -> None:
    """Inspect the attention of a whole model while it reads: each head in numbers, and what is wrong or notable.

    Models are `builtin`, `builtin-untrained`, folders, or model names from the hub. With `--compare A B`, A and B are
    two models that read the same text, or two files that one model reads (`inspect MODEL --compare A B`); it shows B
    minus A.
    """
    console, names = Console(highlight=False), list(names or [])
    with errors_as_messages():
        for option, path in (("--html", html), ("--json", as_json)):
            check_writable(option, path)
        if html and as_json and realpath(html) == realpath(as_json):
            raise typer.BadParameter("--html has the same path; give each its own", param_hint="--json")
        shape = Shown(heads, layer, _column(sort))
        allowed = Allowed(max_tokens, trust, random_weights)
        if compare:
            if layer is not None or sort is not None:
                raise typer.BadParameter("it shows the heads that changed most; leave out --layer and --sort")
            pair, labels = _both(names, text, file, allowed)
            written = _write_comparison(pair, labels, as_json, html)
            console.print(pair[0].diff(pair[1]).table(len(pair[0].heads) if heads else 20, labels))
            for line in (*(one for seen in pair for one in _warnings(seen)), *written):
                console.print(Text(line))
            return
        if len(names) > 1:
            raise typer.BadParameter("it takes one model; --compare takes two", param_hint="MODEL")
        loaded, tokens, seen = _inspected(names[0] if names else None, read_text(text, file, max_tokens), allowed)
        table = shape.table(seen)
        found, look = _judged(loaded, tokens, seen, look=html is not None)
        written = _write(seen, look, as_json, html)
        console.print(table)
        console.print(findings(found))
        for line in (*_warnings(seen), *(written or [_MORE])):
            console.print(Text(line))


def _column(sort: str | None) -> str | None:
    """The statistic that a column shows."""
    if sort is None or sort in _COLUMNS.values():
        return sort
    name = sort.lower().replace(" ", "-")
    if name not in _COLUMNS:
        raise typer.BadParameter(f"it must be one of {', '.join(_COLUMNS)}; got {shown(sort)}", param_hint="--sort")
    return _COLUMNS[name]


def _layer(given: str, seen: Seen) -> str:
    """The name of a layer that is given as 3, L3, or its name."""
    number = given.removeprefix("L")
    if given not in seen.layers and number.isdecimal() and int(number) < len(seen.layers):
        return seen.layers[int(number)]
    if given not in seen.layers:
        last = len(seen.layers) - 1
        raise typer.BadParameter(f"it must be from 0 to {last}, or a name; got {shown(given)}", param_hint="--layer")
    return given


def _judged(loaded: LoadedModel, tokens: TokenizedText, seen: Seen, look: bool) -> tuple[list[Finding], Look | None]:
    """The findings, and what a report shows if one is wanted."""
    from regard.models.findings import RULES
    from regard.models.inspection import build_look

    with progress() as bar:
        task = bar.add_task("applying the rules", total=len(RULES))
        found = seen.findings(tell=lambda rule: bar.advance(task))
        return found, build_look(loaded, tokens, seen) if look else None


def _warnings(seen: Seen) -> list[str]:
    """Lines about weights that are random, and about layers that were not seen."""
    from regard.models.loading import random_weights_text

    said = []
    if seen.random_weights:
        said.append(f"random weights: {shown(random_weights_text(seen.random_weights))}")
    for layer, reason in seen.missed.items():
        said.append(f"not seen: {shown(layer) or 'the model itself'}: {shown(reason)}")
    return said


def _write(seen: Seen, look: Look | None, as_json: Path | None, html: Path | None) -> list[str]:
    """Write the files before anything is printed, since printing can fail; and return what to say about them."""
    from regard.report.page import write

    said = []
    if as_json is not None:
        seen.to_json(as_json)
        said.append(f"wrote {shown(str(as_json))}")
    if html is not None and look is not None:
        write(look, html)
        said.append(f"wrote {shown(str(html))}; open it in a browser")
    return said


def _inspected(name: str | None, text: str, allowed: Allowed) -> tuple[LoadedModel, TokenizedText, Seen]:
    from regard.models.inspection import inspect as inspect_model

    with progress() as bar:
        loaded, tokens = load_and_tokenize(bar, name, text, allowed)
        return loaded, tokens, inspect_model(loaded, tokens, reading(bar, loaded, tokens))


def _both(
    names: list[str], text: str | None, file: Path | None, allowed: Allowed
) -> tuple[tuple[Seen, Seen], tuple[str, str]]:
    """What was seen of two models, or on two files, and what to call them."""
    if len(names) not in (2, 3):
        raise typer.BadParameter("it compares two models, or two text files", param_hint="--compare")
    *model, a, b = names
    files = [x for x in (a, b) if Path(x).is_file()]
    if len(files) == 2:
        if text is not None or file is not None:
            raise typer.BadParameter("two files are two texts; --text and --file go with two models")
        name = model[0] if model else None
        first, second = (_inspected(name, read_text(None, Path(x), allowed.tokens), allowed)[2] for x in (a, b))
    elif model or files:
        other = next(x for x in (a, b) if x not in files)
        raise typer.BadParameter(f"it compares two files, and {shown(other)!r} is not a file", param_hint="--compare")
    else:
        first, second = (_inspected(x, read_text(text, file, allowed.tokens), allowed)[2] for x in (a, b))
    return (first, second), (a, b)


def _write_comparison(
    pair: tuple[Seen, Seen], names: tuple[str, str], as_json: Path | None, html: Path | None
) -> list[str]:
    from regard.models.inspection import build_comparison
    from regard.report.page import write

    said = []
    if as_json is not None:
        pair[0].diff(pair[1]).to_json(as_json, names)
        said.append(f"wrote {shown(str(as_json))}")
    if html is not None:
        write(build_comparison(*pair, names), html)
        said.append(f"wrote {shown(str(html))}; open it in a browser")
    return said
