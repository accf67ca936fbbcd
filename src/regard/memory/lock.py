"""One writer at a time on one machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..errors import FileError, MissingPackageError

__all__ = ["Lock"]

_NAME = "lock"


class Lock:
    """The right to write to a folder, which the system takes back when its holder ends, however it ends."""

    def __init__(self, folder: Path, who: str) -> None:
        try:
            import fcntl
        except ImportError as error:
            raise MissingPackageError(
                f"{who}: writing needs file locks (fcntl), which this system does not have. Open it with mode='r'."
            ) from error
        self._file = (folder / _NAME).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._said()
            self._file.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise FileError(
                f"{who}: {folder} has a writer already{holder}, and there can be one. Read it with mode='r', or wait "
                f"until the other has called close() or ended."
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def _said(self) -> str:
        self._file.seek(0)
        number = self._file.read(32).strip()
        return f" (process {number})" if number.isdigit() else ""

    def release(self) -> None:
        """Let another write."""
        self._file.close()
