"""What the verbs share when they print and write: progress, error messages, and checks of paths."""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text
from typer.core import TyperGroup

from regard.display import shown, shown_lines
from regard.errors import FileError, RegardError

__all__ = ["Commands", "check_writable", "errors_as_messages", "hush_other_packages", "progress"]

_SECONDS_BETWEEN_LINES = 5.0
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # the class of every error about options and arguments


class Commands(TyperGroup):
    """The verbs of the command; an error about options reads like every other error: who, what, and the remedy."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **more: Any,
    ) -> Any:
        """Run the command line."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **more)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **more)
        except _USAGE_ERROR as error:
            if error.format_message():  # none, if no verb was given: the help has been printed
                typer.echo(shown_lines(_usage_message(error)), err=True)
            sys.exit(2)
        except typer.Abort:
            sys.exit(1)
        sys.exit(code or 0)


def _usage_message(error: Any) -> str:
    """One sentence about a wrong option, and where the options are listed."""
    verb = getattr(error.ctx, "command_path", "").partition(" ")[2]
    hint = error.param_hint if isinstance(error, typer.BadParameter) else None
    text = f"{hint}: {error.message}" if isinstance(hint, str) else error.format_message()
    text = re.sub(r"^Invalid value for '?([^':]+)'?: ", r"\1: ", text)
    return f"{verb or 'regard'}: {text.rstrip('. ')}. {f'regard {verb}'.strip()} -h lists the options."


def hush_other_packages() -> None:
    """Show no warnings of the packages that we call, unless somebody asks for them by -W or by their own variables."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def progress() -> Progress:
    """A progress display on stderr: a bar that a terminal shows and then erases, or else a line every few seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return _ProgressLines(console=console, disable=True)
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), console=console, transient=True
    )


class _ProgressLines(Progress):
    """Progress where there is no terminal: one line now and then, and none for work that is quickly done."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._said = self._began = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task, and say so if the last line is some seconds old."""
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, and say so if the last line is some seconds old."""
        super().update(task_id, **changes)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        now, task = time.monotonic(), next(task for task in self.tasks if task.id == task_id)
        if now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            share = f": {task.percentage:.0f} %" if task.total else ""
            self.console.print(Text(f"{task.description}{share} after {now - self._began:.0f} s"), soft_wrap=True)


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
