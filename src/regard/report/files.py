"""Files: the package's assets and the pages made of them, files written atomically, numbers safe for JSON."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from ..errors import FileError

__all__ = ["asset", "content_policy", "filled", "joined_scripts", "json_safe", "source_hash", "write_text"]


def asset(package: str, name: str) -> str:
    """The text of an asset of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def filled(package: str, name: str, pieces: Mapping[str, str]) -> str:
    """An asset with every {{name}} replaced by its piece."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], asset(package, name))


def joined_scripts(package: str, names: Iterable[str]) -> str:
    """Several scripts as one, without indentation and lines of comment, which are a tenth of a small page."""
    parts = "\n".join(asset(package, name) for name in names)
    return re.sub(r"^[ ]+", "", re.sub(r"^[ ]*//.*\n", "", parts, flags=re.MULTILINE), flags=re.MULTILINE)


def source_hash(text: str) -> str:
    """What a content security policy calls an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def content_policy(style: str, script: str) -> str:
    """The content security policy of a page that needs no network: it admits one inline style and one script."""
    return (
        f"default-src 'none'; style-src '{source_hash(style)}'; script-src '{source_hash(script)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )


def json_safe(value: object) -> object:
    """`value`, or None for a number that is not finite, which JSON cannot hold.

    >>> [json_safe(x) for x in (0.5, float("nan"), float("-inf"), "causal")]
    [0.5, None, None, 'causal']
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: str | os.PathLike[str], text: str, who: str) -> Path:
    """Write `text` to `path` atomically: to a temporary file beside it, which is then renamed.

    If `path` is a link, it stays one, and the file that it leads to is written. A file that exists keeps its
    permissions. A pipe or a device is written to, as a file must not take its place.
    """
    place = Path(path)
    try:
        try:
            existing = open(place, "w", encoding="utf-8", newline="\n", opener=_open_untouched)  # noqa: SIM115
        except FileNotFoundError:
            _replace(os.path.realpath(place), text, None)
            return place
        with existing:
            status = os.fstat(existing.fileno())
            if stat.S_ISREG(status.st_mode):
                _replace(os.path.realpath(place), text, status)
            else:
                existing.write(text)  # to the descriptor we have: a pipe ends for its reader once it is closed
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(
            f"{who}: {place} cannot be written: {reason}. Give the path of a file in an existing folder that "
            f"you may write to."
        ) from error
    return place


def _open_untouched(path: str, _: int) -> int:
    """Open a file for writing that exists, without emptying it. The system follows links, with its rules about them."""
    return os.open(path, os.O_WRONLY | getattr(os, "O_NOCTTY", 0))


def _replace(place: str, text: str, old: os.stat_result | None) -> None:
    folder, name = os.path.split(place)
    part = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(part, flags, 0o666 if old is None else 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            if old is not None:
                with suppress(OSError, AttributeError):  # only root may give files away
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                os.chmod(part, stat.S_IMODE(old.st_mode))
            file.write(text)
        os.replace(part, place)
    finally:
        with suppress(OSError):
            os.unlink(part)
