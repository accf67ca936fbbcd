"""Memory on disk: durable writes, many readers beside one writer, and reads in little memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from memory_rows import held, numbered, saved
from regard.errors import ArgumentError, FileError
from regard.memory import Memory
from regard.scores import Gaussian

SOURCES = Path(__file__).resolve().parents[2] / "src"


def fresh(script: str, *words: object) -> str:
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_saved_memory_keeps_its_ids_and_continues_numbering(tmp_path: Path) -> None:
    memory = Memory(2, 1)
    memory.write(*numbered(0, 4))
    memory.write(*numbered(30, 33))
    memory.write(*numbered(7, 9))
    memory.delete([1, 31])
    memory.save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory", "a") as again:
        assert held(again) == [0, 2, 3, 30, 32, 7, 8]
        assert again.write(*numbered(33, 35)[:2]).tolist() == [33, 34]
        again.delete([34, 0])
    last = Memory.open(tmp_path / "memory")
    assert held(last) == [2, 3, 30, 32, 7, 8, 33]
    last.save(tmp_path / "copy")
    assert held(Memory.open(tmp_path / "copy")) == [2, 3, 30, 32, 7, 8, 33]
    assert repr(last).endswith(f"on disk at {tmp_path / 'memory'})")


def test_an_empty_memory_is_saved_and_then_filled_on_disk(tmp_path: Path) -> None:
    Memory(2, 1).save(tmp_path / "memory")
    with Memory.open(tmp_path / "memory", "a") as memory:
        assert len(memory) == 0
        with pytest.raises(ArgumentError, match="empty"):
            memory.read(torch.ones(1, 2))
        memory.write(*numbered(0, 3))
        assert held(memory) == [0, 1, 2]
        memory.delete([0, 1, 2])
        assert len(memory) == 0
        with pytest.raises(ArgumentError, match="empty"):
            memory.read(torch.ones(1, 2))


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    memory = Memory(2, 1, dtype=torch.bfloat16)
    keys, values = torch.randn(3, 2).bfloat16(), torch.randn(3, 1).bfloat16()
    memory.write(keys, values, ids=[5, 9, 7])
    memory.save(tmp_path / "memory")
    with safe_open(tmp_path / "memory" / "rows-000000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("keys"), keys)
        assert torch.equal(file.get_tensor("values"), values)
        assert file.get_tensor("ids").tolist() == [5, 9, 7]


def test_many_readers_see_the_changes_of_one_writer(tmp_path: Path) -> None:
    saved(tmp_path / "memory")
    readers = [Memory.open(tmp_path / "memory") for _ in range(3)]
    writer = Memory.open(tmp_path / "memory", "a")
    before = iter(readers[0])
    writer.write(*numbered(5, 7))
    writer.delete([0])
    assert [held(reader) for reader in readers] == [[1, 2, 3, 4, 5, 6]] * 3
    writer.compact()
    assert [held(reader) for reader in readers] == [[1, 2, 3, 4, 5, 6]] * 3
    assert next(before).ids.tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ArgumentError, match=r"Memory.write: .* open for reading.*mode='a'"):
        readers[0].write(*numbered(7, 8))
    with pytest.raises(ArgumentError, match=r"Memory.delete: .* open for reading"):
        readers[0].delete([1])


def refused_in_another_process(path: Path) -> bool:
    child = os.fork()
    if child == 0:
        status = 3
        try:
            Memory.open(path, "a")
            status = 0
        except FileError:
            status = 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 1


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    saved(tmp_path / "memory")
    first = Memory.open(tmp_path / "memory", "a")
    with pytest.raises(FileError, match=rf"already has a writer \(process {os.getpid()}\).*mode='r'.*close\(\)"):
        Memory.open(tmp_path / "memory", "a")
    assert refused_in_another_process(tmp_path / "memory")
    first.write(*numbered(5, 6))
    first.close()
    with pytest.raises(ArgumentError, match="it is closed"):
        first.read(torch.ones(1, 2))
    assert not refused_in_another_process(tmp_path / "memory")
    second = Memory.open(tmp_path / "memory", "a")
    del second  # dropping it releases the lock
    assert held(Memory.open(tmp_path / "memory", "a")) == [0, 1, 2, 3, 4, 5]


KILLED = """
import os, shutil, signal, sys, torch
from regard.memory import Memory
base, out = sys.argv[1:]
torch.set_num_threads(1)
os.fsync = lambda opened: None  # a kill keeps what the system has received; waiting for the disk takes time
real = {name: getattr(os, name) for name in ("fsync", "replace", "unlink")}

