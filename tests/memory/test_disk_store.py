"""The folder of a memory: it is replaced, compacted and appended to while others read it."""

from __future__ import annotations

import math
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from memory_rows import held, numbered, saved
from regard.errors import FileError
from regard.memory import Memory, disk_store
from regard.memory.disk_store import DiskSnapshot, _shards_to_merge
from regard.memory.folder import Folder


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda opened: None)


def ids_of(snapshot: DiskSnapshot) -> list[int]:
    return [i for chunk, _ in snapshot.chunks(3) for i in chunk.ids.tolist()]


def swap(path: Path, new: Path, by: str) -> None:
    """Let `path` lead to the folder `new`."""
    if by == "link":
        link = path.with_name("link")
        link.symlink_to(new)
        os.replace(link, path)
    else:
        os.rename(path, path.with_name(f"old-{new.name}"))
        os.rename(new, path)


@pytest.mark.parametrize("by", ["link", "rename"])
def test_a_reader_follows_its_path_to_another_folder(by: str, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    saved(tmp_path / "first", 5)
    if by == "link":
        path.symlink_to(tmp_path / "first")
    else:
        os.rename(tmp_path / "first", path)
    memory = Memory(2, 1)
    memory.write(*numbered(70, 73)[:2], ids=[72, 71, 70])  # a shard of the same name with another layout
    memory.write(torch.zeros(2, 2), torch.zeros(2, 1), ids=[0, 1])
    memory.delete([0, 1, 71])
    memory.save(tmp_path / "second")
    other = Memory(1, 2, dtype=torch.float64)
    other.write(torch.ones(5, 1).double(), torch.ones(5, 2).double())
    other.save(tmp_path / "third")

    reader = Memory.open(path)
    assert held(reader) == [0, 1, 2, 3, 4]
    before = reader._snapshot("read")
    swap(path, tmp_path / "second", by)
    chunks = list(reader)
    assert [chunk.ids.tolist() for chunk in chunks] == [[72, 70]]
    assert torch.equal(chunks[0].keys, numbered(70, 73)[0][[0, 2]])
    assert ids_of(before) == [0, 1, 2, 3, 4]
    swap(path, tmp_path / "third", by)
    with pytest.raises(FileError, match=r"another kind, key_dim=1, value_dim=2, F64, no score instead of key_dim=2"):
        reader.read(torch.ones(1, 2))
    assert ids_of(before) == [0, 1, 2, 3, 4]


def test_a_shard_that_was_replaced_under_its_name_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    reader = Memory.open(path)
    assert held(reader) == [0, 1, 2, 3, 4]
    other = Memory(2, 1)
    other.write(*numbered(20, 25))
    other.save(tmp_path / "other")
    for name in ("rows-000000.safetensors", "index.json"):
        os.replace(tmp_path / "other" / name, path / name)
    assert held(reader) == [20, 21, 22, 23, 24]


def test_a_folder_of_hard_links_to_the_same_shards_is_read_after_the_old_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "_most_open_files", lambda: 0)
    path = saved(tmp_path / "memory")
    reader = Memory.open(path)
    shutil.copytree(path, tmp_path / "copy", copy_function=os.link)
    swap(path, tmp_path / "copy", "rename")
    shutil.rmtree(tmp_path / "old-copy")
    assert held(reader) == [0, 1, 2, 3, 4]


def test_readers_keep_their_rows_whatever_the_writer_does(tmp_path: Path) -> None:
    path, drawn = saved(tmp_path / "memory"), random.Random(0)
    writer, reader = Memory.open(path, "a"), Memory.open(path)
    rows, kept = [0, 1, 2, 3, 4], []
    for _ in range(80):
        step = drawn.randrange(10)
        if step < 5:
            start = writer._store.next_id  # type: ignore[union-attr]
            stop = start + drawn.choice((1, 1, 1, 3, 20))
            rows = rows + writer.write(*numbered(start, stop)[:2]).tolist()
        elif step < 7 and len(rows) > 3:
            gone = drawn.sample(rows, 3)
            writer.delete(gone)
            rows = [i for i in rows if i not in gone]
        elif step == 7:
            writer.compact()
        else:
            memory = drawn.choice((reader, writer))
            kept.append((rows, memory._snapshot("read")))
        assert held(reader) == held(writer) == rows
        for expected, snapshot in kept[-3:]:
            assert ids_of(snapshot) == expected  # type: ignore[arg-type]
    assert len(kept) > 5
    assert all(ids_of(snapshot) == expected for expected, snapshot in kept)  # type: ignore[arg-type]


