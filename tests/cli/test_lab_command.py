"""`regard lab`: it lists, runs, prints JSON and nothing else, and writes a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard import lab
from regard.cli import app
from regard.errors import ArgumentError


def run(*arguments: str, fails: bool = False) -> str:
    done = CliRunner().invoke(app, ["lab", *arguments], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert (done.exit_code != 0) == fails, done.output
    return done.output


def test_every_experiment_is_listed() -> None:
    wanted = (
        *("variance", "saturation", "gradient-cascade", "training", "temperature", "maximum-entropy", "kernel"),
        *("parity", "scores", "positions", "causality", "online", "complexity", "geometry", "memory", "masks"),
        *("alignment", "precision"),
    )
    assert lab.names() == list(wanted)
    listed = run()
    assert all(name in listed for name in wanted)


def test_json_is_one_object_and_nothing_else() -> None:
    found = json.loads(run("alignment", "--json"))
    assert list(found) == ["name", "claim", "rows", "verdict"]
    assert (found["name"], found["verdict"]) == ("alignment", True)
    assert found["rows"]


def test_one_is_printed_with_claim_table_test_and_verdict_and_saved_as_a_page(tmp_path: Path) -> None:
    output = run("parity", "--save", str(tmp_path))
    for word in ("claim", "test", "verdict", "supports the claim"):
        assert word in output
    assert (tmp_path / "index.html").is_file()


def test_bad_arguments_get_one_sentence() -> None:
    assert "There are variance" in " ".join(run("nothing", fails=True).split())
    assert "--all" in run("--json", fails=True)
    assert "one" in run("--all", "--json", fails=True)


@pytest.mark.parametrize("name", ["variance", "gradient-cascade"])
def test_an_unknown_choice_is_named(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"scaling .*'√d'"):
        lab.run(name, scaling="x")
    sizes = {"dims": ()} if name == "variance" else {"depths": ()}
    with pytest.raises(ArgumentError, match=r"must be (a tuple of one or more|at least 2)"):
        lab.run(name, **sizes)
    with pytest.raises(ArgumentError, match="takes the choices"):
        lab.run(name, size=3)
