"""Atomic, durable writes: a file is complete or absent, even if the writer is killed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["atomic_write", "fsync_folder"]


def atomic_write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file next to `path`, fsync it, rename it to `path`, and fsync the folder."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
