"""Threads that share a memory: nothing is lost, and every read sees one moment."""

from __future__ import annotations

import copy
import os
import pickle
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from memory_rows import held, numbered, saved
from regard.errors import ArgumentError
from regard.memory import Memory


@pytest.fixture(autouse=True)
def many_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda opened: None)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_threads_that_write_and_delete_lose_nothing(where: str, tmp_path: Path) -> None:
    memory = Memory(1, 1)
    if where == "disk":
        memory.save(tmp_path / "memory")
        memory = Memory.open(tmp_path / "memory", "a")

    def work(thread: int) -> dict[int, float]:
        drawn, mine = random.Random(thread), {}
        for step in range(30 if where == "disk" else 150):
            count = drawn.choice((1, 1, 3))
            x = torch.full((count, 1), thread * 1000.0 + step)
            mine |= dict.fromkeys(memory.write(x, x).tolist(), thread * 1000.0 + step)
            if drawn.random() < 0.2:
                gone = drawn.choice(sorted(mine))
                memory.delete([gone])
                del mine[gone]
            if drawn.random() < 0.2:
                memory.read(x[:1])
            if drawn.random() < 0.02:
                memory.compact()
        return mine

    with ThreadPoolExecutor(4) as pool:
        all_mine = list(pool.map(work, range(4)))
    expected = {i: x for mine in all_mine for i, x in mine.items()}
    assert len(expected) == sum(map(len, all_mine))
    for opened in (memory, Memory.open(tmp_path / "memory")) if where == "disk" else (memory,):
        found = {i: x for chunk in opened for i, x in zip(chunk.ids.tolist(), chunk.keys[:, 0].tolist(), strict=True)}
        assert found == expected


def test_readers_in_threads_and_processes_see_whole_changes(tmp_path: Path) -> None:
    """A writer adds ten rows or removes ten at a time, and compacts; a reader never sees another count."""
    path = saved(tmp_path / "memory", 10)
    writer, reader = Memory.open(path, "a"), Memory.open(path)
    done: list[bool] = []

    def write() -> None:
        for round_ in range(1, 25):
            writer.write(*numbered(round_ * 10, round_ * 10 + 10))
            if round_ % 3 == 0:
                writer.delete(list(range((round_ - 1) * 10, round_ * 10)))
            if round_ % 4 == 0:
                writer.compact()
        done.append(True)

    def read(memory: Memory) -> int:
        reads = 0
        while not done:
            ids = held(memory)
            assert len(ids) % 10 == 0
            assert ids == sorted(ids)
            memory.read(torch.ones(1, 2), top=2)
            reads += 1
        return reads

    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(read, memory) for memory in (reader, reader, writer)]
        try:
            write()
        finally:
            done.append(True)
        assert all(one.result() > 0 for one in reading)


def test_a_memory_is_copied_and_pickled_unless_it_is_open_for_writing(tmp_path: Path) -> None:
    memory = Memory(2, 1)
    memory.write(*numbered(0, 5))
    opened = Memory.open(saved(tmp_path / "memory"))
    for one in (memory, opened):
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert held(other) == [0, 1, 2, 3, 4]
    other = copy.deepcopy(memory)
    other.write(*numbered(5, 6))
    assert (len(memory), len(other)) == (5, 6)
    with pytest.raises(ArgumentError, match=r"^Memory: .*open for writing.*Memory.open\(path\)"):
        copy.deepcopy(Memory.open(tmp_path / "memory", "a"))
