"""`regard lab`: experiments on what textbooks say about attention."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.rule import Rule
from rich.text import Text

from regard.report.terminal import shown

from .output import check_writable, errors_as_messages, progress

__all__ = ["lab"]


def lab(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The experiment to run.", show_default="list them")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every experiment.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Write an illustrated page into this folder; experiments saved there before stay on it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Test what textbooks say about attention: experiments that run, plot and check themselves."""
    from regard.lab import run, studies
    from regard.lab.base import canvas
    from regard.lab.page import write as write_page
    from regard.lab.terminal import listing

    console = Console(highlight=False)
    if name is None and not everything:
        if save or as_json:
            rest = ": --json works with one, not with --all" if as_json else ", or give --all"
            raise typer.BadParameter(f"name an experiment{rest}", param_hint="NAME")
        console.print(listing({name: study.brief or study.claim for name, study in studies().items()}))
        console.print(
            Text("regard lab NAME runs one: its claim, numbers and verdict. --all runs every one.", style="dim")
        )
        return
    if everything and (name is not None or as_json):
        raise typer.BadParameter("it runs every experiment; a name and --json select one", param_hint="--all")
    with errors_as_messages():
        check_writable("--save", save, folder=True)
        if save is not None:
            canvas()  # report a missing plotting package now, not after the work
        found = []
        with progress() as bar:
            for one in studies() if name is None else [name]:
                task = bar.add_task(one, total=1.0)
                found.append(run(one, partial(_advance, bar, task)))
                bar.remove_task(task)
        if as_json:
            typer.echo(json.dumps(found[0].to_object(), ensure_ascii=False))
        else:
            for experiment in found:
                console.print(Rule(experiment.name, align="left"))
                console.print(experiment)
        if save is not None:
            page = write_page(found, save)
            typer.echo(f"wrote {shown(str(page))}; open it in a browser", err=as_json)


def _advance(bar: Progress, task: TaskID, share: float) -> None:
    bar.update(task, completed=share)
