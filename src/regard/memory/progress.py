"""Progress of a long read: passed to a function, or shown as a bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..errors import DtypeError

__all__ = ["Progress", "Report"]

Report = Callable[[int, int], object]
_LONG_READ_SECONDS = 1.0


class Progress:
    """Count the rows read. `show` is True, False, a function of (done, total), or None: a bar if the read is long."""

    def __init__(self, show: bool | Report | None, total: int) -> None:
        if show is not None and not isinstance(show, bool) and not callable(show):
            raise DtypeError(
                f"Memory.read: progress must be True, False, None or a function of (done, total). Got {show!r}."
            )
        self._show, self._total, self._done = show, total, 0
        self._start = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._show is True:
            self._open_bar()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def requested(self) -> bool:
        """Whether the caller asked for progress."""
        return self._show is True or callable(self._show)

    def advance(self, count: int) -> None:
        """Count some more as done."""
        self._done += count
        if callable(self._show):
            self._show(self._done, self._total)
        elif self._show is None and self._bar is None and time.monotonic() - self._start > _LONG_READ_SECONDS:
            self._show = False
            self._open_bar(only_terminal=True)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def _open_bar(self, only_terminal: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        if only_terminal and not console.is_terminal:
            return
        columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console, transient=console.is_terminal)
        self._task = self._bar.add_task("reading", total=self._total)
        self._bar.start()
