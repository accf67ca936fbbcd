"""The index of a memory on disk: its shards, their deleted rows, and the next id."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import FileError
from .folder import FileIdentity, Folder, OpenFile

__all__ = [
    "DTYPES",
    "INDEX_FILE",
    "Index",
    "IndexFile",
    "Shard",
    "fingerprint",
    "load_index",
    "open_folder",
    "save_index",
]

INDEX_FILE = "index.json"
_FORMAT, _VERSION = "regard.Memory", 2
_VERSIONS = (1, 2)  # that can be read; shards of version 1 have no checksum
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Shard:
    """One file of rows, written once and never changed."""

    name: str
    rows: int
    lowest: int  # id
    highest: int  # id
    listed: bool  # whether the file stores the ids; otherwise they run from lowest to highest
    crc32: int | None  # of the whole file; None if version 1 wrote it
    deleted: tuple[tuple[int, int], ...] = ()  # sorted ranges of rows, [start, stop)

    @property
    def live_rows(self) -> int:
        """How many rows are not deleted."""
        return self.live_rows_in(0, self.rows)

    def live_rows_in(self, first: int, last: int) -> int:
        """How many of the rows [first, last) are not deleted."""
        deleted = sum(max(min(stop, last) - max(start, first), 0) for start, stop in self.deleted)
        return last - first - deleted


@dataclass(frozen=True)
class Index:
    """Everything about a memory on disk except the contents of its rows."""

    key_dim: int
    value_dim: int
    dtype: str
    score: str | None
    next_id: int = 0
    next_shard: int = 0
    shards: tuple[Shard, ...] = ()

    @property
    def live_rows(self) -> int:
        """How many rows are not deleted."""
        return sum(shard.live_rows for shard in self.shards)


class IndexFile(NamedTuple):
    """An index, and the file that it was read from."""

    content: Index
    file: OpenFile

    def is_current(self, folder: Folder) -> bool:
        """Whether the folder still has this index."""
        return folder.is_at_its_path() and self.file.identity == _identity(folder)


def fingerprint(index: Index) -> str:
    """Describe the state of a memory; two states have different descriptions."""
    return f"{index.live_rows} rows in {len(index.shards)} shards, checksum {_checksum(_content(index)):08x}"


def save_index(index: Index, folder: Folder) -> None:
    """Replace the index of a folder atomically."""
    content = _content(index)
    page = {"format": _FORMAT, "version": _VERSION, "checksum": _checksum(content), **content}
    text = json.dumps(page, ensure_ascii=False, separators=(",", ":"))
    folder.write(INDEX_FILE, [text.encode()])


def open_folder(path: Path, who: str) -> Folder:
    """Open the folder of a memory."""
    try:
        return Folder(path)
    except NotADirectoryError:
        raise FileError(
            f"{who}: a memory is a folder, and {path} is a file. Give the path that was passed to save()."
        ) from None
    except FileNotFoundError:
        raise FileError(
            f"{who}: a memory is a folder with {INDEX_FILE}, and {path} does not exist. Give the path that was passed "
            f"to save()."
        ) from None
    except OSError as error:
        raise FileError(f"{who}: {path} cannot be opened: {error.strerror or error}.") from error


def load_index(folder: Folder, who: str) -> IndexFile:
    """Read and check the index of a folder."""
    path = folder.path / INDEX_FILE
    try:
        file = folder.open_to_read(INDEX_FILE)
        page = json.loads(file.read())
    except FileNotFoundError:
        raise FileError(
            f"{who}: a memory is a folder with {INDEX_FILE}, and {folder.path} is a folder without one. Give the path "
            f"that was passed to save()."
        ) from None
    except OSError as error:
        raise FileError(f"{who}: {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        raise _damaged(who, path, "it is not JSON") from None
    if not isinstance(page, dict) or page.pop("format", None) != _FORMAT:
        raise _damaged(who, path, f"it does not say {_FORMAT}")
    version, checksum = page.pop("version", None), page.pop("checksum", None)
    if version not in _VERSIONS:
        raise FileError(
            f"{who}: {path} has version {version!r}, and this release of regard reads versions up to {_VERSION}. "
            f"Read it with the release that wrote it."
        )
    try:
        if checksum != _checksum(page):
            raise ValueError("its checksum does not match")
        return IndexFile(_parse(page, version), file)
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise _damaged(who, path, str(error)) from None


def _identity(folder: Folder) -> FileIdentity | None:
    try:
        return folder.identity(INDEX_FILE)
    except OSError:
        return None


def _content(index: Index) -> dict[str, Any]:
    """An index as it is written; checksums are taken of this."""
    return {**vars(index), "shards": [vars(shard) for shard in index.shards]}


def _parse(page: dict[str, Any], version: int) -> Index:
    new_fields: dict[str, Any] = {"crc32": None} if version == 1 else {}
    shards = tuple(_parse_shard(**entry, **new_fields) for entry in page.pop("shards"))
    index = Index(**page, shards=shards)
    if set(page) != {field.name for field in fields(Index)} - {"shards"}:
        raise ValueError("a field is missing")
    if index.dtype not in DTYPES:
        raise ValueError(f"the dtype is {index.dtype!r}")
    if not isinstance(index.score, str | None):
        raise ValueError(f"the score is {index.score!r}")
    if not _are_whole(index.key_dim - 1, index.value_dim - 1, index.next_id, index.next_shard):
        raise ValueError("a number in it is out of its range")
    return index


def _parse_shard(deleted: list[tuple[int, int]], **entry: Any) -> Shard:
    shard = Shard(**entry, deleted=tuple((start, stop) for start, stop in deleted))
    edges = [edge for pair in shard.deleted for edge in pair]
    if not re.fullmatch(r"rows-\d+\.safetensors", shard.name):  # so that it is never a path
        raise ValueError(f"{shard.name!r} is not the name of a shard")
    if not _are_whole(shard.rows, shard.lowest, shard.highest, *edges) or not isinstance(shard.listed, bool):
        raise ValueError(f"{shard.name} has an entry of the wrong type")
    if shard.crc32 is not None and not _are_whole(shard.crc32):
        raise ValueError(f"{shard.name} has a checksum of the wrong type")
    if not shard.listed and shard.highest - shard.lowest + 1 != shard.rows:
        raise ValueError(f"{shard.name} has more or fewer ids than rows")
    if edges != sorted(edges) or (edges and edges[-1] > shard.rows):
        raise ValueError(f"{shard.name} has deletions outside its rows")
    return shard


def _are_whole(*numbers: object) -> bool:
    """Whether all are whole numbers from 0 to 2⁶³ − 1."""
    return all(type(x) is int and 0 <= x < 2**63 for x in numbers)


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, ensure_ascii=False).encode())


def _damaged(who: str, path: Path, reason: str) -> FileError:
    return FileError(
        f"{who}: {path} is not the index of a memory, or is incomplete: {reason}. Restore the folder from a copy."
    )
