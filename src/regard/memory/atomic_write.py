"""Files that last: whole or not there, whatever happens to the one who writes them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["put", "settle"]


def put(place: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file beside `place`, wait until the disk has it, rename it, and wait for the folder to know."""
    part = place.with_name(f".{place.name}.part")
    try:
        with part.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)
    settle(place.parent)


def settle(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
