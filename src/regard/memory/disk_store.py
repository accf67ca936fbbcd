"""Rows on disk: a folder of shards, appended to by one, read by many."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ArgumentError, FileError
from . import index as indices
from . import shard_file as shards
from .atomic_write import settle
from .index import Index, Shard
from .lock import Lock
from .shard_file import File
from .snapshot import Chunk, Source, joined

__all__ = ["Mapped", "Store", "save"]

_SCAN = 1 << 20  # ids looked at together
_OURS = re.compile(r"(rows-\d+\.safetensors|\.(rows-\d+\.safetensors|index\.json)\.part)")


@dataclass(frozen=True)
class Mapped:
    """The rows of a folder as one index tells of them."""

    files: tuple[File, ...]
    device: torch.device
    part: tuple[int, int] = (0, 1)
    """Which of so many equal runs of places is read."""

    @property
    def count(self) -> int:
        return sum(file.shard.between(first, last) for file, _, first, last in self._runs())

    def chunks(self, size: int) -> Iterator[tuple[Chunk, Tensor]]:
        for file, before, first, last in self._runs():
            for start in range(first, last, size):
                stop = min(start + size, last)
                kept, places = file.keep(start, stop), torch.arange(before + start, before + stop)
                rows = [file.map(name, start, stop) for name in Chunk._fields]
                if kept is not None:
                    places, *rows = (x.index_select(0, kept) for x in (places, *rows))
                if len(places):
                    yield Chunk(*(x.to(self.device) for x in rows)), places.to(self.device)

    def _runs(self) -> Iterator[tuple[File, int, int, int]]:
        """The files that are read, the place of each one's first row, and from which row to which."""
        (rank, ranks), total = self.part, sum(file.shard.rows for file in self.files)
        low, high = total * rank // ranks, total * (rank + 1) // ranks
        before = 0
        for file in self.files:
            first, last = max(low - before, 0), min(high - before, file.shard.rows)
            if first < last:
                yield file, before, first, last
            before += file.shard.rows

    def at(self, places: Tensor) -> Chunk:
        rows: list[Tensor] = []
        places = places.cpu()
        before = 0
        for file in self.files:
            chosen = ((places >= before) & (places < before + file.shard.rows)).nonzero().squeeze(-1)
            if len(chosen):
                parts = [file.rows(name, places[chosen] - before) for name in Chunk._fields]
                if not rows:
                    rows = [x.new_empty(len(places), *x.shape[1:]) for x in parts]
                for whole, part in zip(rows, parts, strict=True):
                    whole[chosen] = part
            before += file.shard.rows
        return Chunk(*(x.to(self.device) for x in rows))


