"""Rows on disk: a folder of shards with an index, one writer and many readers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, FileError
from .chunk import Chunk, concatenate
from .folder import Folder
from .in_memory_store import InMemorySnapshot
from .index import DTYPES, Index, IndexFile, Shard, fingerprint, load_index, open_folder, save_index
from .lock import WriterLock
from .partial_folder import OWN_FILE, partial_folder, sweep_partial_folders
from .shard_file import ShardFile, write_shard

__all__ = ["DiskSnapshot", "DiskStore", "Snapshot", "save_snapshot"]

_IDS_AT_ONCE = 1 << 20
_SHARD_BYTES = 1 << 26  # of the largest shards that are put together from smaller ones
_MERGED_SHARDS = 8  # of about the same size


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
        """Yield all rows in order, at most `chunk_rows` at a time, with their positions."""
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
        """The rows at 1-D positions."""
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

    def verified(self) -> DiskSnapshot:
        """The same rows, compared with their checksums even if the memory was opened without that."""
        return replace(self, files=tuple(replace(file, verify=True) for file in self.files))

    def verify(self, who: str) -> None:
        """Compare all bytes of all shards with their checksums, and name the shards that fail."""
        wrong: list[str] = []
        for file in self.files:
            try:
                file.file.verify()
            except FileError as error:
                wrong.append(str(error).removeprefix("Memory: "))
        if wrong:
            raise FileError(f"{who}: {len(wrong)} of {len(self.files)} shards failed. {' '.join(wrong)}")
        unknown = sum(file.shard.crc32 is None for file in self.files)
        if unknown:
            raise FileError(
                f"{who}: {unknown} of {len(self.files)} shards were written by a release without checksums, so nobody "
                f"can tell whether they are damaged. Memory.open(path, mode='a').compact() gives them checksums."
            )


Snapshot = InMemorySnapshot | DiskSnapshot
"""The rows of a memory at one moment: later writes and deletions do not change them."""


class _HeldIds(NamedTuple):
    """Some ids of one shard, and the rows that hold them."""

    shard: str
    ids: Tensor
    rows: Tensor


class _Loaded(NamedTuple):
    """One version of the index, and the shards that it names."""

    folder: Folder
    current: IndexFile
    files: dict[str, ShardFile]


class DiskStore:
    """A folder of shards with an index. After every public method, the folder is a memory that opens."""

    def __init__(
        self,
        path: Path,
        mode: str,
        device: torch.device,
        who: str,
        part: tuple[int, int] = (0, 1),
        verify: bool = True,
    ) -> None:
        self.path, self.device, self.part, self._verify = path, device, part, verify
        self._lock: WriterLock | None = None
        folder = open_folder(path, who)
        self._loaded = _Loaded(folder, load_index(folder, who), {})
        if mode == "a":
            with _as_file_error(who, path):
                self._lock = WriterLock(folder, who)
        try:
            self._load(who)
            if self._lock is not None:
                self._remove_leftovers()
                sweep_partial_folders(path.parent)
        except FileError:
            self.close()
            raise

    @property
    def index(self) -> Index:
        return self._loaded.current.content

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle a reader: the copy opens the folder again."""
        if self._lock is not None:
            raise ArgumentError(
                f"Memory: {self.path} is open for writing, and only one writer is allowed, so it has no copies. Open "
                f"another reader with Memory.open(path)."
            )
        return DiskStore, (self.path, "r", self.device, "Memory", self.part, self._verify)

    def snapshot(self) -> DiskSnapshot:
        if self._lock is None and not self._loaded.current.is_current(self._loaded.folder):
            self._load("Memory")  # a writer in another process has replaced the index, or the folder
        files = (replace(self._loaded.files[shard.name], shard=shard) for shard in self.index.shards)
        return DiskSnapshot(tuple(files), self.device, self.part)

    @property
    def fingerprint(self) -> str:
        """A description of the state that the last snapshot was taken of."""
        return fingerprint(self.index)

    def write(self, keys: Tensor, values: Tensor, ids: Tensor) -> None:
        """Add rows as one shard, together with the rows of small shards before it that have become too many."""
        self._check_lock("write")
        index, number = self.index, self.index.next_shard
        folder, limit, old = self._loaded.folder, _rows_per_shard(index), self.snapshot()
        kept = len(old.files) - _shards_to_merge([shard.live_rows for shard in index.shards], len(ids), limit)

        def change() -> Index:
            before = replace(old, files=old.files[kept:], device=torch.device("cpu")).verified().chunks(limit)
            rows = Chunk(*(x.detach().cpu() for x in (keys, values, ids)))
            shard = write_shard(folder, number, concatenate([*(chunk for chunk, _ in before), rows]), index.dtype)
            next_id = max(index.next_id, shard.highest + 1)
            shards = (*index.shards[:kept], shard)
            return replace(index, next_id=next_id, next_shard=number + 1, shards=shards)

        self._change("write", change)

    def contains(self, ids: Tensor) -> Tensor:
        """Return a bool per id: whether it is held."""
        ids = ids.cpu()
        found = torch.zeros_like(ids, dtype=torch.bool)
        for held in self._held_ids_near(ids):
            found |= torch.isin(ids, held.ids)
        return found

    def delete(self, ids: Tensor) -> None:
        self._check_lock("delete")
        deleted: dict[str, list[Tensor]] = {}
        for held in self._held_ids_near(ids.cpu()):
            rows = held.rows[torch.isin(held.ids, ids.cpu())]
            if len(rows):
                deleted.setdefault(held.shard, []).append(rows)
        shards = tuple(
            replace(s, deleted=_add_to_ranges(s.deleted, torch.cat(deleted[s.name]))) if s.name in deleted else s
            for s in self.index.shards
        )
        self._change("delete", lambda: replace(self.index, shards=shards))

    def compact(self) -> None:
        """Write the rows that are left into large shards, then remove the old ones."""
        self._check_lock("compact")
        folder, index, old = self._loaded.folder, self.index, self.snapshot()

        def change() -> Index:
            shards = tuple(_copy_rows(old, folder, index, index.next_shard))
            return replace(index, shards=shards, next_shard=index.next_shard + len(shards))

        self._change("compact", change)

    def _change(self, what: str, change: Callable[[], Index]) -> None:
        """Apply a change completely or not at all: `change` writes shards, and returns the index that names them."""
        who, before, complete = f"Memory.{what}", self._loaded, False
        try:
            with _as_file_error(who, self.path):
                save_index(change(), before.folder)
            complete = True
        finally:
            self._load(who)
            if not complete:
                self._remove_leftovers()
        for name in before.files.keys() - self._loaded.files.keys():
            with suppress(OSError):  # the change is complete; the next writer sweeps what is left
                before.folder.remove(name)

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

    def _check_lock(self, what: str) -> None:
        if self._lock is None:
            raise ArgumentError(
                f"Memory.{what}: {self.path} is open for reading. Open it with Memory.open(path, mode='a')."
            )
        self._lock.check(f"Memory.{what}")

    def _load(self, who: str) -> None:
        """Load the index and open its shards. A writer stays with its folder; a reader follows the path."""
        while True:
            folder, opened = self._loaded.folder, self._loaded.current.content
            if self._lock is None and not folder.is_at_its_path():
                folder = open_folder(self.path, who)
            current = load_index(folder, who)
            index = current.content
            if _kind(index) != _kind(opened):
                raise FileError(
                    f"{who}: {self.path} was replaced by a memory of another kind, {_kind(index)} instead of "
                    f"{_kind(opened)}. Open it again."
                )
            try:
                files = self._open_shards(folder, index, who)
            except FileError:
                if current.is_current(folder) or self._lock is not None:
                    raise
                continue  # a writer has replaced the index since, and removed shards that the old one named
            self._loaded = _Loaded(folder, current, files)
            return

    def _open_shards(self, folder: Folder, index: Index, who: str) -> dict[str, ShardFile]:
        """Open the shards of an index. Those that are open and unchanged stay open, up to a limit."""
        known = self._loaded.files if folder is self._loaded.folder else {}
        files: dict[str, ShardFile] = {}
        room = _most_open_files()
        for shard in index.shards:
            file = known.get(shard.name)
            if file is None or not file.holds(shard, folder):
                file = ShardFile.open(folder, shard, index, who, self._verify)
            room -= file.file.held_open
            if room < 0:
                file.file.release()
            files[shard.name] = file
        return files

    def _remove_leftovers(self) -> None:
        """Remove the files of a writer that did not finish."""
        folder = self._loaded.folder
        for name in folder.names():
            if OWN_FILE.fullmatch(name) and name not in self._loaded.files:
                with suppress(OSError):
                    folder.remove(name)