def test_the_backward_pass_reads_the_rows_that_the_forward_pass_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    expected = torch.ones(1, 2, requires_grad=True)
    Memory.open(path).read(expected).sum().backward()
    query = torch.ones(1, 2, requires_grad=True)
    output = Memory.open(path).read(query)
    with Memory.open(path, "a") as writer:
        writer.write(*numbered(5, 9))
        writer.compact()
    output.sum().backward()
    torch.testing.assert_close(query.grad, expected.grad)


def test_more_shards_than_files_may_be_open_are_opened_for_every_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "_most_open_files", lambda: 2)
    path = saved(tmp_path / "memory")
    writer, reader = Memory.open(path, "a"), Memory.open(path)
    for i in range(5, 9):
        writer.write(*numbered(i, i + 1))
    before = reader._snapshot("read")
    assert [file.file.held_open for file in before.files] == [True, True, False, False, False]  # type: ignore[union-attr]
    assert held(reader) == list(range(9))
    writer.compact()
    with pytest.raises(FileError, match=r"can no longer be opened.*compacted the memory since, read again"):
        ids_of(before)  # type: ignore[arg-type]
    assert held(reader) == list(range(9))


def test_many_small_writes_leave_few_shards_and_a_small_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = Folder.write

    def counted(self: Folder, name: str, pieces: list[bytes | memoryview]) -> None:
        written.append(sum(len(piece) for piece in pieces))
        write(self, name, pieces)

    path = saved(tmp_path / "memory", 1)
    monkeypatch.setattr(Folder, "write", counted)
    with Memory.open(path, "a") as memory:
        for i in range(1, 300):
            memory.write(*numbered(i, i + 1))
        assert held(memory) == list(range(300))
    assert len(list(path.iterdir())) < 20
    assert len(written) == 2 * 299
    assert sum(written[-128:]) < 1.5 * sum(written[64:192])  # as much for the last 64 writes as for earlier ones


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3), (1, 600), (500,), (1, 7, 50, 300, 1900), (1, 7, 50, 300, 5000)])
def test_shards_that_are_merged_stay_few_and_are_seldom_copied(sizes: tuple[int, ...]) -> None:
    drawn, limit = random.Random(0), 4096
    levels = math.log(limit, 8)
    shards: list[int] = []
    copied = total = large = 0
    for _ in range(3000):
        rows = drawn.choice(sizes)
        merged = _shards_to_merge(shards, rows, limit)
        kept, last = shards[: len(shards) - merged], shards[len(shards) - merged :]
        assert not merged or sum(last) + rows <= limit
        shards = [*kept, sum(last) + rows]
        copied, total, large = copied + sum(last), total + rows, large + (2 * rows >= limit)
    assert len(shards) <= 2 * total / limit + 8 * levels + 2 * large
    assert copied <= levels * total


def test_a_writer_whose_folder_is_moved_writes_nothing(tmp_path: Path) -> None:
    memory = Memory.open(saved(tmp_path / "memory"), "a")
    swap(tmp_path / "memory", saved(tmp_path / "new", 2), "rename")
    for change in (lambda: memory.write(*numbered(5, 6)), lambda: memory.delete([1]), memory.compact):
        with pytest.raises(FileError, match=r"was moved or replaced, .*Nothing was changed; open it again"):
            change()
    assert held(Memory.open(tmp_path / "memory")) == [0, 1]
    assert held(memory) == [0, 1, 2, 3, 4]
