"""Writing files: links and permissions stay, and a failed write leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import pytest

from regard.errors import FileError
from regard.report.files import write_text


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link_and_its_target_is_written(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "report.html", tmp_path / "link.html"
    if exists:
        target.write_text("older")
    link.symlink_to(os.path.join("there", "report.html"))
    assert write_text(link, "new", "write") == link
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert os.listdir(tmp_path / "there") == ["report.html"]
    assert sorted(os.listdir(tmp_path)) == ["link.html", "there"]


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o666])
def test_a_file_keeps_its_permissions(bits: int, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("older")
    path.chmod(bits)
    write_text(path, "new", "write")
    assert (mode(path), path.read_text()) == (bits, "new")


def test_a_new_file_gets_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_text(tmp_path / "new", "new", "write")
    assert mode(tmp_path / "new") == mode(tmp_path / "usual")


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_text(os.devnull, "new", "write")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_pipe_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened: list[int] = []
    real = os.open

    def counted(path: str, flags: int, *rest: int) -> int:
        opened.append(real(path, flags | os.O_NONBLOCK, *rest))
        return opened[-1]

    reader = real(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(os, "open", counted)
    write_text(pipe, "new", "write")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert len(opened) == 1  # after the first close, the reader sees the end of the file
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "guessed")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".report.html.guessed.part").symlink_to(tmp_path / "precious")
    with pytest.raises(FileError, match="File exists"):
        write_text(tmp_path / "report.html", "new", "write")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_failed_write_keeps_the_older_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("older")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match=r"^write: .*No space left on device"):
        write_text(path, "new", "write")
    assert (os.listdir(tmp_path), path.read_text()) == (["report.html"], "older")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FileError, match="cannot be written"):
        write_text(tmp_path / "loop", "new", "write")
