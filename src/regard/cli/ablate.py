"""`regard ablate`: which heads a model needs, by the loss that each costs when it is ablated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from regard.display import shown
from regard.errors import FileError

from .model_input import SAMPLE, Allowed, RandomOption, TrustOption
from .output import check_writable, errors_as_messages, progress

if TYPE_CHECKING:
    from regard.models.importance import Importance
    from regard.models.text_loss import TextLoss

__all__ = ["ablate"]

_KINDS = (".txt", ".md", ".jsonl")


def ablate(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A folder, or a model name from the hub.", show_default="the built-in model"
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="A .txt, .md or .jsonl file, or a folder of them.", show_default="a sample sentence"),
    ] = None,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="Read each text twice in a row, and count the second reading only.")
    ] = False,
    zero: Annotated[bool, typer.Option("--zero", help="Ablated heads write zeros, not their mean.")] = False,
    heads: Annotated[int, typer.Option(min=1, help="Show so many heads, the most costly first.")] = 20,
    length: Annotated[int, typer.Option(min=2, help="Cut the texts into windows of so many tokens.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Read at most so many windows.")] = 8,
    html: Annotated[Path | None, typer.Option(help="Write a report with the maps of the heads to this file.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    trust: TrustOption = False,
    random_weights: RandomOption = False,
) -> None:
    """Rank the heads of a model by what it costs to ablate them, one at a time, on your texts.

    The loss is that of the next token. For a model that predicts none, it is the relative change of its last hidden
    states. Every head takes one more reading of all windows.
    """
    with errors_as_messages():
        for option, path in (("--html", html), ("--json", as_json)):
            check_writable(option, path)
        if html and as_json and realpath(html) == realpath(as_json):
            raise typer.BadParameter("--html has the same path; give each its own", param_hint="--json")
        windowed = Windows(texts, length, windows, repeat)
        title, given, found = _ranked(name, windowed, zero, Allowed(length, trust, random_weights))
        written = []
        if as_json is not None:
            found.to_json(as_json)
            written.append(f"wrote {shown(str(as_json))}")
        if html is not None:
            found.save(html, tokens=given.pieces, title=f"{title}: cost of each head")
            written.append(f"wrote {shown(str(html))}; open it in a browser")
        console = Console(highlight=False)
        console.print(Text(f"{shown(title)} on {given.tokens:,} tokens: {given.says}"))
        if given.cut:
            count = len(given.batches)
            first = "the first window" if count == 1 else f"the first {count:,} windows"
            said = f"{first} of up to {length:,} tokens; --windows raises the limit"
            console.print(Text(f"only a part of the texts was read: {said}"))
        console.print(found.table(heads))
        for line in written:
            console.print(Text(line))


class Windows(NamedTuple):
    """What is read: texts, cut into windows."""

    texts: Path | None
    length: int
    most: int
    repeat: bool


def _ranked(name: str | None, windows: Windows, zero: bool, allowed: Allowed) -> tuple[str, TextLoss, Importance]:
    """What the model is called, what it read, and the costs of its heads."""
    from regard.models.importance import importance
    from regard.models.loading import BUILTIN, load
    from regard.models.text_loss import text_loss

    with progress() as bar:
        loading = bar.add_task(f"loading {shown(name or BUILTIN)}", total=None)
        loaded = load(name, remote_code=allowed.remote_code, random_weights=allowed.random_weights)
        loaded.check_reads("ablate")
        bar.remove_task(loading)
        task = bar.add_task("ablating heads", total=None)
        given = text_loss(
            loaded, _texts(windows.texts), length=windows.length, windows=windows.most, repeat=windows.repeat
        )
        found = importance(
            loaded.model,
            given.batches,
            given.loss,
            mean=not zero,
            estimate=given.has_gradient,
            tell=lambda done, total: bar.update(task, completed=done, total=total),
        )
    return loaded.title, given, found


def _texts(place: Path | None) -> Iterator[str]:
    """The texts of a file, or of all files of a folder, in the order of their names."""
    if place is None:
        yield " ".join(SAMPLE.split())
        return
    if not place.exists():
        raise FileError(f"--texts: {str(place)!r} was not found.")
    files = sorted(one for one in place.rglob("*") if one.suffix in _KINDS) if place.is_dir() else [place]
    if not files:
        raise FileError(f"--texts: the folder {str(place)!r} has no {', '.join(_KINDS)} file.")
    some = False
    for file in files:
        for text in _of_file(file):
            if text.strip():
                some = True
                yield text
    if not some:
        raise FileError(f"--texts: {str(place)!r} has no text; give at least one sentence.")


def _of_file(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"--texts: {str(file)!r} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise FileError(
            f"--texts: {str(file)!r} is not UTF-8 text: byte {error.start:,} is 0x{error.object[error.start]:02x}. "
            f"Save it as UTF-8."
        ) from error
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise FileError(f"--texts: line {number:,} of {str(file)!r} is not JSON: {error}.") from error
        if not isinstance(found, dict) or not isinstance(found.get("text"), str):
            raise FileError(f'--texts: line {number:,} of {str(file)!r} has no "text"; write {{"text": "…"}}.')
        yield found["text"]
