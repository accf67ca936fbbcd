"""Terminal output: bars as long as their share, words escaped."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from regard.report.terminal import Alignment, bar, facts, shown


def drawn(alignment: Alignment, columns: int, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=stream, width=columns, color_system=None).print(alignment)
    stream.flush()
    return raw.getvalue().decode(encoding)


def uniform(queries: list[str], keys: list[str]) -> Alignment:
    row, count = [1.0 / len(keys)] * len(keys), len(queries)
    return Alignment(queries, keys, [row] * count, [0] * count, [0.5] * count, [1.6] * count)


@given(share=st.floats(0.0, 1.0), width=st.integers(1, 40), ascii_only=st.booleans())
def test_a_bar_fills_its_cells_and_is_as_long_as_its_share(share: float, width: int, ascii_only: bool) -> None:
    text = bar(share, width, ascii_only=ascii_only)
    assert cell_len(text) == width
    eighths = {symbol: count for count, symbol in enumerate(" ▏▎▍▌▋▊▉█")} | {"#": 8, "·": 0, ".": 0}
    assert abs(sum(eighths[symbol] for symbol in text) / 8 - share * width) <= (0.5 if ascii_only else 0.0625) + 1e-9


def test_hidden_is_blank_and_a_trace_is_a_dot() -> None:
    assert bar(0.0, 4) == "    "
    assert bar(1e-9, 4) == "·   "


@given(word=st.text(st.characters(), max_size=12))
def test_a_shown_word_holds_no_control_characters(word: str) -> None:
    text = shown(word)
    assert all(char.isprintable() or char.isspace() or char in "\u200c\u200d" for char in text)
    assert not set(text) & set("\x1b\r\n\t\b\u202e\u2066\u2028")
    assert shown(text) == text


@given(
    words=st.lists(st.text(st.characters(), min_size=1, max_size=30), min_size=1, max_size=20),
    columns=st.integers(50, 160),
)
def test_the_view_never_exceeds_the_terminal(words: list[str], columns: int) -> None:
    lines = drawn(uniform(words, words), columns, encoding="utf-8").split("\n")
    assert max(map(cell_len, lines)) <= columns


@pytest.mark.parametrize("columns", [50, 200])
def test_an_ascii_terminal_gets_ascii(columns: int) -> None:
    words = ["one", "caf\u00e9", "a-word-that-is-too-long-for-any-column"]
    text = drawn(uniform(words, words), columns, encoding="ascii")
    assert r"caf\xe9" in text
    assert "a-word-th" in text


def test_facts_are_text_and_not_markup() -> None:
    console = Console(width=60, color_system=None, record=True, file=io.StringIO())
    console.print(facts({"[b]name[/b]": "[red]fact[/red]"}))
    assert "[b]name[/b]  [red]fact[/red]" in console.export_text()
