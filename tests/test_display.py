"""In a notebook every object shows itself: through IPython's formatter, in a browser, and in an executed notebook."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from nbclient import NotebookClient
from torch import nn

import regard
from browser import chrome, opened
from mask_cases import CASES
from regard.display import block, fact_table, gallery, listed, matrix, note, picture, table
from regard.memory import Memory
from regard.models import builtin
from regard.models.findings import Finding, Findings
from regard.report.tables import HeadTable

ROOT = Path(__file__).parents[1]
EVIL = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>'\"&\u202e"
VOID = {"img"}


class Checked(HTMLParser):
    """Fails on tags that do not match, on scripts, on handlers of events, and on addresses elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.pages: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        for name, value in attributes:
            assert not name.startswith("on")
            assert name not in ("src", "href") or str(value).startswith("data:image/svg+xml;base64,")
            if name == "srcdoc":
                self.pages.append(str(value))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag == "path"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def checked(html: str) -> Checked:
    parser = Checked()
    parser.feed(html)
    parser.close()
    assert not parser.open
    return parser


def shown(value: Any) -> tuple[str, Checked]:
    """The text and the checked HTML by which IPython shows a value."""
    data, _ = DisplayFormatter().format(value)
    return data["text/plain"], checked(data["text/html"])


def watched(tokens: int = 40, trained: bool = True) -> regard.models.Seen:
    model = builtin.load(trained=trained)
    ids = torch.arange(tokens)[None] % 20
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids)
    return seen


@pytest.fixture(scope="module")
def seen() -> regard.models.Seen:
    return watched()


def monitor() -> regard.Monitor:
    attend, x = nn.MultiheadAttention(8, 2), torch.zeros(4, 1, 8)
    with regard.Monitor(attend, every=10) as found:
        for _ in range(11):
            attend(x, x, x)
    return found


def test_every_object_shows_itself_as_text_and_as_html(seen: regard.models.Seen) -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()
    with Memory(8, 8) as memory:
        memory.write(k[0, 0], v[0, 0])
        objects = {
            "2 heads": monitor(),
            "12 queries": regard.observe(q, k, v, mask=regard.causal()),
            "→": regard.why(q, k, v),
            "row sums 1.000000": regard.steps(q, k, v, regard.causal()),
            "causal()": regard.causal() & regard.window(3),
            "12 rows": memory,
            "max logit": seen.table(),
            "attends to": seen.findings(),
            "no difference": seen.diff(seen),
        }
        for words, value in objects.items():
            text, html = shown(value)
            assert text == str(value) == repr(value)
            assert words in text
            assert "".join(html.text).strip()
    assert shown(memory)[0] == "Memory(closed)"


def test_a_table_and_its_html_have_the_same_cells(seen: regard.models.Seen) -> None:
    text, html = shown(seen.table())
    assert re.findall(r"\S+", text.replace("max logit", "maxlogit")) == re.findall(
        r"\S+", " ".join(html.text).replace("max logit", "maxlogit")
    )


def test_every_mask_is_drawn() -> None:
    masks = {repr(case.mask): case.mask for case in CASES}
    without = set()
    for name, mask in masks.items():
        html = mask._repr_html_()
        assert name in "".join(checked(html).text)
        if not re.search(r"<svg.*[\d,]+ queries × [\d,]+ keys, [\d.]+% of the pairs are visible", html):
            without.add(name)
    empty = {repr(case.mask) for case in CASES if not case.n * case.m} - {repr(c.mask) for c in CASES if c.n * c.m}
    assert without <= empty


def test_a_mask_is_drawn_at_a_size_that_shows_it() -> None:
    said = {
        regard.causal(): "16 queries × 16 keys, 53.1%",
        regard.window(100): "256 queries × 256 keys",
        regard.packed([3, 4, 5]): "12 queries × 12 keys",
        regard.padding([3, 5]): "5 queries × 5 keys, 60.0% of the pairs are visible; the first item",
        regard.dense(torch.ones(4, 6).bool()): "4 queries × 6 keys, 100.0%",
    }
    for mask, words in said.items():
        assert words in mask._repr_html_()
    drawn = picture([[1.0, 0.0], [1.0, 1.0]], "two")
    assert 'd="M0 0h1v1h-1zM0 1h2v1h-2z"' in drawn  # neighbours in a row are one shape


def test_seen_is_the_report_in_a_sandboxed_frame_small_and_soon(seen: regard.models.Seen) -> None:
    long = watched(500)
    start = time.perf_counter()
    html = long._repr_html_()
    assert time.perf_counter() - start < 5.0  # one, on an idle machine
    assert len(html.encode()) < 300_000
    found = checked(html)
    assert 'sandbox="allow-scripts"' in html
    (page,) = found.pages
    assert page.startswith("<!doctype html>")
    assert "Content-Security-Policy" in page
    text, found = shown(seen)
    assert text == "Seen(4 layers, 32 heads, 4 calls)"
    assert len(found.pages) == 1


