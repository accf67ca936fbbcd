"""Writing a file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import FileError

__all__ = ["write_text"]


def write_text(path: str | os.PathLike[str], text: str, who: str) -> Path:
    """Put `text` at `path` in one step: beside it first, then renamed, so that no half of it is ever there."""
    place = Path(path)
    part = place.parent / f".{place.name}.{os.getpid()}.part"
    try:
        try:
            part.write_text(text, encoding="utf-8", newline="\n")
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(
            f"{who}: {place} cannot be written: {reason}. Give the path of a file in a folder that is there and "
            f"that you may write to."
        ) from error
    return place
