"""A folder that is held open, so that its files are found even if its path leads elsewhere by now."""

from __future__ import annotations

import os
import secrets
import stat
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["FileIdentity", "Folder", "OpenFile"]

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a named pipe would wait for its other end
_BINARY = getattr(os, "O_BINARY", 0)
_BY_DESCRIPTOR = {os.open, os.stat, os.rename, os.unlink} <= os.supports_dir_fd


class FileIdentity(NamedTuple):
    """What distinguishes a file from another one of the same name, and from itself after a change."""

    device: int
    inode: int
    mtime_ns: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


class OpenFile:
    """A regular file that is open for reading. While it is open, its inode goes to no other file."""

    def __init__(self, descriptor: int, name: str | Path) -> None:
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            self._close()
            raise OSError(f"{name} is not a regular file")
        self.identity = FileIdentity.of(status)

    def read(self, limit: int | None = None) -> bytes:
        """Read from the current position up to `limit` bytes, or to the end."""
        with os.fdopen(os.dup(self.descriptor), "rb") as file:
            return file.read(limit)


class Folder:
    """An open folder. Every name is a name in this folder, never a path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        if _BY_DESCRIPTOR:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, self._descriptor)

    @property
    def descriptor(self) -> int | None:
        """The descriptor of the folder, or None on a system that opens files by their whole path only."""
        return self._descriptor

    def is_at_its_path(self) -> bool:
        """Whether the path still leads to this folder."""
        if self._descriptor is None:
            return True
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def open_to_read(self, name: str) -> OpenFile:
        """Open a file of the folder, or the one that a link leads to."""
        return OpenFile(self.open(name, os.O_RDONLY | _NO_WAIT), self.path / name)

    def open_to_write(self, name: str, flags: int) -> int:
        """Open a file of the folder for writing, creating it if needed; a link is refused."""
        return self.open(name, flags | os.O_CREAT | _NO_LINK | _NO_WAIT)

    def open(self, name: str, flags: int) -> int:
        return os.open(self._at(name), flags | _BINARY, 0o666, dir_fd=self._descriptor)

    def identity(self, name: str) -> FileIdentity:
        """Identify the file that `name` leads to."""
        return FileIdentity.of(os.stat(self._at(name), dir_fd=self._descriptor))

    def names(self) -> list[str]:
        return os.listdir(self.path if self._descriptor is None else self._descriptor)

    def remove(self, name: str) -> None:
        os.unlink(self._at(name), dir_fd=self._descriptor)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file completely or not at all: under a random name, fsync, rename, fsync of the folder."""
        partial = f".{name}.{secrets.token_hex(8)}.part"
        descriptor = self.open_to_write(partial, os.O_WRONLY | os.O_EXCL)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._at(partial), self._at(name), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        finally:
            with suppress(OSError):
                self.remove(partial)
        self.sync()

    def sync(self) -> None:
        """Wait until the names in the folder are on disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def _at(self, name: str) -> str | Path:
        return self.path / name if self._descriptor is None else name
