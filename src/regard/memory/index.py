"""The index of a memory on disk: which shards there are, which of their rows are deleted, which id comes next."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..errors import FileError
from .atomic_write import put

__all__ = ["DTYPES", "NAME", "Index", "Shard", "load", "state", "store"]

NAME = "index.json"
_FORMAT, _VERSION = "regard.Memory", 1
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Shard:
    """One file of rows, written once and never changed."""

    name: str
    rows: int
    lowest: int  # of its ids
    highest: int
    listed: bool  # whether the file holds the ids; if not, they run from lowest to highest
    deleted: tuple[tuple[int, int], ...] = ()  # ranges of rows, in order, [start, stop)

    @property
    def alive(self) -> int:
        return self.between(0, self.rows)

    def between(self, first: int, last: int) -> int:
        """How many rows from first to last are not deleted."""
        gone = sum(max(min(stop, last) - max(start, first), 0) for start, stop in self.deleted)
        return last - first - gone


@dataclass(frozen=True)
class Index:
    """All that a memory on disk is, but for the numbers in its rows."""

    key_dim: int
    value_dim: int
    dtype: str
    score: str | None
    next_id: int = 0
    next_shard: int = 0
    shards: tuple[Shard, ...] = ()

    @property
    def alive(self) -> int:
        return sum(shard.alive for shard in self.shards)


def state(index: Index) -> str:
    """Tell one state of a memory from another."""
    return f"{index.alive} rows in {len(index.shards)} shards, checksum {_checksum(asdict(index)):08x}"


def store(index: Index, folder: Path) -> None:
    """Replace the index of a folder in one step."""
    content = asdict(index)
    page = {"format": _FORMAT, "version": _VERSION, "checksum": _checksum(content), **content}
    text = json.dumps(page, ensure_ascii=False, separators=(",", ":"))
    put(folder / NAME, [text.encode()])


def load(folder: Path, who: str) -> Index:
    """Read and check the index of a folder."""
    place = folder / NAME
    try:
        page = json.loads(place.read_bytes())
    except FileNotFoundError:
        kind = "is a folder without one" if folder.is_dir() else "is a file" if folder.exists() else "is not there"
        raise FileError(
            f"{who}: a memory is a folder with {NAME}, and {folder} {kind}. Give the path that save() was given."
        ) from None
    except NotADirectoryError:
        raise FileError(f"{who}: a memory is a folder, and {folder} is a file. Give the path of save().") from None
    except OSError as error:
        raise FileError(f"{who}: {place} cannot be read: {error.strerror or error}.") from error
    except ValueError:  # not UTF-8, or not JSON
        raise _foreign(who, place, "it is not JSON") from None
    if not isinstance(page, dict) or page.pop("format", None) != _FORMAT:
        raise _foreign(who, place, f"it does not say {_FORMAT}")
    version, checksum = page.pop("version", None), page.pop("checksum", None)
    if version != _VERSION:
        raise FileError(
            f"{who}: {place} is of version {version!r}, and this regard reads version {_VERSION}. "
            f"Read it with the regard that wrote it."
        )
    if checksum != _checksum(page):
        raise _foreign(who, place, "its checksum is another")
    try:
        return _parsed(page)
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(who, place, str(error)) from None


def _parsed(page: dict[str, Any]) -> Index:
    shards = []
    for entry in page.pop("shards"):
        deleted = tuple((int(start), int(stop)) for start, stop in entry.pop("deleted"))
        shard = Shard(**entry, deleted=deleted)
        edges = [edge for pair in deleted for edge in pair]
        if not re.fullmatch(r"rows-\d+\.safetensors", shard.name):  # a name is no path
            raise ValueError(f"{shard.name!r} is no shard's name")
        if edges != sorted(edges) or (edges and not 0 <= edges[0] <= edges[-1] <= shard.rows):
            raise ValueError(f"{shard.name} has deletions outside of its rows")
        shards.append(shard)
    index = Index(**page, shards=tuple(shards))
    if index.dtype not in DTYPES:
        raise ValueError(f"the dtype is {index.dtype!r}")
    if set(page) != {field.name for field in fields(Index)} - {"shards"}:
        raise ValueError("a field is missing")
    return index


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, ensure_ascii=False).encode())


def _foreign(who: str, place: Path, reason: str) -> FileError:
    return FileError(
        f"{who}: {place} is not the index of a memory, or not all of it: {reason}. Restore the folder from a copy."
    )