def work(path, log, killed_at):
    passed = 0
    def moment():
        nonlocal passed
        if passed == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1
    def watched(name):
        def call(*args, **kwargs):
            moment()
            found = real[name](*args, **kwargs)
            moment()
            return found
        return call
    for name in real:
        setattr(os, name, watched(name))
    memory = Memory.open(path, "a")
    rows = lambda a, b: (torch.stack((i := torch.arange(a, b), -i), -1).float(), i[:, None].float() * 10, i)
    steps = (lambda: memory.write(*rows(5, 8)), lambda: memory.write(*rows(20, 23)), lambda: memory.delete([1, 21]),
             lambda: memory.compact(), lambda: memory.write(*rows(23, 25)))
    for number, step in enumerate(steps):
        step()
        os.write(log, bytes([number]))
    os._exit(0)

for killed_at in range(1000):
    path = os.path.join(out, str(killed_at))
    shutil.copytree(base, path)
    log = os.open(path + ".log", os.O_CREAT | os.O_WRONLY)
    child = os.fork()
    if child == 0:
        work(path, log, killed_at)
    if os.waitpid(child, 0)[1] == 0:
        break
print(killed_at)
"""
AFTER = (
    [0, 1, 2, 3, 4],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22],
    [0, 2, 3, 4, 5, 6, 7, 20, 22],
    [0, 2, 3, 4, 5, 6, 7, 20, 22],
    [0, 2, 3, 4, 5, 6, 7, 20, 22, 23, 24],
)


def test_a_killed_writer_loses_no_write_that_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda opened: None)
    (tmp_path / "out").mkdir()
    moments = int(fresh(KILLED, saved(tmp_path / "base"), tmp_path / "out"))
    assert moments > 40
    for moment in range(moments):
        path = tmp_path / "out" / str(moment)
        done = len(Path(f"{path}.log").read_bytes())
        assert held(Memory.open(path)) in AFTER[done : done + 2], f"killed at moment {moment}"
        with Memory.open(path, "a") as memory:
            memory.write(*numbered(90, 92))
            assert held(memory)[-2:] == [90, 91]
            names = {shard.name for shard in memory._store.index.shards} | {"index.json", "lock"}  # type: ignore[union-attr]
        assert {file.name for file in path.iterdir()} == names


def test_leftovers_of_a_killed_writer_are_removed_by_the_next_writer_alone(tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    left = [
        path / name
        for name in ("rows-000007.safetensors", ".rows-000008.safetensors.part", f".index.json.{'0a' * 8}.part")
    ]
    foreign = path / "notes.txt"
    for file in (*left, foreign):
        file.write_text("x")
    assert held(Memory.open(path)) == [0, 1, 2, 3, 4]
    assert all(file.exists() for file in left)
    assert held(Memory.open(path, "a")) == [0, 1, 2, 3, 4]
    assert not any(file.exists() for file in left)
    assert foreign.read_text() == "x"


def test_data_is_synced_before_the_rename_and_the_shard_before_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory.open(saved(tmp_path / "memory"), "a")
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(opened: int) -> None:
        fsync(opened)
        name = Path(os.readlink(f"/proc/self/fd/{opened}")).name
        done.append(f"fsync {re.sub('[0-9a-f]{16}', 'random', name)}")

    def renamed(old: str, new: str, **folders: int) -> None:
        replace(old, new, **folders)
        done.append(f"rename {new}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    memory.write(*numbered(5, 6))
    shard = "rows-000001.safetensors"
    assert done == [
        *(f"fsync .{shard}.random.part", f"rename {shard}", "fsync memory"),
        *("fsync .index.json.random.part", "rename index.json", "fsync memory"),
    ]


@pytest.mark.parametrize("call", range(6))
def test_a_full_disk_is_one_error_and_nothing_is_lost(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory.open(saved(tmp_path / "memory"), "a")
    calls = 0

    def limited(name: str) -> None:
        real = getattr(os, name)

        def guarded(*args: object, **kwargs: object) -> None:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise OSError(28, "No space left on device")
            real(*args, **kwargs)

        monkeypatch.setattr(os, name, guarded)

    for name in ("fsync", "replace"):
        limited(name)
    with pytest.raises(FileError, match=r"^Memory.write: .*No space left on device\. No stored row is lost"):
        memory.write(*numbered(5, 8))
    monkeypatch.undo()
    kept = held(memory)
    assert kept in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7])
    assert held(Memory.open(tmp_path / "memory")) == kept
    memory.write(*numbered(40, 42))
    assert held(memory) == [*kept, 40, 41]
    assert not list((tmp_path / "memory").glob(".*"))


LIMITED = """
import resource, sys, torch
from regard.memory import Memory
from regard.errors import FileError
memory = Memory.open(sys.argv[1], "a")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
x = torch.zeros(20_000, 2), torch.zeros(20_000, 1)
try:
    memory.write(*x)
