"""One writer at a time on one machine."""

from __future__ import annotations

import errno
import os
import weakref
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
        self._opened = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
        self._closed = weakref.finalize(self, os.close, self._opened)  # a memory that is dropped lets go, too
        try:
            fcntl.flock(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._opened, 32).decode("ascii", "replace").strip()
            self.release()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            named = f" (process {holder})" if holder.isdigit() else ""
            raise FileError(
                f"{who}: {folder} has a writer already{named}, and there can be one. Read it with mode='r', or wait "
                f"until the other has called close() or ended."
            ) from None
        os.ftruncate(self._opened, 0)
        os.write(self._opened, str(os.getpid()).encode())

    def release(self) -> None:
        """Let another write."""
        self._closed()
