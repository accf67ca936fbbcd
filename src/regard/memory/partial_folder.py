"""Folders that are written beside their final place, renamed when complete, and swept if the writer was killed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .folder import Folder

__all__ = ["OWN_FILE", "partial_folder", "sweep_partial_folders"]

OWN_FILE = re.compile(r"rows-\d+\.safetensors|\.(rows-\d+\.safetensors|index\.json)(\.[0-9a-f]{16})?\.part")
"""The names of shards, and of files that were not completed."""
_PARTIAL_FOLDER = re.compile(r"\..+\.[0-9a-f]{16}\.part", re.DOTALL)


@contextmanager
def partial_folder(path: Path) -> Iterator[Folder]:
    """Make a folder beside `path`, lock it against sweeps, and remove it at the end unless it was renamed."""
    while True:
        place = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        place.mkdir()
        with suppress(FileNotFoundError):  # another process can sweep the folder until it is locked: then try again
            folder = Folder(place)
            if _lock(folder) is not False and folder.is_at_its_path():
                break
    try:
        yield folder
    finally:
        shutil.rmtree(place, ignore_errors=True)


def sweep_partial_folders(parent: Path) -> None:
    """Remove the folders of writers that were killed; the folder of a living one is locked, and stays."""
    with suppress(OSError):
        for name in os.listdir(parent):
            place = parent / name
            if _PARTIAL_FOLDER.fullmatch(name) and not place.is_symlink():
                with suppress(OSError):
                    folder = Folder(place)
                    own = all(OWN_FILE.fullmatch(file) or file == "index.json" for file in folder.names())
                    if own and _lock(folder) and folder.is_at_its_path():
                        shutil.rmtree(place, ignore_errors=True)


def _lock(folder: Folder) -> bool | None:
    """Lock a folder as long as it is open: True, False if another process has it locked, None if it cannot be."""
    try:
        import fcntl
    except ImportError:
        return None
    if folder.descriptor is None:
        return None
    try:
        fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