except FileError as error:
    print(error)
big = Memory(2, 1)
big.write(*x)
try:
    big.save(sys.argv[2])
except FileError as error:
    print(error)
memory.write(torch.tensor([[5.0, -5.0]]), torch.tensor([[50.0]]))
"""


def test_a_file_that_cannot_grow_is_one_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = saved(tmp_path / "memory")
    said = fresh(LIMITED, path, tmp_path / "big").splitlines()
    assert said[0].startswith(f"Memory.write: {path} cannot be written: File too large")
    assert said[1].startswith(f"Memory.save: {tmp_path / 'big'} cannot be written: File too large")
    assert [place.name for place in tmp_path.iterdir()] == ["memory"]
    assert held(Memory.open(path)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [0, 7, 50, -1, 1])
def test_a_shard_that_is_truncated_or_too_long_is_refused(size: int, tmp_path: Path) -> None:
    shard = saved(tmp_path / "memory") / "rows-000000.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content + b"x" if size == 1 else content[:size])
    with pytest.raises(FileError, match=r"^Memory.open: .*rows-000000.safetensors is truncated, or not the shard"):
        Memory.open(tmp_path / "memory")


def test_a_shard_of_something_else_or_a_missing_one_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    shard = saved(tmp_path / "memory") / "rows-000000.safetensors"
    save_file({"weight": torch.ones(5, 2)}, shard)
    with pytest.raises(FileError, match=r"it holds \['weight'\]"):
        Memory.open(tmp_path / "memory")
    save_file({"keys": torch.ones(5, 2).double(), "values": torch.ones(5, 1)}, shard)
    with pytest.raises(FileError, match=r"its keys are F64 \[5, 2\], not F32 \[5, 2\]"):
        Memory.open(tmp_path / "memory", "a")
    shard.unlink()
    with pytest.raises(FileError, match="is missing"):
        Memory.open(tmp_path / "memory", "a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:40], "not JSON"),
        (lambda text: "", "not JSON"),
        (lambda text: "[]", "does not say regard.Memory"),
        (lambda text: '{"format": "other"}', "does not say regard.Memory"),
        (lambda text: text.replace('"rows":5', '"rows":4'), "its checksum does not match"),
        (lambda text: text.replace('"version":2', '"version":3'), "has version 3"),
    ],
)
def test_an_index_that_is_damaged_or_foreign_is_refused(change: object, words: str, tmp_path: Path) -> None:
    index = saved(tmp_path / "memory") / "index.json"
    index.write_text(change(index.read_text()))  # type: ignore[operator]
    with pytest.raises(FileError, match=rf"^Memory.open: .*{words}"):
        Memory.open(tmp_path / "memory")


def test_an_index_never_leads_out_of_its_folder(tmp_path: Path) -> None:
    from regard.memory.index import _checksum

    index = saved(tmp_path / "memory") / "index.json"
    page = json.loads(index.read_text())
    page["shards"][0]["name"] = "../rows-000000.safetensors"
    content = {name: x for name, x in page.items() if name not in ("format", "version", "checksum")}
    index.write_text(json.dumps({**page, "checksum": _checksum(content)}))
    with pytest.raises(FileError, match="is not the name of a shard"):
        Memory.open(tmp_path / "memory")


def test_wrong_paths_and_folders_without_write_permission_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    for path, words in (("nowhere", "does not exist"), ("file", "is a file"), (".", "is a folder without one")):
        with pytest.raises(FileError, match=rf"^Memory.open: a memory is a folder.*{words}"):
            Memory.open(tmp_path / path)
    memory = Memory(2, 1)
    memory.write(*numbered(0, 2))
    with pytest.raises(FileError, match="already exists"):
        memory.save(tmp_path / "file")
    with pytest.raises(FileError, match=r"Memory.save: .* cannot be written: No such file or directory"):
        memory.save(tmp_path / "nowhere" / "memory")
    saved(tmp_path / "memory")
    with pytest.raises(FileError, match="already exists"):
        memory.save(tmp_path / "memory")

    opened = os.open

    def denied(path: str, flags: int, *rest: int, **folder: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *rest, **folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(FileError, match=r"^Memory.open: .* cannot be written: Permission denied"):
            Memory.open(tmp_path / "memory", "a")
    assert held(memory) == [0, 1]
    assert held(Memory.open(tmp_path / "memory")) == [0, 1, 2, 3, 4]


def test_a_memory_that_was_saved_with_a_score_is_opened_with_one(tmp_path: Path) -> None:
    memory = Memory(2, 1, Gaussian(0.5))
    memory.write(*numbered(0, 3))
    memory.save(tmp_path / "memory")
    with pytest.raises(ArgumentError, match=r"Memory.open: it was saved with a score, Gaussian\(bandwidth=0.5"):
        Memory.open(tmp_path / "memory", "a")
    again = Memory.open(tmp_path / "memory", "a", score=Gaussian(0.5))
    q = torch.tensor([[1.2, -0.9]])
    torch.testing.assert_close(again.read(q), memory.read(q))


def test_rows_that_require_a_gradient_are_refused_on_disk(tmp_path: Path) -> None:
    memory = Memory.open(saved(tmp_path / "memory"), "a")
    keys, values, _ = numbered(5, 6)
    with pytest.raises(ArgumentError, match=r"rows on disk have no gradient.*detach\(\)"):
        memory.write(keys.requires_grad_(), values)
    assert len(memory) == 5


LARGE = """
import resource, sys, torch
from regard.memory import Memory
memory, small = (Memory.open(path) for path in sys.argv[1:])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
q = torch.randn(4, 64, requires_grad=True)
def read(memory):
    memory.read(q, observe=True).output.sum().backward()
    memory.read(q, top=3)
read(small)
before = peak()
read(memory)
for chunk in memory:
    chunk.keys.sum()
print(peak() - before)
"""


def test_a_memory_is_read_in_a_fraction_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda opened: None)
    keys, values = torch.randn(2, 100_000, 64).unbind()
    Memory(64, 64).save(tmp_path / "large")
    with Memory.open(tmp_path / "large", "a") as large:
        for _ in range(8):
            large.write(keys, values)
    small = Memory(64, 64)
    small.write(keys[:40_000], values[:40_000])
    small.save(tmp_path / "small")
    size = sum(file.stat().st_size for file in (tmp_path / "large").iterdir()) / 2**20
    assert size > 390
    assert float(fresh(LARGE, tmp_path / "large", tmp_path / "small")) < 40
