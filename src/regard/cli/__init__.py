"""The command `regard`: one module per verb; they format what the library computes."""

from __future__ import annotations

from typing import Annotated

import typer

from . import ablate, atlas, census, info, inspect, lab, show, warmup
from .encoding import fall_back_to_ascii
from .output import Commands, hush_other_packages

__all__ = ["app", "main"]

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Run the command line."""
    fall_back_to_ascii()
    hush_other_packages()
    app(prog_name="regard")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"regard {info.installed_version('regard')}")
        raise typer.Exit


@app.callback()
def _regard(
    asked: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact attention that you can see through."""


_VERBS = show.show, info.info, warmup.warmup, inspect.inspect, ablate.ablate, atlas.atlas, census.census, lab.lab
for _verb in _VERBS:
    app.command()(_verb)
