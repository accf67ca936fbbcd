"""What the verbs share when they print and write: progress, error messages, and checks of paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from regard.errors import FileError, RegardError
from regard.report.terminal import shown

__all__ = ["check_writable", "errors_as_messages", "progress"]


def progress() -> Progress:
    """A progress display on stderr, which a terminal shows and then erases."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Print an error of ours as its message, without a traceback, and exit with status 1."""
    try:
        yield
    except RegardError as error:
        typer.echo(shown(str(error)), err=True)
        raise typer.Exit(1) from None


def check_writable(option: str, path: Path | None, folder: bool = False) -> None:
    """Check before the work that its result can be written: a file in an existing folder, or a folder."""
    if path is None:
        return
    whole = Path(os.path.realpath(path))
    remedy = "a folder" if folder else "the path of a file in an existing folder"
    try:
        if not folder and whole.exists() and not whole.is_file():
            raise OSError("it is a folder" if whole.is_dir() else "it is not a regular file")
        parent = next(one for one in (whole, *whole.parents) if one.exists()) if folder else whole.parent
        with TemporaryFile(dir=parent):
            return
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(
            f"{option}: {str(path)!r} cannot be written: {reason}. Give {remedy} that you may write to."
        ) from error
