"""The command line: what it prints, what it refuses, and that words from outside stay words."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

import regard
from regard.cli import app


def run(*arguments: str, columns: int = 100, fails: bool = False, **env: str) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns), "NO_COLOR": "1", **env})
    assert (done.exit_code != 0) == fails, done.output
    return done.output


def shown(*arguments: str) -> dict[str, Any]:
    return json.loads(run("show", "--json", *arguments))


def test_the_example_aligns_each_word_with_its_translation_across_the_swapped_order() -> None:
    seen = shown()
    pairs = dict(zip(seen["query"], seen["strongest"], strict=True))
    expected = {"le": "the", "chat": "cat", "noir": "black", "veut": "wants", "souvent": "often", "lait": "milk"}
    assert pairs.items() >= expected.items()
    assert pairs["froid"] == "cold"
    places = [seen["key"].index(word) for word in seen["strongest"]]
    assert places != sorted(places), "the word order is swapped"


def test_the_word_without_a_translation_spreads_its_attention() -> None:
    seen = shown()
    assert seen["query"][seen["perplexity"].index(max(seen["perplexity"]))] == "du"


def test_the_json_holds_the_numbers_of_real_attention() -> None:
    seen = shown("--query", "rose roses red", "--key", "roses are red", "--temperature", "2")
    assert [len(row) for row in seen["weights"]] == [3, 3, 3]
    for row, entropy, perplexity in zip(seen["weights"], seen["entropy"], seen["perplexity"], strict=True):
        assert sum(row) == pytest.approx(1.0, abs=1e-5)
        assert entropy == pytest.approx(-sum(p * math.log(p) for p in row if p > 0.0), abs=1e-4)
        assert perplexity == pytest.approx(math.exp(entropy), rel=1e-4)
    assert seen["strongest"] == ["roses", "roses", "red"]


def test_a_higher_temperature_spreads_the_attention() -> None:
    cold, warm, hot = (shown("--temperature", t)["entropy"] for t in ("0.5", "1", "4"))
    assert all(a < b < c for a, b, c in zip(cold, warm, hot, strict=True))


def test_causal_hides_what_comes_later() -> None:
    weights = shown("--query", "one two three four", "--causal")["weights"]
    assert all(weights[i][j] == 0.0 for i in range(4) for j in range(i + 1, 4))


def test_a_row_that_sees_nothing_has_no_strongest_key() -> None:
    seen = shown("--query", "one two three", "--key", "one two", "--causal")
    assert seen["strongest"][0] is None
    assert seen["entropy"][0] == 0.0
    assert "nothing" in run("show", "--query", "one two three", "--key", "one two", "--causal")


def test_words_without_keys_attend_one_another() -> None:
    seen = shown("--query", "a rose is a rose")
    assert seen["key"] == seen["query"]
    assert seen["weights"][0][0] == pytest.approx(seen["weights"][0][3])


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_view_fits_the_terminal_and_names_every_word(columns: int) -> None:
    text = run("show", columns=columns)
    seen = shown()
    assert max(map(cell_len, text.splitlines())) <= columns
    assert all(word in text for word in [*seen["query"], *seen["key"]])
    assert "█" in text
    assert f"{seen['entropy'][0]:.2f}" in text


def test_more_keys_than_columns_become_a_list() -> None:
    text = run("show", "--query", " ".join(f"word{n}" for n in range(60)), columns=60)
    assert max(map(cell_len, text.splitlines())) <= 60
    assert "word59" in text


def test_words_from_outside_are_never_markup_and_never_move_the_cursor() -> None:
    text = run("show", "--query", "[red]a[/red] [/] :cat: \x1b[2Jz \u202etxt", columns=200)
    for literal in ("[red]a[/red]", "[/]", ":cat:", r"\x1b[2Jz", r"\u202etxt"):
        assert literal in text
    assert not set(text) & {"\x1b", "\u202e"}


def test_without_colour_nothing_is_lost_and_with_it_only_colour_is_added() -> None:
    plain = run("show")
    assert "\x1b" not in plain
    assert "\x1b[" in run("show", NO_COLOR="", FORCE_COLOR="1", TERM="xterm-256color")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "0"], "above 0"),
        (["--temperature", "-1"], "above 0"),
        (["--temperature", "nan"], "finite"),
        (["--temperature", "inf"], "finite"),
        (["--key", "a b"], "--query"),
        (["--query", "  "], "at least one word"),
        (["--query", "a", "--key", ""], "at least one word"),
    ],
)
def test_a_wrong_option_gets_one_clear_sentence(arguments: list[str], says: str) -> None:
    text = run("show", *arguments, fails=True)
    assert says in text
    assert "Traceback" not in text


def test_info_names_versions_devices_and_every_backend() -> None:
    text = run("info")
    for name in ("regard", "python", "torch", "triton", "numpy", "threads", "reference", "chunked", "sdpa"):
        assert name in text


def test_the_version_is_the_package_s() -> None:
    assert run("--version").split() == ["regard", regard.__version__]


def test_help_names_the_commands_and_every_option() -> None:
    assert all(word in run("--help") for word in ("show", "info", "--version"))
    assert all(word in run("show", "--help") for word in ("--query", "--key", "--temperature", "--causal", "--json"))


def test_python_m_regard_prints_one_json_object_and_nothing_else() -> None:
    command = [sys.executable, "-m", "regard", "show", "--json"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    assert json.loads(done.stdout)["query"]
    assert done.stderr == ""


def test_warmup_says_what_it_needs_and_what_it_knows() -> None:
    assert "there is no CUDA device here" in run("warmup", fails=True) or torch.cuda.is_available()
    assert "dim must be from 1 to 256" in run("warmup", "--dim", "300", fails=True)
    assert "must be one of plain, mask" in run("warmup", "--variant", "nonsense", fails=True)
    assert "bfloat16, float16, float32" in run("warmup", "--dtype", "int8", fails=True)
