"""Rows on disk: a folder of shards with an index, one writer and many readers."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, FileError
from .atomic_write import fsync_folder
from .index import INDEX_FILE, Index, Shard, fingerprint, load_index, save_index
from .lock import WriterLock
from .shard_file import ShardFile, write_shard
from .snapshot import Chunk, Snapshot, concatenate

__all__ = ["DiskSnapshot", "DiskStore", "save_snapshot"]

_IDS_AT_ONCE = 1 << 20
_OWN_FILES = re.compile(r"(rows-\d+\.safetensors|\.(rows-\d+\.safetensors|index\.json)\.part)")


class _ShardRange(NamedTuple):
    """The rows [first, last) of one shard; `offset` is the position of the shard's row 0."""

    file: ShardFile
    offset: int
    first: int
    last: int


@dataclass(frozen=True)
class DiskSnapshot:
    """The rows of a folder, as one version of its index lists them."""

    files: tuple[ShardFile, ...]
    device: torch.device
    part: tuple[int, int] = (0, 1)
    """(rank, ranks): the positions are divided into `ranks` equal ranges, and range `rank` is read."""

    @property
    def count(self) -> int:
        return sum(part.file.shard.live_rows_in(part.first, part.last) for part in self._ranges())

    def chunks(self, chunk_rows: int) -> Iterator[tuple[Chunk, Tensor]]:
        for file, offset, first, last in self._ranges():
            for start in range(first, last, chunk_rows):
                stop = min(start + chunk_rows, last)
                live, positions = file.live(start, stop), torch.arange(offset + start, offset + stop)
                rows = [file.map(name, start, stop) for name in Chunk._fields]
                if live is not None:
                    positions, *rows = (x.index_select(0, live) for x in (positions, *rows))
                if len(positions):
                    yield Chunk(*(x.to(self.device) for x in rows)), positions.to(self.device)

    def _ranges(self) -> Iterator[_ShardRange]:
        """Yield the ranges of rows that belong to this part."""
        (rank, ranks), total = self.part, sum(file.shard.rows for file in self.files)
        low, high = total * rank // ranks, total * (rank + 1) // ranks
        offset = 0
        for file in self.files:
            first, last = max(low - offset, 0), min(high - offset, file.shard.rows)
            if first < last:
                yield _ShardRange(file, offset, first, last)
            offset += file.shard.rows

    def take(self, positions: Tensor) -> Chunk:
        rows: list[Tensor] = []
        positions = positions.cpu()
        offset = 0
        for file in self.files:
            inside = ((positions >= offset) & (positions < offset + file.shard.rows)).nonzero().squeeze(-1)
            if len(inside):
                parts = [file.take(name, positions[inside] - offset) for name in Chunk._fields]
                if not rows:
                    rows = [x.new_empty(len(positions), *x.shape[1:]) for x in parts]
                for whole, part in zip(rows, parts, strict=True):
                    whole[inside] = part
            offset += file.shard.rows
        return Chunk(*(x.to(self.device) for x in rows))


class _HeldIds(NamedTuple):
    """Some ids of one shard, and the rows that hold them."""

    shard: str
    ids: Tensor
    rows: Tensor


