"""A file lock that allows one writer at a time per machine."""

from __future__ import annotations

import errno
import os
import stat
import weakref

from ..errors import FileError, MissingPackageError
from .folder import Folder

__all__ = ["WriterLock"]

_NAME = "lock"


class WriterLock:
    """The exclusive right to write to a folder. The system releases it when the process ends, however it ends."""

    def __init__(self, folder: Folder, who: str) -> None:
        try:
            import fcntl
        except ImportError as error:
            raise MissingPackageError(
                f"{who}: writing needs file locks (fcntl), which this system does not have. Open it with mode='r'."
            ) from error
        self._folder, self.process = folder, os.getpid()
        while True:
            self._descriptor = _open_lock_file(folder, who)
            self._close = weakref.finalize(self, _release, self._descriptor, self.process)  # dropped, it is released
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
                self.release()
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                named = f" (process {holder})" if holder.isdigit() else ""
                raise FileError(
                    f"{who}: {folder.path} already has a writer{named}, and only one is allowed. Read it with "
                    f"mode='r', or wait until the other process calls close() or ends."
                ) from None
            if self._is_in_place():
                break
            self.release()  # the file was removed after it was opened, and another writer may lock its successor
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, str(self.process).encode())
        _HELD.add(self)

    def check(self, who: str) -> None:
        """Refuse to write if another process, or another folder, may have a writer by now."""
        path = self._folder.path
        if os.getpid() != self.process:
            raise FileError(
                f"{who}: process {self.process} opened {path} for writing, and this process was forked from it. Only "
                f"one may write. Open the memory here with mode='r', or call close() there and open it here."
            )
        if not self._folder.is_at_its_path() or not self._is_in_place():
            raise FileError(
                f"{who}: {path} was moved or replaced, or its lock was removed, so another process may write to it. "
                f"Nothing was changed; open it again."
            )

    def release(self) -> None:
        """Allow another process to write."""
        _HELD.discard(self)
        self._close()

    def _is_in_place(self) -> bool:
        try:
            named, own = self._folder.identity(_NAME), os.fstat(self._descriptor)
        except OSError:
            return False
        return (named.device, named.inode) == (own.st_dev, own.st_ino)


def _open_lock_file(folder: Folder, who: str) -> int:
    """Open the lock file; it is written to, so it must be a file of the folder and of no other place."""
    try:
        descriptor = folder.open_to_write(_NAME, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK):
            raise
    else:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
    raise FileError(
        f"{who}: {folder.path / _NAME} is a link or not a regular file, and writing to it could destroy something "
        f"else. Remove it if no other process writes to the memory."
    )


def _release(descriptor: int, process: int) -> None:
    if os.getpid() == process:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that has the descriptor too must not keep the lock
    os.close(descriptor)


def _close_in_child() -> None:
    """Close the descriptors that a forked child has inherited: it would hold the locks after the end of its parent."""
    for lock in list(_HELD):
        lock.release()


_HELD: weakref.WeakSet[WriterLock] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
