"""The laboratory in the terminal: every column within the width, and the verdict in words."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from regard import lab
from regard.lab.cells import cell
from regard.lab.terminal import RowTable, listing


def drawn(thing: RenderableType, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(thing)
    return out.getvalue()


@pytest.fixture(scope="module")
def found() -> lab.Experiment:
    return lab.run("variance", dims=(16, 64), draws=20_000)


def test_a_summary_shows_claim_numbers_test_and_verdict(found: lab.Experiment) -> None:
    text = drawn(found, 400)
    assert found.claim in text
    assert found.test in text
    assert f"{found.rows[0]['variance, none']:.2f}" in text
    assert "verdict  the measurement supports the claim" in text
    assert "does not support" in drawn(replace(found, verdict=False), 400)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_number_is_lost_in_a_narrow_terminal(found: lab.Experiment, width: int) -> None:
    rows = found.rows[:2]
    text = drawn(RowTable(rows), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    for row in rows:
        for value in row.values():
            assert cell(value) in text
    assert "…" not in text


def test_text_is_left_aligned_and_numbers_right_aligned() -> None:
    text = drawn(RowTable([{"mask": "causal", "density": 0.5}, {"mask": "all", "density": 0.0625}]), 80)
    assert [line.rstrip() for line in text.splitlines()] == ["mask    density", "causal      0.5", "all      0.0625"]


def test_control_characters_are_escaped() -> None:
    text = drawn(RowTable([{"a\x1b[2J": "b\x1b[2J"}]), 80)
    assert "\x1b" not in text
    assert "b\\x1b[2J" in text


def test_the_list_has_one_line_per_experiment_that_fits_80_columns() -> None:
    lines = drawn(listing({name: study.brief for name, study in lab.studies().items()}), 80).splitlines()
    for line, (name, study) in zip(lines, lab.studies().items(), strict=True):
        assert 0 < len(study.brief) <= 60
        assert line.rstrip().split(maxsplit=1) == [name, study.brief]
