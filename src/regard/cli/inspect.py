"""`regard inspect`: the attention of a whole model while it reads a text."""

from __future__ import annotations

from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from regard.report.tables import HeadTable, findings
from regard.report.terminal import shown

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
    from regard.models.difference import DifferenceTable
    from regard.models.findings import Finding
    from regard.models.loading import LoadedModel, TokenizedText
    from regard.models.seen import Seen
    from regard.report.look import Look

__all__ = ["inspect"]

_MANY_HEADS = 64
_MORE = "--html report.html writes a report; regard atlas shows maps to zoom into."


def inspect(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]", help="A folder, or a model name from the hub.", show_default="the built-in model"
        ),
    ] = None,
    text: TextOption = None,
    file: FileOption = None,
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
        if compare:
            if html or as_json:
                raise typer.BadParameter(
                    "it prints a table and writes no file: leave out --html and --json, or inspect the two one by one",
                    param_hint="--compare",
                )
            console.print(_compared(names, text, file, Allowed(max_tokens, trust, random_weights)))
            return
        if len(names) > 1:
            raise typer.BadParameter("it takes one model; --compare takes two", param_hint="MODEL")
        for option, path in (("--html", html), ("--json", as_json)):
            check_writable(option, path)
        if html and as_json and realpath(html) == realpath(as_json):
            raise typer.BadParameter("--html has the same path; give each its own", param_hint="--json")
        allowed = Allowed(max_tokens, trust, random_weights)
        loaded, tokens, seen = _inspected(names[0] if names else None, read_text(text, file, max_tokens), allowed)
        found, look = _judged(loaded, tokens, seen, look=html is not None)
        written = _write(seen, look, as_json, html)
        console.print(_head_table(seen))
        console.print(findings(found))
        for line in (*_warnings(seen), *(written or [_MORE])):
            console.print(Text(line))


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


def _compared(names: list[str], text: str | None, file: Path | None, allowed: Allowed) -> DifferenceTable:
    if len(names) not in (2, 3):
        raise typer.BadParameter("it compares two models, or two text files", param_hint="--compare")
    *model, a, b = names
    files = [x for x in (a, b) if Path(x).is_file()]
    if len(files) == 2:
        if text is not None or file is not None:
            raise typer.BadParameter("two files are two texts; --text and --file go with two models")
        first, second = (
            _inspected(model[0] if model else None, read_text(None, Path(x), allowed.tokens), allowed)[2]
            for x in (a, b)
        )
    elif model or files:
        other = next(x for x in (a, b) if x not in files)
        raise typer.BadParameter(f"it compares two files, and {shown(other)!r} is not a file", param_hint="--compare")
    else:
        first, second = (_inspected(x, read_text(text, file, allowed.tokens), allowed)[2] for x in (a, b))
    return first.diff(second).table(names=(a, b))


def _head_table(seen: Seen) -> HeadTable:
    """Every head, or means per layer if the table would fill more than a screen or two."""
    return seen.table() if len(seen.heads) <= _MANY_HEADS else seen.table(by_layer=True)
