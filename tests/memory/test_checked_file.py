"""Checksums of shards: damage is an error and never an answer."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch

from memory_rows import held, numbered, saved
from regard.errors import FileError
from regard.memory import Memory
from regard.memory.checked_file import CheckedFile
from regard.memory.index import _checksum


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda opened: None)


def flip(file: Path, place: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def first_shard(path: Path) -> Path:
    return min(path.glob("rows-*"))


def without_checksums(path: Path) -> Path:
    """Turn a folder into what the releases before checksums wrote."""
    page = json.loads((path / "index.json").read_bytes())
    for shard in page["shards"]:
        del shard["crc32"]
    content = {name: x for name, x in page.items() if name not in ("format", "version", "checksum")}
    (path / "index.json").write_text(json.dumps({**page, "version": 1, "checksum": _checksum(content)}))
    return path


def test_every_flipped_bit_is_noticed_before_an_answer(tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    with Memory.open(path, "a") as memory:
        memory.write(*numbered(5, 8)[:2], ids=[30, 9, 20])  # ids that the shard lists
        memory.delete([1])
    files = [file for file in path.iterdir() if file.name != "lock"]
    assert len(files) == 3
    reads = (
        lambda memory: memory.read(torch.ones(1, 2)),
        lambda memory: memory.read(torch.ones(1, 2), top=1),
        lambda memory: list(memory),
        lambda memory: memory.verify(),
    )
    drawn = random.Random(0)
    for _ in range(150):
        file = drawn.choice(files)
        place, bit, read = drawn.randrange(file.stat().st_size), drawn.randrange(8), drawn.choice(reads)
        flip(file, place, bit)
        with pytest.raises(FileError):
            read(Memory.open(path))
        flip(file, place, bit)
    assert len(list(Memory.open(path))) == 2


def test_a_damaged_shard_is_named_and_never_copied(tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    shard = first_shard(path)
    flip(shard, shard.stat().st_size - 1, 3)
    with pytest.raises(FileError, match=r"^Memory: .*rows-000000.safetensors is damaged: its checksum is .*Restore"):
        Memory.open(path).read(torch.ones(1, 2))
    trusting = Memory.open(path, "a", verify=False)
    assert trusting.read(torch.ones(1, 2)).shape == (1, 1)
    with pytest.raises(FileError, match=r"^Memory.verify: 1 of 1 shards failed. .*rows-000000.safetensors is damaged"):
        trusting.verify()
    with pytest.raises(FileError, match="is damaged"):
        trusting.save(tmp_path / "copy")
    with pytest.raises(FileError, match="is damaged"):
        trusting.compact()
    for i in range(5, 11):
        trusting.write(*numbered(i, i + 1))
    with pytest.raises(FileError, match="is damaged"):  # the eighth small shard joins the others
        trusting.write(*numbered(11, 12))
    assert shard.exists()
    assert len(trusting) == 11
    assert not (tmp_path / "copy").exists()


def test_a_shard_is_compared_with_its_checksum_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[str] = []
    verify = CheckedFile.verify

    def counted(self: CheckedFile, from_disk: bool = True) -> None:
        verified.append(self.name)
        verify(self, from_disk)

    monkeypatch.setattr(CheckedFile, "verify", counted)
    path = saved(tmp_path / "memory")
    memory = Memory.open(path)
    assert verified == []
    for _ in range(3):
        memory.read(torch.ones(1, 2))
        memory.read(torch.ones(1, 2), top=2)
    with Memory.open(path, "a") as writer:
        writer.write(*numbered(5, 6))
    assert held(memory) == [0, 1, 2, 3, 4, 5]
    assert verified == ["rows-000000.safetensors", "rows-000001.safetensors"]
    Memory.open(path, verify=False).read(torch.ones(1, 2))
    assert len(verified) == 2
    memory.verify()
    assert len(verified) == 4


def test_a_memory_without_checksums_opens_and_gets_them(tmp_path: Path) -> None:
    path = without_checksums(saved(tmp_path / "memory"))
    assert held(Memory.open(path)) == [0, 1, 2, 3, 4]
    with Memory.open(path, "a") as memory:
        memory.write(*numbered(5, 6))
        with pytest.raises(FileError, match=r"^Memory.verify: 1 of 2 shards .* without checksums.*compact\(\)"):
            memory.verify()
        memory.compact()
        memory.verify()
    assert held(Memory.open(path)) == [0, 1, 2, 3, 4, 5]
    flip(first_shard(path), 200, 0)
    with pytest.raises(FileError, match="is damaged"):
        held(Memory.open(path))


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"shards":' * 100_000])
def test_files_that_are_nested_without_end_are_refused(nested: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    shard = first_shard(path)
    whole = shard.read_bytes()
    shard.write_bytes(len(nested).to_bytes(8, "little") + nested.encode())
    with pytest.raises(FileError, match="is truncated, or not the shard that the index names"):
        Memory.open(path)
    shard.write_bytes(whole)
    (path / "index.json").write_text(nested)
    with pytest.raises(FileError, match="is not the index of a memory, or is incomplete: it is not JSON"):
        Memory.open(path)


def test_a_memory_that_is_not_on_disk_has_nothing_to_verify() -> None:
    memory = Memory(2, 1)
    memory.write(*numbered(0, 3))
    memory.verify()
    assert held(memory) == [0, 1, 2]
