"""Files that are written once, and compared with their checksums when they are first read."""

from __future__ import annotations

import mmap
import os
import zlib

from ..errors import FileError
from .folder import FileIdentity, Folder, OpenFile

__all__ = ["CheckedFile"]

_PIECE = 1 << 23  # bytes that are mapped at once for a checksum


class CheckedFile:
    """A file of a folder, its identity and its checksum.

    If it is held open, it can be read even after it was removed, as by a writer that compacts. Otherwise it is opened
    again for every read, and refused if it is no longer the same file.
    """

    def __init__(self, folder: Folder, name: str, crc32: int | None) -> None:
        self.folder, self.name, self.crc32 = folder, name, crc32
        self._file: OpenFile | None = folder.open_to_read(name)
        self.identity: FileIdentity = self._file.identity
        self._verified = False

    @property
    def held_open(self) -> bool:
        return self._file is not None

    def release(self) -> None:
        """Hold the file open no longer."""
        self._file = None

    def is_in(self, folder: Folder) -> bool:
        """Whether `folder` has this very file under its name, unchanged."""
        try:
            return folder.identity(self.name) == self.identity
        except OSError:
            return False

    def read(self, count: int) -> bytes:
        """Read the first bytes."""
        file = self._opened()
        with mmap.mmap(file.descriptor, min(count, self.identity.size), access=mmap.ACCESS_READ) as view:
            return view[:]

    def map(self, start: int, length: int) -> tuple[mmap.mmap, int]:
        """Map bytes [start, start + length) for reading; also return where in the map they begin."""
        page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        file = self._opened()
        try:
            view = mmap.mmap(file.descriptor, start - page + length, access=mmap.ACCESS_COPY, offset=page)
        except (OSError, ValueError) as error:
            raise FileError(
                f"Memory: {self.folder.path / self.name} can no longer be mapped: {error}. Restore the folder from a "
                f"copy."
            ) from error
        return view, start - page

    def verify_once(self) -> None:
        """Compare the checksum, unless this was done before."""
        if not self._verified:
            self.verify(from_disk=False)

    def verify(self, from_disk: bool = True) -> None:
        """Compare the checksum. `from_disk` reads again what the system holds in memory."""
        if self.crc32 is None:
            return
        file = self._opened()
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        crc32 = 0
        for start in range(0, self.identity.size, _PIECE):
            view, _ = self.map(start, min(_PIECE, self.identity.size - start))
            with view:
                crc32 = zlib.crc32(view, crc32)
        if crc32 != self.crc32:
            raise FileError(
                f"Memory: {self.folder.path / self.name} is damaged: its checksum is {crc32:08x} instead of "
                f"{self.crc32:08x}. Restore the folder from a copy."
            )
        self._verified = True

    def _opened(self) -> OpenFile:
        if self._file is not None:
            return self._file
        path = self.folder.path / self.name
        try:
            file = self.folder.open_to_read(self.name)
        except OSError as error:
            raise FileError(
                f"Memory: {path} can no longer be opened: {error.strerror or error}. If a writer has compacted the "
                f"memory since, read again; otherwise restore the folder from a copy."
            ) from error
        if file.identity != self.identity:
            raise FileError(f"Memory: {path} was replaced while it was read. Read again.")
        return file
