"""The laboratory's page: complete, escaped, deterministic, readable on a phone and in the dark."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from browser import chrome, complaints, opened, prefer, view
from regard.errors import ArgumentError, FileError
from regard.lab import Row, Study, page
from regard.lab.base import Progress, canvas
from regard.lab.cells import cell, is_number, tables
from regard.lab.saved import Saved

EVIL = '<script>alert(1)</script> & "quotes" \x1b[31m'


@dataclass(frozen=True)
class Odd(Study):
    """A study whose numbers come from its fields."""

    name: ClassVar[str] = "odd"
    claim: ClassVar[str] = f"claim {EVIL}"
    test: ClassVar[str] = f"test {EVIL}"
    caption: ClassVar[str] = f"caption {EVIL}"

    rows: int = 3
    choice: str = EVIL

    def measure(self, progress: Progress) -> list[Row]:
        long: list[Row] = [{"n": n, f"word {EVIL}": EVIL, "share": n / 7, "right": n > 1} for n in range(self.rows)]
        return [*long, {"d": 4096, "none": float("nan"), "tiny": 1.5e-9}]

    def holds(self, rows: list[Row]) -> bool:
        return self.rows > 2

    def draw(self, rows: list[Row]) -> Figure:
        figure, axis = canvas(3.0, 2.0)
        axis.plot([row.get("n", 0) for row in rows], color="black")
        axis.text(0, 0, "on a colour", color="white", backgroundcolor="C0")
        axis.set(xlabel="n")
        return figure


class Other(Odd):
    """The same under another name."""

    name: ClassVar[str] = "other-2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lab") / "new" / "folder"
    page.write([Odd().run(), Other(rows=2).run()], place)
    return place


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    """A folder in which one experiment is saved."""
    for file in folder.glob("other-2*"):
        shutil.copy(file, tmp_path)
    return tmp_path


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and all of its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def sections(folder: Path) -> list[str | None]:
    seen = Tags((folder / "index.html").read_text(encoding="utf-8"))
    return [given["id"] for tag, given in seen.tags if tag == "section"]


def test_there_is_a_page_and_per_experiment_two_figures_and_its_numbers(folder: Path) -> None:
    files = [f"{name}{end}" for name in ("odd", "other-2") for end in (".json", ".svg", "-dark.svg")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(["index.html", *files])


def test_the_json_is_what_the_experiment_gives_and_holds_no_nan(folder: Path) -> None:
    saved = json.loads((folder / "odd.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    given = Odd().run().to_object()
    assert {key: saved[key] for key in given} == given
    assert saved.keys() - given.keys() == {"test", "caption", "choices"}
    assert saved["rows"][-1]["none"] is None


def test_claim_test_verdict_caption_and_table_are_there_and_escaped(folder: Path) -> None:
    text = (folder / "index.html").read_text(encoding="utf-8")
    seen = Tags(text)
    assert "script" not in [tag for tag, _ in seen.tags]
    assert "\x1b" not in text
    safe = EVIL.replace("\x1b", "\\x1b")
    for what in ("claim", "test", "caption", "word"):
        assert f"{what} {safe}" in seen.text
    assert "✓ The measurement supports the claim" in seen.text
    assert "✗ The measurement does not support the claim" in seen.text
    assert "The measurements support 1 of 2 claims." in seen.text
    assert [tag for tag, _ in seen.tags].count("table") == 4
    assert {"4,096", "1.5·10⁻⁹", "–", "0.1429", "yes", "no"} <= set(re.findall(r"<td[^>]*>([^<]*)</td>", text))


def test_every_file_it_refers_to_exists(folder: Path) -> None:
    seen = Tags((folder / "index.html").read_text(encoding="utf-8"))
    names = [value for _, given in seen.tags for key, value in given.items() if key in ("src", "srcset", "href")]
    places = [name for name in names if name and not name.startswith(("#", "data:"))]
    assert len(places) == 6
    assert all((folder / name).is_file() for name in places)
    ids = [given["id"] for _, given in seen.tags if "id" in given]
    assert len(ids) == len(set(ids))
    assert {name.removeprefix("#") for name in names if name and name.startswith("#")} <= set(ids)


def test_it_is_deterministic(folder: Path, tmp_path: Path) -> None:
    page.write([Odd().run()], tmp_path)
    for name in ("odd.json", "odd.svg", "odd-dark.svg"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_saved_experiments_stay_on_the_page_escaped_and_are_replaced_when_saved_again(
    folder: Path, tmp_path: Path
) -> None:
    for study in (Other(rows=2), Odd(rows=1), Odd()):
        page.write([study.run()], tmp_path)
    assert (tmp_path / "index.html").read_bytes() == (folder / "index.html").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"name": EVIL},
        {"verdict": "yes"},
        {"claim": 3},
        {"rows": {}},
        {"rows": [3]},
        {"rows": [{"n": [1]}]},
        {"choices": []},
        {"choices": {"n": 1}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_json_file_that_is_not_an_experiment_is_ignored(change: dict[str, object], saved: Path) -> None:
    file = saved / "other-2.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    page.write([Odd().run()], saved)
    assert sections(saved) == ["odd"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "{", "[" * 100_000, "\udcff"], ids=["", "[]", "{}", "{", "deep", "bytes"]
)
def test_an_unreadable_file_is_ignored(text: str, saved: Path) -> None:
    (saved / "other-2.json").write_bytes(text.encode(errors="surrogateescape"))
    page.write([Odd().run()], saved)
    assert sections(saved) == ["odd"]


def test_an_experiment_without_its_figures_is_ignored(saved: Path) -> None:
    page.write([Odd().run()], saved)
    assert sections(saved) == ["odd", "other-2"]
    (saved / "other-2-dark.svg").unlink()
    page.write([Odd().run()], saved)
    assert sections(saved) == ["odd"]


def test_a_long_table_is_folded_away() -> None:
    assert "<summary>Numbers, 41 rows</summary>" in page._section(Saved.from_experiment(Odd(rows=40).run()))


def test_in_the_dark_greys_are_mapped_and_colours_stay() -> None:
    figure = Odd().run().figure()
    axis = figure.axes[0]
    axis.plot([0, 1], color="C1")
    figure.draw_without_rendering()
    page._darken(figure)
    assert to_rgba(axis.lines[0].get_color())[0] > 0.85
    assert axis.lines[1].get_color() == "C1"
    assert to_rgba(axis.get_facecolor()) == pytest.approx(to_rgba("#191d23"))
    assert to_rgba(axis.xaxis.label.get_color())[0] > 0.85
    assert all(to_rgba(label.get_color())[0] > 0.85 for label in axis.get_xticklabels())
    assert axis.texts[0].get_color() == "white"


@pytest.mark.parametrize("name", ["../odd", "Odd name", "", "o<d"])
def test_a_name_that_cannot_be_a_file_name_is_refused(name: str, tmp_path: Path) -> None:
    class Named(Odd):
        pass

    Named.name = name
    with pytest.raises(ArgumentError, match="names become file names"):
        page.write([Named().run()], tmp_path)


def test_no_experiment_and_the_same_one_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one"):
        page.write([], tmp_path)
    with pytest.raises(ArgumentError, match="must be unique"):
        page.write([Odd().run(), Odd(rows=2).run()], tmp_path)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(FileError, match="cannot be created"):
        page.write([Odd().run()], tmp_path / "file" / "below")


def test_it_reads_on_a_phone_and_in_the_dark(folder: Path) -> None:
    with chrome(390, 800) as driver:
        opened(driver, folder / "index.html")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
        assert driver.execute_script("return [...document.images].every((one) => one.naturalWidth > 100)")
        prefer(driver, dark=True)
        view(driver, 1200, 900)
        opened(driver, folder / "index.html")
        shown = driver.execute_script("return [...document.images].map((one) => one.currentSrc.split('/').pop())")
        assert shown == ["odd-dark.svg", "other-2-dark.svg"]
        assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 24)"
        assert not complaints(driver)


def test_rows_with_other_columns_are_another_table() -> None:
    rows = Odd(rows=2).run().rows
    assert [len(some) for some in tables(rows)] == [2, 1]
    assert tables([]) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-0.5, "−0.5"), (1234.5678, "1,235"), (99999.0, "99,999"), (1e7, "1·10⁷"), (-2.5e-7, "−2.5·10⁻⁷")],
)
def test_a_number_is_shown_with_four_digits(value: float, text: str) -> None:
    assert cell(value) == text
    assert is_number(value)
    assert not is_number(True)


def test_a_verdict_never_relies_on_colour_alone() -> None:
    found = Saved.from_experiment(Odd().run())
    assert "✓" in page._link(found)
    assert "✗" in page._link(replace(found, verdict=False))
