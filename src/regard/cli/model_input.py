"""What the verbs on models share: their options, and loading a model with a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.text import Text

from regard.errors import FileError
from regard.models.loading import BUILTIN, LoadedModel, TokenizedText, load, random_weights_text
from regard.report.terminal import shown

__all__ = ["FileOption", "RandomOption", "TextOption", "TrustOption", "load_and_tokenize", "read_text", "reading"]

SAMPLE = """The first citizen spoke of corn, and the second citizen spoke of kings. When the first citizen spoke again
of corn, the second citizen spoke again of kings: for what the first citizen said, the second citizen said again."""

TextOption = Annotated[
    str | None, typer.Option("--text", help="The text that the model reads.", show_default="a sample sentence")
]
FileOption = Annotated[Path | None, typer.Option("--file", help="A file with that text.", dir_okay=False)]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model; only if you trust its author.")
]
RandomOption = Annotated[
    bool,
    typer.Option(
        "--allow-random-weights", help="Accept a model whose files lack weights; the missing ones are random."
    ),
]


def read_text(text: str | None, file: Path | None) -> str:
    """The text of --text or --file, or the sample."""
    if text is not None and file is not None:
        raise typer.BadParameter("--text and --file exclude each other")
    if file is None:
        return " ".join(SAMPLE.split()) if text is None else text
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"--file: {str(file)!r} cannot be read as UTF-8 text: {error}.") from error


def load_and_tokenize(
    bar: Progress, name: str | None, text: str, trust: bool, random_weights: bool
) -> tuple[LoadedModel, TokenizedText]:
    """Load a model and tokenize the text, and say what is missing in either."""
    task = bar.add_task(f"loading {shown(name or BUILTIN)}", total=None)
    loaded = load(name, remote_code=trust, random_weights=random_weights)
    if loaded.random_weights:
        bar.console.print(Text(shown(f"{loaded.name}: {random_weights_text(loaded.random_weights)}")))
    tokens = loaded.tokenize(text)
    if tokens.truncated:
        bar.console.print(
            Text(f"the last {tokens.truncated:,} tokens are left out: the model has no positions for them")
        )
    bar.remove_task(task)
    return loaded, tokens


def reading(bar: Progress, loaded: LoadedModel, tokens: TokenizedText) -> Callable[[str], None]:
    """Show that the model reads; the result advances the bar, and is to be called once per layer."""
    task = bar.add_task(f"reading {len(tokens.pieces):,} tokens", total=loaded.layers or None)
    return lambda layer: bar.advance(task)
