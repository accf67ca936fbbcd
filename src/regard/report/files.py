"""Files: those of the package as texts, new ones written whole or not at all, and numbers that JSON can hold."""

from __future__ import annotations

import math
import os
from importlib.resources import files
from pathlib import Path

from ..errors import FileError

__all__ = ["asset", "plain", "write_text"]


def asset(package: str, name: str) -> str:
    """The text of a file among the assets of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def plain(value: object) -> object:
    """Give `value` as JSON can hold it: None for a number that is not finite.

    >>> [plain(x) for x in (0.5, float("nan"), float("-inf"), "causal")]
    [0.5, None, None, 'causal']
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
