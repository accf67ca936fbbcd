"""The index of a memory on disk: its shards, their deleted rows, and the next id."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..errors import FileError
from .atomic_write import atomic_write

__all__ = ["DTYPES", "INDEX_FILE", "Index", "Shard", "fingerprint", "load_index", "save_index"]

INDEX_FILE = "index.json"
_FORMAT, _VERSION = "regard.Memory", 1
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Shard:
    """One file of rows, written once and never changed."""

    name: str
    rows: int
    lowest: int  # id
    highest: int  # id
    listed: bool  # whether the file stores the ids; otherwise they run from lowest to highest
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


def fingerprint(index: Index) -> str:
    """Describe the state of a memory; two states have different descriptions."""
    return f"{index.live_rows} rows in {len(index.shards)} shards, checksum {_checksum(asdict(index)):08x}"


def save_index(index: Index, folder: Path) -> None:
    """Replace the index of a folder atomically."""
    content = asdict(index)
    page = {"format": _FORMAT, "version": _VERSION, "checksum": _checksum(content), **content}
    text = json.dumps(page, ensure_ascii=False, separators=(",", ":"))
    atomic_write(folder / INDEX_FILE, [text.encode()])


def load_index(folder: Path, who: str) -> Index:
    """Read and check the index of a folder."""
    path = folder / INDEX_FILE
    try:
        page = json.loads(path.read_bytes())
    except FileNotFoundError:
        kind = "is a folder without one" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        raise FileError(
            f"{who}: a memory is a folder with {INDEX_FILE}, and {folder} {kind}. Give the path that was passed to "
            f"save()."
        ) from None
    except NotADirectoryError:
        raise FileError(
            f"{who}: a memory is a folder, and {folder} is a file. Give the path that was passed to save()."
        ) from None
    except OSError as error:
        raise FileError(f"{who}: {path} cannot be read: {error.strerror or error}.") from error
    except ValueError:  # not UTF-8, or not JSON
        raise _damaged(who, path, "it is not JSON") from None
    if not isinstance(page, dict) or page.pop("format", None) != _FORMAT:
        raise _damaged(who, path, f"it does not say {_FORMAT}")
    version, checksum = page.pop("version", None), page.pop("checksum", None)
    if version != _VERSION:
        raise FileError(
            f"{who}: {path} has version {version!r}, and this release of regard reads version {_VERSION}. "
            f"Read it with the release that wrote it."
        )
    if checksum != _checksum(page):
        raise _damaged(who, path, "its checksum does not match")
    try:
        return _parse(page)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(who, path, str(error)) from None


def _parse(page: dict[str, Any]) -> Index:
    shards = []
    for entry in page.pop("shards"):
        deleted = tuple((int(start), int(stop)) for start, stop in entry.pop("deleted"))
        shard = Shard(**entry, deleted=deleted)
        edges = [edge for pair in deleted for edge in pair]
        if not re.fullmatch(r"rows-\d+\.safetensors", shard.name):  # so that it is never a path
            raise ValueError(f"{shard.name!r} is not the name of a shard")
        if edges != sorted(edges) or (edges and not 0 <= edges[0] <= edges[-1] <= shard.rows):
            raise ValueError(f"{shard.name} has deletions outside its rows")
        shards.append(shard)
    index = Index(**page, shards=tuple(shards))
    if index.dtype not in DTYPES:
        raise ValueError(f"the dtype is {index.dtype!r}")
    if set(page) != {field.name for field in fields(Index)} - {"shards"}:
        raise ValueError("a field is missing")
    return index


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, ensure_ascii=False).encode())


def _damaged(who: str, path: Path, reason: str) -> FileError:
    return FileError(
        f"{who}: {path} is not the index of a memory, or is incomplete: {reason}. Restore the folder from a copy."
    )
