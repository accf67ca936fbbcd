"""`regard atlas`: attention maps to pan and zoom, in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

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
from .output import errors_as_messages, progress

__all__ = ["atlas"]


def atlas(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A folder, or a model name from the hub.", show_default="the built-in model"
        ),
    ] = None,
    text: TextOption = None,
    file: FileOption = None,
    port: Annotated[int, typer.Option(help="The port to serve on, on this machine only; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open it in a browser.")] = True,
    max_tokens: MaxTokensOption = MAX_TOKENS,
    trust: TrustOption = False,
    random_weights: RandomOption = False,
) -> None:
    """Pan and zoom over attention maps of any length in a browser, down to single weights; Ctrl-C stops it."""
    from regard.models.inspection import fill_atlas, new_atlas
    from regard.report.atlas import check_port, serve

    with errors_as_messages():
        check_port(port)
        with progress() as bar:
            allowed = Allowed(max_tokens, trust, random_weights)
            loaded, tokens = load_and_tokenize(bar, name, read_text(text, file, max_tokens), allowed)
        maps = new_atlas(loaded, tokens)
        with serve(maps, port, open_browser=browser) as serving:
            typer.echo(f"{serving.url} shows {len(tokens.pieces):,} tokens; Ctrl-C stops it")
            with progress() as bar:
                fill_atlas(maps, loaded, tokens, reading(bar, loaded, tokens))
            serving.wait()
