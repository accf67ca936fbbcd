"""`regard census` from the terminal: shards, merge, comparison, and errors in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import regard
from regard.cli import app
from regard.models import Census
from regard.models.loading import load


def run(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["census", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with four heads in place of the built-in one."""
    torch.manual_seed(4)
    model = regard.models.builtin.Model(dim=32, layers=2, heads=2, window=16).eval()
    monkeypatch.setattr("regard.models.loading.load", lambda name, **_: replace(load(name), model=model))


@pytest.mark.usefixtures("small")
def test_merged_shards_are_one_census_and_two_can_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.models.head_census.corpus._POOL", 64)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"body": "number {i} of the first kings spoke of corn again"}}\n' for i in range(4)))
    given = ("builtin-untrained", "--texts", texts, "--field", "body", "--exemplars", "2")
    whole, parts = tmp_path / "whole", [tmp_path / "0", tmp_path / "1"]
    said = run(*given, "--out", whole)
    assert "4 heads over" in said
    for i, part in enumerate(parts):
        run(*given, "--out", part, "--shard", f"{i}/2")
    run("merge", *parts, "--out", tmp_path / "merged")
    one, other = (Census.load(folder).state.arrays() for folder in (whole, tmp_path / "merged"))
    assert all(np.array_equal(x, other[name]) for name, x in one.items() if name != "json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "merged", "texts.jsonl", "whole"]
    assert "the heads that moved most" in run("compare", whole, parts[0], "--out", tmp_path / "moved")
    assert "already holds a census" in run(*given, "--out", whole, code=1)


def test_wrong_options_get_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "--texts: it names the texts" in run("--out", out, code=2)
    assert "--out: it names the folder" in run("--texts", tmp_path, code=2)
    assert "has no file that ends with" in run("--texts", tmp_path, "--out", out, code=1)
    (tmp_path / "some.txt").write_text("some words\n")
    for device in ("cuda:99", "abacus"):
        said = run("--texts", tmp_path / "some.txt", "--out", out, "--device", device, code=1)
        assert f"--device: '{device}' cannot be used here: " in said
    (tmp_path / "some.txt").unlink()
    assert "it must be i/n" in run("--texts", tmp_path, "--out", out, "--shard", "2/2", code=2)
    assert "was not found. Give a folder that a census was saved to" in run("merge", out, out, "--out", out, code=1)
    (tmp_path / "empty.txt").write_text("\n")
    assert "the texts are empty" in run("--texts", tmp_path, "--out", out, code=1)
    assert not out.exists()