def test_a_long_text_is_summarized_and_says_how_to_save_it() -> None:
    with regard.watch(nn.Module()) as seen:
        regard.attention(*torch.randn(3, 1, 2, 600, 4).unbind(), mask=regard.causal())
    text, found = shown(seen)
    assert not found.pages
    words = " ".join(found.text)
    assert all(part in words for part in (text, "seen.save(", "relative", "all 2"))


def test_nothing_seen_and_inputs_that_changed_are_explained() -> None:
    with regard.watch(nn.Linear(2, 2)) as seen:
        pass
    assert "it was not called inside the with block" in " ".join(shown(seen)[1].text)
    q = torch.randn(1, 2, 12, 4)
    with regard.watch(nn.Module()) as seen:
        regard.attention(q, q, q)
    q.zero_()
    assert "was changed in place" in " ".join(shown(seen)[1].text)
    assert "was changed in place" in " ".join(shown(seen[0])[1].text)


def test_observations_without_rows_or_with_infinite_logits_are_shown() -> None:
    for q in (torch.randn(1, 2, 0, 4), torch.full((1, 2, 3, 4), torch.inf), torch.randn(3, 4)):
        assert "Observation(" in "".join(shown(regard.observe(q, q, q))[1].text)
    assert "first 8 of 24 heads" in "".join(shown(regard.observe(*torch.randn(3, 2, 12, 5, 4).unbind()))[1].text)


def test_text_from_outside_is_escaped_everywhere() -> None:
    numbers = {"entropy": 1.0, EVIL: 2.0}
    parts = [
        block(EVIL, note(EVIL)),
        fact_table({EVIL: EVIL}),
        table([EVIL], [[EVIL]]),
        listed([(EVIL, True)]),
        matrix(EVIL, [[EVIL]]),
        gallery([(EVIL, [[1.0]])]),
        HeadTable([(EVIL, EVIL, numbers)])._repr_html_(),
        Findings([Finding(EVIL, "problem", EVIL, EVIL, (0,), 1.0)], [EVIL])._repr_html_(),
    ]
    for part in parts:
        checked(part)
        assert "\u202e" not in part
    model = nn.ModuleDict({"x<script>": regard.nn.MultiheadAttention(8, 2)})
    with regard.watch(model) as seen:
        model["x<script>"](*[torch.randn(12, 1, 8)] * 3)
    seen.texts, seen.title = [EVIL] * 12, EVIL
    (page,) = checked(seen._repr_html_()).pages
    assert "onerror=alert" not in page.replace("&lt;img src=x onerror=alert", "").replace(
        "\\u003cimg src=x onerror=alert", ""
    )


def test_the_report_is_saved_and_opened(
    seen: regard.models.Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = seen.save(tmp_path / "report.html", tokens=[f"word{i}" for i in range(40)], title="Whales")
    page = path.read_text(encoding="utf-8")
    assert "<title>Whales</title>" in page
    assert "word39" in page
    urls: list[str] = []
    monkeypatch.setattr("webbrowser.open", urls.append)
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(tmp_path))
    assert seen.show() == tmp_path / "report.html"
    assert urls == [(tmp_path / "report.html").as_uri()]


def test_the_frame_works_in_a_browser_and_takes_the_theme_of_the_notebook(
    seen: regard.models.Seen, tmp_path: Path
) -> None:
    host = tmp_path / "host.html"
    with chrome() as driver:
        for theme in ("light", "dark"):
            head = f'<!doctype html><html style="color-scheme:{theme}"><head><meta charset="utf-8"></head>'
            host.write_text(f"{head}<body>{seen._repr_html_()}", encoding="utf-8")
            opened(driver, host)
            driver.switch_to.frame(driver.find_element("tag name", "iframe"))
            until = time.monotonic() + 20
            script = "return [document.documentElement.dataset.theme, !!document.querySelector('#remarks a')]"
            while (found := driver.execute_script(script)) != [theme, True]:
                assert time.monotonic() < until, found
                time.sleep(0.05)
            driver.find_element("css selector", "#remarks a").click()
            assert driver.get_log("browser") == []
            driver.switch_to.default_content()


def test_the_notebook_of_the_docs_runs_and_shows_every_object_once(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # the outputs are not stored
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells[1:]:
        (output,) = cell.outputs  # one, and no warning
        assert output.output_type == "execute_result"
        checked(output.data["text/html"])
    text = cells[-1].outputs[0].data["text/plain"]
    assert text.splitlines()[0].startswith("claim    For q and k with independent entries of variance 1")
    assert text.splitlines()[-1] == "verdict  the measurement supports the claim"
    frames = [cell for cell in cells[1:] if "<iframe" in cell.outputs[0].data["text/html"]]
    assert [cell.source.splitlines()[-1] for cell in frames] == ["seen"]
