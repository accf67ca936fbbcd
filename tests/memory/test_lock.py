"""One writer per folder: no link leads its lock elsewhere, and no fork or removed lock makes a second writer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from memory_rows import held, numbered, saved
from regard.errors import FileError
from regard.memory import Memory


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns, or its error, in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # rather than wait for ever
        try:
            said = work()
        except Exception as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    said = os.read(reading, 10_000).decode()
    os.close(reading)
    return said


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(kind: str, tmp_path: Path) -> None:
    path, precious = saved(tmp_path / "memory"), tmp_path / "precious"
    precious.write_text("precious")
    (path / "lock").symlink_to(precious) if kind == "symbolic" else os.link(precious, path / "lock")
    with pytest.raises(FileError, match=r"^Memory.open: .*lock is a link or not a regular file.*Remove it"):
        Memory.open(path, "a")
    assert precious.read_text() == "precious"
    assert held(Memory.open(path)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["lock", "index.json", "rows-000000.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(FileError, match="not a regular file"):
        Memory.open(path, "a")


def test_no_planted_link_leads_a_write_elsewhere(tmp_path: Path) -> None:
    path, precious = saved(tmp_path / "memory"), tmp_path / "precious"
    precious.write_text("precious")
    memory = Memory.open(path, "a")
    for name in (".rows-000001.safetensors.part", "rows-000001.safetensors", ".index.json.part"):
        (path / name).symlink_to(precious)
    memory.write(*numbered(5, 7))
    memory.close()
    (path / "index.json").rename(tmp_path / "index.json")
    (path / "index.json").symlink_to(tmp_path / "index.json")
    index = (tmp_path / "index.json").read_bytes()
    with Memory.open(path, "a") as memory:
        memory.write(*numbered(7, 8))
        assert held(memory) == list(range(8))
    assert (tmp_path / "index.json").read_bytes() == index
    assert precious.read_text() == "precious"


def test_a_forked_child_reads_but_does_not_write(tmp_path: Path) -> None:
    memory = Memory.open(saved(tmp_path / "memory"), "a")

    def work() -> str:
        assert held(memory) == [0, 1, 2, 3, 4]
        memory.write(*numbered(5, 6))
        return "written"

    said = in_child(work)
    assert said.startswith(f"FileError: Memory.write: process {os.getpid()} opened")
    assert "forked from it" in said
    assert memory.write(*numbered(5, 6)[:2]).tolist() == [5]
    assert held(memory) == [0, 1, 2, 3, 4, 5]


def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    waiting, ending = os.pipe()
    opened: list[Memory] = []  # not dropped, which would release the lock

    def work() -> str:
        opened.append(Memory.open(path, "a"))
        if os.fork() == 0:
            os.close(ending)
            os.read(waiting, 1)  # until the test is over
            os._exit(0)
        return repr(opened[0])  # now the process ends, without close()

    try:
        assert "on disk" in in_child(work)
        with Memory.open(path, "a") as memory:
            memory.write(*numbered(5, 6))
    finally:
        os.close(ending)
        os.close(waiting)


def test_a_forked_child_of_threads_that_write_gets_a_memory_that_works() -> None:
    memory = Memory(2, 1)
    memory.write(*numbered(0, 3))
    locked, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with memory._lock:
            locked.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    try:
        assert in_child(lambda: str([*memory.write(*numbered(3, 4)[:2]).tolist(), *held(memory)])) == "[3, 0, 1, 2, 3]"
    finally:
        forked.set()
        thread.join()


def test_a_writer_whose_lock_was_removed_writes_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    first = Memory.open(path, "a")
    (path / "lock").unlink()
    second = Memory.open(path, "a")
    with pytest.raises(FileError, match="its lock was removed, so another process may write"):
        first.write(*numbered(5, 6))
    second.write(*numbered(5, 7))
    assert held(Memory.open(path)) == list(range(7))
