"""A file lock that allows one writer at a time per machine."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path

from ..errors import FileError, MissingPackageError

__all__ = ["WriterLock"]

_NAME = "lock"


class WriterLock:
    """The exclusive right to write to a folder. The system releases it when the process ends, however it ends."""

    def __init__(self, folder: Path, who: str) -> None:
        try:
            import fcntl
        except ImportError as error:
            raise MissingPackageError(
                f"{who}: writing needs file locks (fcntl), which this system does not have. Open it with mode='r'."
            ) from error
        self._descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
        self._close = weakref.finalize(self, os.close, self._descriptor)  # dropping the memory also releases the lock
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
            self.release()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            named = f" (process {holder})" if holder.isdigit() else ""
            raise FileError(
                f"{who}: {folder} already has a writer{named}, and only one is allowed. Read it with mode='r', or wait "
                f"until the other process calls close() or ends."
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, str(os.getpid()).encode())

    def release(self) -> None:
        """Allow another process to write."""
        self._close()
