"""`regard ablate`: from a model and texts to a ranking, a page and numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regard.cli import app


def run(*arguments: str, fails: bool = False) -> str:
    done = CliRunner().invoke(app, ["ablate", *arguments], env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert (done.exit_code != 0) == fails, done.output
    assert "Traceback" not in done.output
    return done.output


def test_texts_become_a_ranking_a_page_and_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("The captain said again what the captain said.", encoding="utf-8")
    (folder / "b.jsonl").write_text('{"text": "\\u001b[31mCall me Ishmael, said the crew."}\n\n', encoding="utf-8")
    page, numbers = tmp_path / "page.html", tmp_path / "costs.json"
    output = run("--texts", str(folder), "--repeat", "--length", "8", "--windows", "2", "--heads", "3",
                 "--html", str(page), "--json", str(numbers))  # fmt: skip
    assert "builtin on 28 tokens: −log p of the next token, mean over the second reading" in output
    assert "over 2 batches; an ablated head writes its mean" in output
    assert "the 3 most costly of 32 heads" in output
    assert "\x1b" not in output
    assert "cost_of_ablation" in page.read_text(encoding="utf-8")
    assert len(json.loads(numbers.read_text(encoding="utf-8"))["heads"]) == 32


def test_a_part_of_the_texts_is_called_a_part(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four", encoding="utf-8")
    (tmp_path / "b.txt").write_text("five six seven eight", encoding="utf-8")
    said = run("--texts", str(tmp_path), "--length", "4", "--windows", "1", "--heads", "1")
    assert "the first window of up to 4 tokens; --windows raises the limit" in said
    assert "only a part" not in run("--texts", str(tmp_path), "--heads", "1")


def test_a_model_that_reads_no_text_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(self: Any, ids: Any) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'dtype'")

    monkeypatch.setattr("regard.models.builtin.Model.forward", blind)
    assert run(fails=True).startswith("ablate: 'builtin' cannot read this text: ")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"\xff\xfe", "is not UTF-8 text: byte 0 is 0xff"),
        ("a.txt", b"  \n", "has no text"),
        ("a.txt", b"a", "at least two tokens"),
        ("a.jsonl", b"{]", "line 1 of"),
        ("a.jsonl", b'{"words": 1}', 'has no "text"'),
        ("a.csv", None, "was not found"),
    ],
)
def test_bad_texts_get_one_sentence(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert says in run("--texts", str(tmp_path / name), fails=True)
