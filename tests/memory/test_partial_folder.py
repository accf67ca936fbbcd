"""Folders that are not complete: removed after a kill, left alone while somebody writes them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memory_rows import held, numbered, saved
from regard.errors import FileError
from regard.memory import Memory, disk_store
from regard.memory.folder import Folder
from regard.memory.index import Index
from regard.memory.partial_folder import partial_folder, sweep_partial_folders


def killed_save(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(disk_store, "save_index", lambda *_: os._exit(0))
        saved(path)
    os.waitpid(child, 0)


def test_the_folder_of_a_killed_save_is_removed_by_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for again in (lambda: saved(tmp_path / "other"), lambda: Memory.open(tmp_path / "other", "a")):
        killed_save(tmp_path / "memory", monkeypatch)
        assert any(file.name.startswith("rows-") for folder in tmp_path.glob(".*.part") for file in folder.iterdir())
        again()
        assert not list(tmp_path.glob(".*"))
    assert held(Memory.open(tmp_path / "other")) == [0, 1, 2, 3, 4]


def test_only_own_folders_that_nobody_writes_are_removed(tmp_path: Path) -> None:
    foreign, link = tmp_path / f".notes.{'0' * 16}.part", tmp_path / f".link.{'0' * 16}.part"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("kept")
    (tmp_path / "folder").mkdir()
    link.symlink_to(tmp_path / "folder")
    with partial_folder(tmp_path / "memory") as folder:
        sweep_partial_folders(tmp_path)
        assert folder.path.is_dir()
    assert not folder.path.exists()
    sweep_partial_folders(tmp_path)
    assert (foreign / "notes.txt").read_text() == "kept"
    assert link.is_symlink()
    assert (tmp_path / "folder").is_dir()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = Path.mkdir, []

    def make_and_lose_the_first(path: Path) -> None:
        make(path)
        made.append(path)
        if len(made) == 1:
            sweep_partial_folders(tmp_path)

    monkeypatch.setattr(Path, "mkdir", make_and_lose_the_first)
    with partial_folder(tmp_path / "memory") as folder:
        assert [path.exists() for path in made] == [False, True]
        assert folder.path == made[1]


def test_one_of_many_threads_saves_to_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(2, 1)
    memory.write(*numbered(0, 20))
    all_have_begun, save_index = threading.Barrier(4, timeout=120), disk_store.save_index

    def meet(index: Index, folder: Folder) -> None:
        all_have_begun.wait()
        save_index(index, folder)

    monkeypatch.setattr(disk_store, "save_index", meet)

    def save(_: int) -> str:
        try:
            memory.save(tmp_path / "memory")
        except FileError as error:
            return str(error)
        return "saved"

    with ThreadPoolExecutor(4) as pool:
        said = sorted(pool.map(save, range(4)))
    assert said == [f"Memory.save: {tmp_path / 'memory'} already exists. Give a new path, or remove it first."] * 3 + [
        "saved"
    ]
    assert held(Memory.open(tmp_path / "memory")) == list(range(20))
    assert os.listdir(tmp_path) == ["memory"]
