"""Files: read the package's assets, write files atomically, and make numbers safe for JSON."""

from __future__ import annotations

import math
import os
from importlib.resources import files
from pathlib import Path

from ..errors import FileError

__all__ = ["asset", "json_safe", "write_text"]


def asset(package: str, name: str) -> str:
    """The text of an asset of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def json_safe(value: object) -> object:
    """`value`, or None for a number that is not finite, which JSON cannot hold.

    >>> [json_safe(x) for x in (0.5, float("nan"), float("-inf"), "causal")]
    [0.5, None, None, 'causal']
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: str | os.PathLike[str], text: str, who: str) -> Path:
    """Write `text` to `path` atomically: to a temporary file beside it, which is then renamed."""
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
            f"{who}: {place} cannot be written: {reason}. Give the path of a file in an existing folder that "
            f"you may write to."
        ) from error
    return place