class Store:
    """A folder of shards with an index; every public step leaves a memory on disk that opens."""

    def __init__(self, folder: Path, mode: str, device: torch.device, who: str, part: tuple[int, int] = (0, 1)) -> None:
        self.folder, self.device, self.part = folder, device, part
        self._lock: Lock | None = None
        self._files: dict[str, File] = {}
        self._stamp: tuple[int, int, int] | None = None
        self.index = indices.load(folder, who)
        if mode == "a":
            with _told(who, folder):
                self._lock = Lock(folder, who)
        try:
            self._load(who)
            if self._lock is not None:
                with _told(who, folder):
                    self._sweep()
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
        """Let another write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def snapshot(self) -> Mapped:
        self._follow()
        listed = (replace(self._files[shard.name], shard=shard) for shard in self.index.shards)
        return Mapped(tuple(listed), self.device, self.part)

    @property
    def state(self) -> str:
        """What the last snapshot was of."""
        return indices.state(self.index)

    def write(self, keys: Tensor, values: Tensor, ids: Tensor) -> None:
        self._writable("write")
        lowest, highest = int(ids.min()), int(ids.max())
        listed = not torch.equal(ids.cpu(), torch.arange(lowest, lowest + len(ids)))
        shard = Shard(f"rows-{self.index.next_shard:06d}.safetensors", len(ids), lowest, highest, listed)
        shards_after = (*self.index.shards, shard)
        next_id = max(self.index.next_id, highest + 1)
        after = replace(self.index, next_id=next_id, next_shard=self.index.next_shard + 1, shards=shards_after)

        def change() -> None:
            shards.write(self.folder / shard.name, keys, values, ids if listed else None, self.index.dtype)
            indices.store(after, self.folder)

        self._change("write", change)

    def present(self, ids: Tensor) -> Tensor:
        """Say which of some ids are held."""
        ids = ids.cpu()
        found = torch.zeros_like(ids, dtype=torch.bool)
        for _, held, _ in self._ids(ids):
            found |= torch.isin(ids, held)
        return found

    def delete(self, ids: Tensor) -> None:
        self._writable("delete")
        gone: dict[str, list[Tensor]] = {}
        for name, held, rows in self._ids(ids.cpu()):
            hit = rows[torch.isin(held, ids.cpu())]
            if len(hit):
                gone.setdefault(name, []).append(hit)
        left = tuple(
            replace(s, deleted=_merged(s.deleted, torch.cat(gone[s.name]))) if s.name in gone else s
            for s in self.index.shards
        )
        self._change("delete", lambda: indices.store(replace(self.index, shards=left), self.folder))

    def compact(self, size: int) -> None:
        """Write the rows that are left into shards of `size` rows, then forget the old ones."""
        self._writable("compact")
        old, number = self.snapshot(), self.index.next_shard

        def change() -> None:
            made = tuple(_copied(old, self.folder, self.index.dtype, size, number))
            indices.store(replace(self.index, shards=made, next_shard=number + len(made)), self.folder)

        self._change("compact", change)

    def _change(self, what: str, change: Callable[[], None]) -> None:
        """Do it, or leave all as it was; either way the memory is what the index on disk says."""
        who = f"Memory.{what}"
        try:
            with _told(who, self.folder):
                change()
        finally:
            self._load(who)
            with _told(who, self.folder):
                self._sweep()

    def _ids(self, ids: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The held ids that may be among some ids: shard, ids, rows."""
        lowest, highest = int(ids.min()), int(ids.max())
        for file in self.snapshot().files:
            shard = file.shard
            if shard.highest < lowest or shard.lowest > highest:
                continue
            for start in range(0, shard.rows, _SCAN):
                stop = min(start + _SCAN, shard.rows)
                kept = file.keep(start, stop)
                kept = torch.arange(stop - start) if kept is None else kept
                yield shard.name, file.map("ids", start, stop)[kept], kept + start

    def _writable(self, what: str) -> None:
        if self._lock is None:
            raise ArgumentError(
                f"Memory.{what}: {self.folder} is open for reading. Open it with Memory.open(path, mode='a')."
            )

    def _follow(self) -> None:
        """See what a writer elsewhere has done since."""
        if self._lock is None and self._stamp != _stamp(self.folder):
            self._load("Memory")

    def _load(self, who: str) -> None:
        stamp, index = _stamp(self.folder), indices.load(self.folder, who)
        known = self._files
        try:
            files = {s.name: known.get(s.name) or File.open(self.folder, s, index, who) for s in index.shards}
        except FileError:
            if stamp == _stamp(self.folder):
                raise
            self._load(who)  # a writer has replaced the index meanwhile, and what the old one named
            return
        self._stamp, self.index, self._files = stamp, index, files

    def _sweep(self) -> None:
        """Remove what a writer left that did not come to its end."""
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in self._files:
                path.unlink(missing_ok=True)


def save(source: Source, index: Index, path: Path, size: int) -> None:
    """Write rows as a new folder, which is there whole or not at all."""
    who = "Memory.save"
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileError(f"{who}: {path} is there already. Give a new path, or remove it first.")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _told(who, path):
        try:
            part.mkdir()
            made = tuple(_copied(source, part, index.dtype, size, 0))
            indices.store(replace(index, shards=made, next_shard=len(made)), part)
            os.replace(part, path)
            settle(path.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _copied(source: Source, folder: Path, dtype: str, size: int, number: int) -> Iterator[Shard]:
    for chunk in _gathered(source, size):
        lowest, highest = int(chunk.ids.min()), int(chunk.ids.max())
        listed = not torch.equal(chunk.ids.cpu(), torch.arange(lowest, lowest + len(chunk.ids)))
        name = f"rows-{number:06d}.safetensors"
        shards.write(folder / name, chunk.keys, chunk.values, chunk.ids if listed else None, dtype)
        yield Shard(name, len(chunk.ids), lowest, highest, listed)
        number += 1


def _gathered(source: Source, size: int) -> Iterator[Chunk]:
    """Join the rows of a source into chunks of `size` rows, where its own are smaller."""
    parts: list[Chunk] = []
    count = 0
    for chunk, _ in source.chunks(size):
        if count + len(chunk.ids) > size:
            yield joined(parts)
            parts, count = [], 0
        parts.append(chunk)
        count += len(chunk.ids)
    if parts:
        yield joined(parts)


def _merged(deleted: tuple[tuple[int, int], ...], rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Ranges that hold more rows."""
    rows = rows.sort().values
    breaks = (rows.diff() != 1).nonzero().squeeze(-1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    new = [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in pairwise(edges)]
    merged: list[tuple[int, int]] = []
    for start, stop in sorted([*deleted, *new]):
        if merged and merged[-1][1] >= start:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _stamp(folder: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(folder / indices.NAME)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextmanager
def _told(who: str, place: Path) -> Iterator[None]:
    """Turn the system's refusals into one error that says what to do."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"{who}: {place} cannot be written: {error.strerror or error}. Nothing that it held is lost; make room, or "
            f"get the right to write there, and try again."
        ) from error