class DiskStore:
    """A folder of shards with an index. After every public method, the folder is a memory that opens."""

    def __init__(self, folder: Path, mode: str, device: torch.device, who: str, part: tuple[int, int] = (0, 1)) -> None:
        self.folder, self.device, self.part = folder, device, part
        self._lock: WriterLock | None = None
        self._files: dict[str, ShardFile] = {}
        self._stamp: tuple[int, int, int] | None = None
        self.index = load_index(folder, who)
        if mode == "a":
            with _as_file_error(who, folder):
                self._lock = WriterLock(folder, who)
        try:
            self._load(who)
            if self._lock is not None:
                with _as_file_error(who, folder):
                    self._remove_leftovers()
        except FileError:
            self.close()
            raise

    @property
    def count(self) -> int:
        return self.snapshot().count

    @property
    def next_id(self) -> int:
        return self.index.next_id

    def close(self) -> None:
        """Allow another process to write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def snapshot(self) -> DiskSnapshot:
        self._reload_if_changed()
        files = (replace(self._files[shard.name], shard=shard) for shard in self.index.shards)
        return DiskSnapshot(tuple(files), self.device, self.part)

    @property
    def fingerprint(self) -> str:
        """A description of the state that the last snapshot was taken of."""
        return fingerprint(self.index)

    def write(self, keys: Tensor, values: Tensor, ids: Tensor) -> None:
        self._require_lock("write")
        shard = _describe_shard(self.index.next_shard, ids)
        next_id = max(self.index.next_id, shard.highest + 1)
        shards = (*self.index.shards, shard)
        after = replace(self.index, next_id=next_id, next_shard=self.index.next_shard + 1, shards=shards)

        def change() -> None:
            write_shard(self.folder / shard.name, keys, values, ids if shard.listed else None, self.index.dtype)
            save_index(after, self.folder)

        self._change("write", change)

    def contains(self, ids: Tensor) -> Tensor:
        """Return a bool per id: whether it is held."""
        ids = ids.cpu()
        found = torch.zeros_like(ids, dtype=torch.bool)
        for held in self._held_ids_near(ids):
            found |= torch.isin(ids, held.ids)
        return found

    def delete(self, ids: Tensor) -> None:
        self._require_lock("delete")
        deleted: dict[str, list[Tensor]] = {}
        for held in self._held_ids_near(ids.cpu()):
            rows = held.rows[torch.isin(held.ids, ids.cpu())]
            if len(rows):
                deleted.setdefault(held.shard, []).append(rows)
        shards = tuple(
            replace(s, deleted=_add_to_ranges(s.deleted, torch.cat(deleted[s.name]))) if s.name in deleted else s
            for s in self.index.shards
        )
        self._change("delete", lambda: save_index(replace(self.index, shards=shards), self.folder))

    def compact(self, shard_rows: int) -> None:
        """Write the rows that are left into shards of `shard_rows` rows, then remove the old ones."""
        self._require_lock("compact")
        old, number = self.snapshot(), self.index.next_shard

        def change() -> None:
            shards = tuple(_copy_rows(old, self.folder, self.index.dtype, shard_rows, number))
            save_index(replace(self.index, shards=shards, next_shard=number + len(shards)), self.folder)

        self._change("compact", change)

    def _change(self, what: str, change: Callable[[], None]) -> None:
        """Apply a change completely or not at all, then load the index that is on disk."""
        who = f"Memory.{what}"
        try:
            with _as_file_error(who, self.folder):
                change()
        finally:
            self._load(who)
            with _as_file_error(who, self.folder):
                self._remove_leftovers()

    def _held_ids_near(self, ids: Tensor) -> Iterator[_HeldIds]:
        """Yield the held ids of all shards that may contain some of `ids`."""
        lowest, highest = int(ids.min()), int(ids.max())
        for file in self.snapshot().files:
            shard = file.shard
            if shard.highest < lowest or shard.lowest > highest:
                continue
            for start in range(0, shard.rows, _IDS_AT_ONCE):
                stop = min(start + _IDS_AT_ONCE, shard.rows)
                live = file.live(start, stop)
                live = torch.arange(stop - start) if live is None else live
                yield _HeldIds(shard.name, file.map("ids", start, stop)[live], live + start)

    def _require_lock(self, what: str) -> None:
        if self._lock is None:
            raise ArgumentError(
                f"Memory.{what}: {self.folder} is open for reading. Open it with Memory.open(path, mode='a')."
            )

    def _reload_if_changed(self) -> None:
        """Load the index again if a writer in another process has replaced it."""
        if self._lock is None and self._stamp != _stamp(self.folder):
            self._load("Memory")

    def _load(self, who: str) -> None:
        stamp, index = _stamp(self.folder), load_index(self.folder, who)
        known = self._files
        try:
            files = {s.name: known.get(s.name) or ShardFile.open(self.folder, s, index, who) for s in index.shards}
        except FileError:
            if stamp == _stamp(self.folder):
                raise
            self._load(who)  # a writer has replaced the index since, and removed shards that the old one named
            return
        self._stamp, self.index, self._files = stamp, index, files

    def _remove_leftovers(self) -> None:
        """Remove the files of a writer that did not finish."""
        for path in self.folder.iterdir():
            if _OWN_FILES.fullmatch(path.name) and path.name not in self._files:
                path.unlink(missing_ok=True)


def save_snapshot(snapshot: Snapshot, index: Index, path: Path, shard_rows: int) -> None:
    """Write rows as a new folder, which appears complete or not at all."""
    who = "Memory.save"
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileError(f"{who}: {path} already exists. Give a new path, or remove it first.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _as_file_error(who, path):
        try:
            partial.mkdir()
            shards = tuple(_copy_rows(snapshot, partial, index.dtype, shard_rows, 0))
            save_index(replace(index, shards=shards, next_shard=len(shards)), partial)
            os.replace(partial, path)
            fsync_folder(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _describe_shard(number: int, ids: Tensor) -> Shard:
    """Build the index entry of a new shard; ids that run on without a gap are not stored in its file."""
    lowest, highest = int(ids.min()), int(ids.max())
    listed = not torch.equal(ids.cpu(), torch.arange(lowest, lowest + len(ids)))
    return Shard(f"rows-{number:06d}.safetensors", len(ids), lowest, highest, listed)


def _copy_rows(snapshot: Snapshot, folder: Path, dtype: str, shard_rows: int, start: int) -> Iterator[Shard]:
    """Write all rows as shards, numbered from `start`."""
    for number, chunk in enumerate(_merge_chunks(snapshot, shard_rows), start):
        shard = _describe_shard(number, chunk.ids)
        write_shard(folder / shard.name, chunk.keys, chunk.values, chunk.ids if shard.listed else None, dtype)
        yield shard


def _merge_chunks(snapshot: Snapshot, shard_rows: int) -> Iterator[Chunk]:
    """Join consecutive small chunks into chunks of up to `shard_rows` rows."""
    parts: list[Chunk] = []
    count = 0
    for chunk, _ in snapshot.chunks(shard_rows):
        if count + len(chunk.ids) > shard_rows:
            yield concatenate(parts)
            parts, count = [], 0
        parts.append(chunk)
        count += len(chunk.ids)
    if parts:
        yield concatenate(parts)


def _add_to_ranges(deleted: tuple[tuple[int, int], ...], rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Add rows to sorted ranges [start, stop), and merge ranges that touch."""
    rows = rows.sort().values
    breaks = (rows.diff() != 1).nonzero().squeeze(-1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    added = [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in pairwise(edges)]
    merged: list[tuple[int, int]] = []
    for start, stop in sorted([*deleted, *added]):
        if merged and merged[-1][1] >= start:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _stamp(folder: Path) -> tuple[int, int, int] | None:
    """Identify the current version of the index file without reading it."""
    try:
        status = os.stat(folder / INDEX_FILE)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@contextmanager
def _as_file_error(who: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a FileError that says what to do."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"{who}: {path} cannot be written: {error.strerror or error}. No stored row is lost; free some space, or "
            f"get permission to write there, and try again."
        ) from error