def save_snapshot(snapshot: Snapshot, index: Index, path: Path) -> None:
    """Write rows as a new folder, which appears complete or not at all."""
    who = "Memory.save"
    exists = FileError(f"{who}: {path} already exists. Give a new path, or remove it first.")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise exists
    sweep_partial_folders(path.parent)
    with _as_file_error(who, path), partial_folder(path) as folder:
        shards = tuple(_copy_rows(snapshot, folder, index, 0))
        save_index(replace(index, shards=shards, next_shard=len(shards)), folder)
        try:
            os.replace(folder.path, path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process or thread was faster
                raise exists from None
            raise
        Folder(path.parent).sync()


def _rows_per_shard(index: Index) -> int:
    return max(_SHARD_BYTES // ((index.key_dim + index.value_dim) * DTYPES[index.dtype].itemsize), 1)


def _shards_to_merge(rows: list[int], added: int, limit: int) -> int:
    """How many of the last shards are written again, together with the rows that are added.

    As soon as eight shards of about the same size follow each other, or fill half of `limit`, they become one. From
    that size on a shard stays as it is. So each row is copied O(log n) times, and small shards are few.

    >>> [_shards_to_merge([1] * ones, 1, 1000) for ones in (0, 6, 7)]
    [0, 0, 7]
    >>> _shards_to_merge([8] * 7 + [1] * 7, 1, 1000), _shards_to_merge([600, 200, 200], 200, 1000)
    (14, 2)
    """
    merged, total = 0, added
    while True:
        count, joined, full = merged, total, False
        for before in reversed(rows[: len(rows) - merged]):
            full = 2 * before >= limit or joined + before > limit
            if full or _size_class(before) > _size_class(total):
                break
            count, joined = count + 1, joined + before
        enough = count + 1 - merged >= _MERGED_SHARDS or (full and 2 * joined >= limit)
        if count == merged or not enough:
            return merged
        merged, total = count, joined


def _size_class(rows: int) -> int:
    """The logarithm to base 8, rounded down."""
    return (rows.bit_length() - 1) // 3


def _copy_rows(snapshot: Snapshot, folder: Folder, index: Index, start: int) -> Iterator[Shard]:
    """Write all rows as large shards, numbered from `start`."""
    for number, chunk in enumerate(_merge_chunks(snapshot, _rows_per_shard(index)), start):
        yield write_shard(folder, number, chunk, index.dtype)


def _merge_chunks(snapshot: Snapshot, shard_rows: int) -> Iterator[Chunk]:
    """Join consecutive small chunks into chunks of up to `shard_rows` rows."""
    parts: list[Chunk] = []
    count = 0
    for chunk, _ in snapshot.verified().chunks(shard_rows):
        if count + len(chunk.ids) > shard_rows:
            yield concatenate(parts)
            parts, count = [], 0
        parts.append(chunk)
        count += len(chunk.ids)
    if parts:
        yield concatenate(parts)


def _kind(index: Index) -> str:
    """What all rows of a memory have in common."""
    score = "no score" if index.score is None else index.score
    return f"key_dim={index.key_dim}, value_dim={index.value_dim}, {index.dtype}, {score}"


def _most_open_files() -> int:
    """How many shards one memory holds open: a quarter of the files that the process may open."""
    try:
        import resource
    except ImportError:
        return 128
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if limit == resource.RLIM_INFINITY else limit // 4


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
