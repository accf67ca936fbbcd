"""What the verbs on models share: their options, and loading a model with a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.progress import Progress
from rich.text import Text

from regard.errors import FileError
from regard.report.terminal import shown

if TYPE_CHECKING:
    from regard.models.loading import LoadedModel, TokenizedText

__all__ = [
    "MAX_TOKENS",
    "Allowed",
    "FileOption",
    "MaxTokensOption",
    "RandomOption",
    "TextOption",
    "TrustOption",
    "load_and_tokenize",
    "read_text",
    "reading",
]

MAX_TOKENS = 2**15
"""How many tokens are read unless more are asked for: the time grows with their square."""
_CHARACTERS_PER_TOKEN = 32  # many more than any text has, so that the cut is by tokens

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
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Read at most so many tokens; the time grows with their square.")
]


class Allowed(NamedTuple):
    """What the options allow: how many tokens, code that comes with the model, and random weights."""

    tokens: int
    remote_code: bool
    random_weights: bool


def read_text(text: str | None, file: Path | None, max_tokens: int) -> str:
    """The text of --text or --file, or the sample; what is far beyond `max_tokens` is not even read."""
    if text is not None and file is not None:
        raise typer.BadParameter("--text and --file exclude each other")
    if file is None:
        return " ".join(SAMPLE.split()) if text is None else _cut(text, max_tokens)
    try:
        with file.open(encoding="utf-8") as opened:
            return _cut(opened.read(max_tokens * _CHARACTERS_PER_TOKEN + 1), max_tokens)
    except FileNotFoundError as error:
        raise FileError(f"--file: {str(file)!r} was not found.") from error
    except OSError as error:
        raise FileError(f"--file: {str(file)!r} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise FileError(
            f"--file: {str(file)!r} is not UTF-8 text: byte {error.start:,} is 0x{error.object[error.start]:02x}. "
            f"Save it as UTF-8."
        ) from error


def _cut(text: str, max_tokens: int) -> str:
    most = max_tokens * _CHARACTERS_PER_TOKEN
    if len(text) > most:
        typer.echo(f"the text is cut after {most:,} characters; --max-tokens raises the limit", err=True)
    return text[:most]


def load_and_tokenize(
    bar: Progress, name: str | None, text: str, allowed: Allowed
) -> tuple[LoadedModel, TokenizedText]:
    """Load a model and tokenize the text, and say what is missing in either."""
    from regard.models.loading import BUILTIN, load, random_weights_text

    task = bar.add_task(f"loading {shown(name or BUILTIN)}", total=None)
    loaded = load(name, remote_code=allowed.remote_code, random_weights=allowed.random_weights)
    if loaded.random_weights:
        bar.console.print(Text(shown(f"{loaded.name}: {random_weights_text(loaded.random_weights)}")))
    tokens = loaded.tokenize(text)
    over = len(tokens.pieces) - allowed.tokens
    if over > 0:
        tokens = tokens.first(allowed.tokens)
        bar.console.print(Text(f"only the first {allowed.tokens:,} tokens are read; --max-tokens raises the limit"))
    if limits := loaded.limits(tokens):
        bar.console.print(Text(limits))
    bar.remove_task(task)
    return loaded, tokens


def reading(bar: Progress, loaded: LoadedModel, tokens: TokenizedText) -> Callable[[str], None]:
    """Show that the model reads; the result advances the bar, and is to be called once per layer."""
    task = bar.add_task(f"reading {len(tokens.pieces):,} tokens", total=loaded.layers or None)
    return lambda layer: bar.advance(task)
