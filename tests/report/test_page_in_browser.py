"""The report in a real browser: opened from disk, with mouse and keyboard, on a phone, light and dark."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from browser import chrome, complaints, opened, prefer, settle, view
from looks import example, layer, synthetic, words
from regard.report import page
from regard.report.look import Look
from regard.report.page_pack import LEAST_WEIGHT

LEGIBLE = """
const dot = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
const pen = dot.getContext("2d", {willReadFrequently: true});
const rgb = (colours) => {
  pen.clearRect(0, 0, 1, 1);
  for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
  return pen.getImageData(0, 0, 1, 1).data;
};
const light = (c) => [0, 1, 2].reduce((sum, i) => {
  const x = c[i] / 255;
  return sum + [0.2126, 0.7152, 0.0722][i] * (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
}, 0);
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const poor = [];
let count = 0;
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
  if (node.matches("script, option, :disabled, .skip")) continue;
  const behind = [];
  for (let at = node; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
  const [back, front] = [light(rgb(behind)), light(rgb([...behind, getComputedStyle(node).color]))];
  const contrast = (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
  count++;
  if (contrast < 4.5) poor.push(`${walker.currentNode.data.trim()} (${node.className}): ${contrast.toFixed(2)}`);
}
return [count, poor];
"""


@pytest.fixture(scope="module")
def look() -> Look:
    return example(layers=3, heads=4, tokens=80, k=8)


@pytest.fixture(scope="module")
def path(look: Look, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page.write(look, tmp_path_factory.mktemp("report") / "a page & more.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chrome() as driver:
        yield driver


@pytest.fixture
def driver(browser: Any, path: Path) -> Iterator[Any]:
    """The example's page, freshly opened on a desktop in the light theme; the console must stay empty."""
    view(browser, 1280, 900)
    prefer(browser, dark=False)
    browser.get("about:blank")
    opened(browser, path)
    yield browser
    browser.execute_script("try { localStorage.clear() } catch { return }")
    assert complaints(browser) == []


def at(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def text(driver: Any, selector: str) -> str:
    return at(driver, selector).text


def each(driver: Any, selector: str, what: str) -> list[str]:
    """`what` of every element that `selector` finds, in one call."""
    return driver.execute_script(f"return [...document.querySelectorAll(arguments[0])].map(e => e.{what})", selector)


def cell(driver: Any, row: int, head: int) -> Any:
    return at(driver, f".cellule[data-layer='{row}'][data-head='{head}']")


def hover(driver: Any, element: Any, right: int = 0, down: int = 0) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    settle(driver)
    ActionChains(driver, duration=0).move_to_element_with_offset(element, right, down).perform()
    settle(driver)


def press(driver: Any, *names: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(driver, duration=0).send_keys(*(getattr(Keys, name) for name in names)).perform()


def choose(driver: Any, selector: str, label: str) -> None:
    from selenium.webdriver.support.select import Select

    Select(at(driver, selector)).select_by_visible_text(label)


def three(value: float) -> str:
    """A number as the page writes it, to three digits."""
    return f"{float(f'{value:.3g}'):g}"


def focused(driver: Any) -> dict[str, str]:
    return dict(driver.execute_script("return {...document.activeElement.dataset}"))


def partners(driver: Any) -> list[tuple[float, int]]:
    weights, places = each(driver, ".partner .number", "innerText"), each(driver, ".partner .place", "innerText")
    return [(float(weight.replace("−", "-")), int(place)) for weight, place in zip(weights, places, strict=True)]


def strongest(look: Look, row: int, head: int, query: int) -> list[tuple[float, int]]:
    weights, keys = look.layers[row].heads[head].strongest
    return [
        (weight, key)
        for weight, key in zip(weights[query].tolist(), keys[query].tolist(), strict=True)
        if weight >= LEAST_WEIGHT
    ]


def same(shown: list[tuple[float, int]], given: list[tuple[float, int]]) -> bool:
    return [key for _, key in shown] == [key for _, key in given] and all(
        math.isclose(one, other, abs_tol=6e-4) for (one, _), (other, _) in zip(shown, given, strict=True)
    )


def test_it_opens_from_disk_and_shows_its_input_as_text(driver: Any, look: Look) -> None:
    assert driver.current_url.startswith("file:///")
    assert driver.title == look.title
    assert text(driver, "h1") == look.title
    assert "hand-built <i>model</i>" in text(driver, "#facts")
    assert "saturated <b>in most rows</b>." in text(driver, "#remarks")
    tokens = each(driver, ".token", "innerText")
    assert tokens[:2] == words(2)
    assert tokens[5:11] == ["↵", "∅", "·", "··", "⇥", r"\r↵"]
    assert tokens[11] == r"\u202edlrow"
    assert tokens[15:17] == [r"\ud800", r"\u2028"]
    assert driver.execute_script("return document.querySelectorAll('script').length") == 2


def test_a_script_that_is_not_ours_does_not_run(browser: Any, path: Path) -> None:
    opened(browser, path)
    script = "const s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s);"
    assert browser.execute_script(f"{script} return window.broken ?? null") is None
    assert any("Content Security Policy" in said for said in complaints(browser))


def test_pointing_at_a_head_shows_its_numbers(driver: Any, look: Look) -> None:
    hover(driver, cell(driver, 1, 2))
    shown, given = text(driver, "#tip"), look.layers[1].heads[2].statistics
    assert "transformer.h.1.attn · head 2" in shown
    assert f"{three(given['entropy'])} nats" in shown
    assert f"{three(100 * given['first_share'])} %" in shown
    assert "Distance\n–" in shown
    hover(driver, at(driver, "h1"))
    assert not at(driver, "#tip").is_displayed()


def test_a_click_on_a_head_shows_its_map_statistics_and_tokens(driver: Any, look: Look) -> None:
    before = driver.execute_script("return document.getElementById('map').toDataURL()")
    cell(driver, 0, 3).click()
    assert text(driver, "#detail-title") == "transformer.h.0.attn · head 3"
    assert cell(driver, 0, 3).get_attribute("aria-selected") == "true"
    assert f"{three(look.layers[0].heads[3].statistics['entropy'])} nats" in text(driver, "#numbers")
    assert driver.execute_script("return document.getElementById('map').toDataURL()") != before
    assert driver.current_url.endswith("#head=0.3")
    assert same(partners(driver), strongest(look, 0, 3, 63))
    at(driver, "#after").click()
    assert text(driver, "#detail-title") == "transformer.h.1.attn · head 0"


def test_an_address_leads_to_its_head(driver: Any, path: Path) -> None:
    driver.get("about:blank")
    driver.get(path.as_uri() + "#head=1.2")
    assert text(driver, "#detail-title") == "transformer.h.1.attn · head 2"
    driver.get(path.as_uri() + "#head=9.9")
    assert text(driver, "#detail-title") == "transformer.h.1.attn · head 2"


def test_a_finding_selects_its_heads(driver: Any) -> None:
    problem, other, notable = driver.find_elements("css selector", "#remarks a")  # problems first; one names no layer
    notable.click()
    assert text(driver, "#detail-title") == "transformer.h.2.attn · head 1"
    problem.click()
    assert text(driver, "#detail-title") == "transformer.h.2.attn · head 0"
    assert each(driver, ".cellule.named", "dataset.head") == ["0", "2"]
    assert "saturated" in text(driver, "#said")
    assert "named without a link" in text(driver, "#remarks")
    other.click()
    assert text(driver, "#detail-title") == "transformer.h.2.attn · head 2"
    assert each(driver, "#remarks a[aria-current=true]", "textContent") == ["2"]
    assert text(driver, "#findings-count") == "1 problem, 2 notable; they name 3 of 12 heads"


def test_the_keyboard_reaches_everything(driver: Any) -> None:
    press(driver, "TAB")
    assert driver.switch_to.active_element.text == "Skip to the heads"
    press(driver, "ENTER", "TAB", "TAB")
    assert focused(driver) == {"layer": "2", "head": "0"}
    press(driver, "ARROW_UP", "ARROW_RIGHT", "ARROW_RIGHT")
    assert focused(driver) == {"layer": "1", "head": "2"}
    assert "head 2" in text(driver, "#tip")
    outline = driver.execute_script("return getComputedStyle(document.activeElement).outlineWidth")
    assert float(outline.removesuffix("px")) >= 2
    assert text(driver, "#detail-title") == "transformer.h.2.attn · head 0"
    press(driver, "ENTER")
    assert text(driver, "#detail-title") == "transformer.h.1.attn · head 2"
    press(driver, "HOME", "ARROW_LEFT", "ARROW_UP", "ARROW_UP", "END", "ESCAPE")
    assert focused(driver) == {"layer": "0", "head": "3"}
    assert not at(driver, "#tip").is_displayed()


def test_escape_leaves_the_tokens_for_the_grid(driver: Any, look: Look) -> None:
    driver.execute_script("document.querySelector('.token[tabindex=\"0\"]').focus()")
    press(driver, "ARROW_LEFT", "HOME", "ARROW_RIGHT", "ARROW_DOWN")
    place = int(focused(driver)["place"])
    assert place > 1  # in the line below
    press(driver, "ENTER")
    assert at(driver, ".token[aria-selected='true']").get_attribute("data-place") == str(place)
    assert same(partners(driver), strongest(look, 2, 0, place))
    press(driver, "ESCAPE")
    assert not driver.find_elements("css selector", ".token[aria-selected='true']")
    press(driver, "ESCAPE")
    assert focused(driver) == {"layer": "2", "head": "0"}


def test_another_statistic_recolours_the_heads(driver: Any, look: Look) -> None:
    def colours() -> list[str]:
        return each(driver, ".cellule", "style.backgroundColor")

    entropy = colours()
    choose(driver, "#statistic", "Largest logit")
    logits = [one.statistics["max_logit"] for row in look.layers for one in row.heads]
    assert colours() != entropy
    assert colours()[logits.index(min(logits))] == "rgb(68, 1, 84)"
    assert colours()[logits.index(max(logits))] == "rgb(253, 231, 37)"
    assert text(driver, "#heads-low") == three(min(logits))
    choose(driver, "#statistic", "On the first key (%)")
    assert text(driver, "#heads-unit") == "%"
    choose(driver, "#statistic", "Distance (tokens)")
    assert each(driver, ".cellule", "innerText") == ["–"] * 12
    assert not at(driver, "#heads-legend").is_displayed()
    choose(driver, "#statistic", "Pooled maps")
    assert len(driver.find_elements("css selector", ".cellule canvas")) == 12


def test_heads_that_are_almost_alike_get_almost_one_colour(driver: Any, tmp_path: Path) -> None:
    look = synthetic(1, 2, 8)
    look.layers[0].heads[1] = replace(look.layers[0].heads[1], statistics={"entropy": 1.0001})
    opened(driver, page.write(look, tmp_path / "alike.html"))
    one, other = (
        [int(part) for part in re.findall(r"\d+", c)] for c in each(driver, ".cellule", "style.backgroundColor")
    )
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 2
    assert [text(driver, "#heads-low"), text(driver, "#heads-high")] == ["0.99", "1.01"]


def test_pointing_at_the_map_reads_its_cells(driver: Any, look: Look) -> None:
    cell(driver, 2, 1).click()
    driver.execute_script("document.getElementById('map').focus()")
    press(driver, "ARROW_UP", "ARROW_DOWN", "ARROW_DOWN", "ARROW_LEFT", "ARROW_RIGHT")
    given = float(look.layers[2].heads[1].map[2, 1])
    shown = text(driver, "#cell").replace("\u2068", "").replace("\u2069", "").replace("−", "-")
    assert shown.startswith("3 “]]>” → 2 “<!--”: mean weight ")
    largest = float(look.layers[2].heads[1].map.max())
    assert math.isclose(float(shown.rpartition(" ")[2]), given, abs_tol=largest / 255 + 6e-3 * given)
    hover(driver, at(driver, "#map"), 30, 60)
    assert "mean weight" in text(driver, "#cell")
    assert "mean weight " + shown.rpartition(" ")[2] not in text(driver, "#cell")
    assert at(driver, "#cursor").is_displayed()
    before = driver.execute_script("return document.getElementById('map').toDataURL()")
    at(driver, "input[name=scale][value=linear] + span").click()
    assert driver.execute_script("return document.getElementById('map').toDataURL()") != before
    assert text(driver, "#map-ticks").startswith("0")


def test_pointing_at_a_token_shows_what_it_attends_to_and_what_attends_to_it(driver: Any, look: Look) -> None:
    cell(driver, 1, 0).click()
    hover(driver, at(driver, ".token[data-place='40']"))
    given = strongest(look, 1, 0, 40)
    assert same(partners(driver), given)
    shades = each(driver, ".token", "style.getPropertyValue('--w')")
    assert {place for place, shade in enumerate(shades) if shade} == {key for _, key in given}
    assert math.isclose(float(shades[given[0][1]]), 0.1 + 0.9 * math.sqrt(given[0][0]), abs_tol=2e-3)
    assert f"hold {sum(weight for weight, _ in given):.3f}" in text(driver, "#partners")
    hover(driver, at(driver, "h1"))
    assert "query 63" in text(driver, "#partners")  # the held token is shown again
    at(driver, "input[name=direction][value=keys] + span").click()
    at(driver, ".token[data-place='20']").click()
    back = [(w, query) for query in range(80) for w, key in strongest(look, 1, 0, query) if key == 20]
    back.sort(key=lambda pair: -pair[0])
    assert len(back) > 1
    assert f"8 strongest keys of {len(back)} of 80 queries" in text(driver, "#partners")
    assert same(partners(driver), back[:16])


def exact(look: Look, row: int, head: int) -> Look:
    """The example with the single weights of one head as its map, as reports on short texts have it."""
    layers = list(look.layers)
    one = layers[row]
    weights = torch.zeros(len(one.heads), len(one.queries), len(one.keys))
    for at, other in enumerate(one.heads):
        weights[at].scatter_(1, other.strongest[1].clamp(min=0), other.strongest[0])
    heads = [replace(other, map=weights[at]) for at, other in enumerate(one.heads)]
    return replace(look, layers=[*layers[:row], replace(one, heads=heads), *layers[row + 1 :]])


def test_a_short_text_is_shown_weight_by_weight_and_can_be_zoomed(driver: Any, look: Look, tmp_path: Path) -> None:
    opened(driver, page.write(exact(look, 1, 0), tmp_path / "exact.html"))
    cell(driver, 1, 0).click()
    assert "Every weight of 80 queries × 80 keys" in text(driver, "#cell")
    assert text(driver, "#map-unit") == "weight"
    driver.execute_script("document.getElementById('map').focus()")
    press(driver, *["ARROW_DOWN"] * 2, *["ARROW_RIGHT"] * 1)
    at(driver, "#in").click()
    at(driver, "#in").click()
    driver.execute_script("document.getElementById('map').focus()")
    wide = each(driver, "#map", "clientWidth")[0]
    hover(driver, at(driver, "#map"), wide // 4, 0)
    shown = text(driver, "#cell").replace("\u2068", "").replace("\u2069", "")
    found = re.match(r"([0-9]+) .* → ([0-9]+) .*: weight (.+)$", shown)
    assert found, shown
    query, key = int(found[1]), int(found[2])
    assert 30 <= query <= 50  # the middle quarter is in view
    assert 30 <= key <= 50
    given = {key: weight for weight, key in strongest(look, 1, 0, query)}.get(key, 0.0)
    assert math.isclose(float(found[3].replace("−", "-")), given, abs_tol=0.01)
    at(driver, "#map").click()
    assert each(driver, ".token[aria-selected=true]", "dataset.place") != []
    assert "token=" in driver.current_url
    at(driver, "#whole").click()
    assert not at(driver, "#out").is_enabled()


def test_the_address_keeps_what_is_shown_and_back_returns_to_it(driver: Any, path: Path) -> None:
    cell(driver, 0, 3).click()
    at(driver, ".token[data-place='40']").click()
    choose(driver, "#statistic", "Largest logit")
    at(driver, "input[name=scale][value=log] + span").click()
    at(driver, "input[name=view][value=lines] + span").click()
    address = "#head=0.3&token=40&statistic=max_logit&scale=log&view=lines"
    assert driver.current_url.endswith(address)
    driver.get("about:blank")
    driver.get(path.as_uri() + address)
    assert text(driver, "#detail-title") == "transformer.h.0.attn · head 3"
    assert "query 40" in text(driver, "#partners")
    assert at(driver, "#lines").is_displayed()
    assert not at(driver, "#map").is_displayed()
    assert each(driver, "input:checked", "value") == ["grid", "lines", "log", "queries"]
    at(driver, "input[name=view][value=map] + span").click()
    cell(driver, 1, 1).click()
    driver.back()
    assert text(driver, "#detail-title") == "transformer.h.0.attn · head 3"
    assert at(driver, "#map").is_displayed()
    driver.back()
    assert at(driver, "#lines").is_displayed()
    driver.get(path.as_uri() + "#head=x&token=-1&statistic=%&scale=huge&view=&axes=a~b&pin=7.7")
    assert text(driver, "#detail-title")


def test_lines_lead_from_each_query_to_its_keys(driver: Any, look: Look) -> None:
    cell(driver, 1, 2).click()
    at(driver, "input[name=view][value=lines] + span").click()
    assert len(driver.find_elements("css selector", ".ends.queries .end")) == 80
    drawn = "const c = document.querySelector('#lines canvas'); return c.toDataURL()"
    before = driver.execute_script(drawn)
    at(driver, ".ends.queries .end[data-place='30']").click()
    assert driver.execute_script(drawn) != before
    given = strongest(look, 1, 2, 30)
    assert same(partners(driver), given)
    marked = each(driver, ".ends.keys .end", "style.getPropertyValue('--w')")
    assert {place for place, shade in enumerate(marked) if shade != "0"} == {key for _, key in given}
    driver.execute_script("document.querySelector(\".ends.queries .end[tabindex='0']\").focus()")
    press(driver, "HOME", "ARROW_RIGHT", "ARROW_DOWN", "ENTER")
    assert driver.current_url.endswith("#head=1.2&token=1&direction=keys&view=lines")
    assert "key 1" in text(driver, "#partners")


def test_the_table_sorts_by_any_statistic_and_leads_to_a_head(driver: Any, look: Look) -> None:
    at(driver, "input[name=heads][value=table] + span").click()
    names, rows = each(driver, "#table-view thead button", "innerText"), "#table-view tbody tr"
    logits = {
        (r, h): one.statistics["max_logit"] for r, row in enumerate(look.layers) for h, one in enumerate(row.heads)
    }
    column = names.index("Largest logit")
    driver.find_elements("css selector", "#table-view thead button")[column].click()

    def order() -> list[tuple[int, int]]:
        return [
            (int(r), int(h))
            for r, h in driver.execute_script(
                "return [...document.querySelectorAll(arguments[0])].map((x) => [x.dataset.layer, x.dataset.head])",
                rows,
            )
        ]

    assert order() == sorted(logits, key=lambda place: -logits[place])
    assert each(driver, "[aria-sort=descending]", "innerText") == ["Largest logit"]
    press(driver, "ENTER")
    assert order() == sorted(logits, key=logits.__getitem__)
    assert "sink" in text(driver, f"{rows}[data-layer='2'][data-head='1']")
    at(driver, f"{rows}[data-layer='0'][data-head='2'] a").click()
    assert text(driver, "#detail-title") == "transformer.h.0.attn · head 2"
    assert "heads=table" in driver.current_url


def test_the_scatter_plot_has_a_dot_for_each_head_that_leads_to_it(driver: Any, look: Look) -> None:
    at(driver, "input[name=heads][value=scatter] + span").click()
    choose(driver, "#across", "Effective keys (keys)")
    choose(driver, "#up", "On the first key (%)")
    assert driver.current_url.endswith("&axes=effective_keys~first_share")
    dots = driver.execute_script(
        "return [...document.querySelectorAll('.dot')].map((x) => [x.getAttribute('href'), "
        "Number(x.firstChild.getAttribute('cx')), Number(x.firstChild.getAttribute('cy'))])"
    )
    given = {f"#head={r}.{h}": one.statistics for r, row in enumerate(look.layers) for h, one in enumerate(row.heads)}
    assert {href for href, _, _ in dots} == set(given)
    for name, axis, sign in (("effective_keys", 1, 1), ("first_share", 2, -1)):
        by_place = [dot[0] for dot in sorted(dots, key=lambda dot: sign * dot[axis])]
        assert by_place == sorted(given, key=lambda href: given[href][name])
    far = max(dots, key=lambda dot: dot[1])[0]
    at(driver, f".dot[href='{far}']").click()
    row, head = far.removeprefix("#head=").split(".")
    assert (row, head) != ("2", "0")
    assert text(driver, "#detail-title") == f"transformer.h.{row}.attn · head {head}"
    press(driver, "ARROW_LEFT", "ENTER")
    assert text(driver, "#detail-title") != f"transformer.h.{row}.attn · head {head}"


def test_a_pinned_head_stays_beside_the_chosen_one(driver: Any, look: Look) -> None:
    cell(driver, 0, 1).click()
    at(driver, "#pin").click()
    cell(driver, 1, 2).click()
    assert driver.current_url.endswith("#head=1.2&pin=0.1")
    left, right = at(driver, "#pinned-map").rect, at(driver, "#map").rect
    assert left["x"] + left["width"] <= right["x"]
    assert abs(left["y"] - right["y"]) < 2
    lists = driver.find_elements("css selector", "#partners .two > div")
    assert [one.text.split("\n")[0] for one in lists] == ["L0 H1", "L1 H2"]
    first = lists[0].find_element("css selector", ".number").text
    assert math.isclose(float(first), strongest(look, 0, 1, 63)[0][0], abs_tol=6e-4)
    assert text(driver, "#numbers").count("nats") == 2
    at(driver, "#pin").click()
    assert not at(driver, "#pinned-figure").is_displayed()


def test_a_search_finds_words_that_several_tokens_make_up(driver: Any, tmp_path: Path) -> None:
    opened(
        driver, page.write(Look("words", {}, [layer("a", WORDPIECE * 3, WORDPIECE * 3, 1)], []), tmp_path / "w.html")
    )
    at(driver, "#search").send_keys("un##believ")
    assert text(driver, "#matches") == "3 found"
    assert each(driver, ".token.match", "dataset.place") == ["7", "20", "33"]
    press(driver, "ENTER", "ENTER")
    assert text(driver, "#matches") == "2 of 3"
    assert "query 20" in text(driver, "#partners")
    at(driver, "#search").send_keys("x")
    assert text(driver, "#matches") == "not found"


def test_it_works_inside_a_sandboxed_frame(browser: Any, path: Path, tmp_path: Path) -> None:
    frame = (
        f"<iframe sandbox='allow-scripts' width=1000 height=700 srcdoc=\"{html.escape(path.read_text())}\"></iframe>"
    )
    (tmp_path / "notebook.html").write_text(f"<!doctype html><title>notebook</title>{frame}")
    opened(browser, tmp_path / "notebook.html")
    browser.switch_to.frame(0)
    try:
        cell(browser, 0, 3).click()
        at(browser, "#theme").click()
        at(browser, "input[name=view][value=lines] + span").click()
        at(browser, "#remarks a").click()
        browser.execute_script("document.getElementById('skip').click()")
        assert text(browser, "#detail-title") == "transformer.h.2.attn · head 0"
        assert browser.execute_script("return document.activeElement.id") == "overview"
        assert browser.execute_script("return location.href") == "about:srcdoc"
    finally:
        browser.switch_to.default_content()
    assert complaints(browser) == []


def test_the_theme_follows_the_system_until_one_is_chosen_and_remembered(driver: Any, path: Path) -> None:
    theme = "return document.documentElement.dataset.theme"
    assert driver.execute_script(theme) == "light"
    prefer(driver, dark=True)
    assert driver.execute_script(theme) == "dark"
    assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 24)"
    at(driver, "#theme").click()
    assert driver.execute_script(theme) == "light"
    driver.refresh()
    assert driver.execute_script(theme) == "light"
    assert text(driver, "#theme") == "Dark"


def test_a_page_without_storage_works(driver: Any, path: Path) -> None:
    broken = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('denied') }})"
    script = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": broken})
    try:
        driver.refresh()
        at(driver, "#theme").click()
        assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"
        assert text(driver, "#detail-title")
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_is_legible(driver: Any, dark: bool) -> None:
    prefer(driver, dark=dark)
    for shown in ("grid", "table", "scatter"):
        at(driver, f"input[name=heads][value={shown}] + span").click()
        at(driver, f"input[name=view][value={'lines' if shown == 'table' else 'map'}] + span").click()
        count, poor = driver.execute_script(LEGIBLE)
        assert count > 150
        assert poor == []


def test_colours_rise_in_lightness_evenly(driver: Any) -> None:
    pixels = driver.execute_script(
        "return [...document.getElementById('map-ramp').getContext('2d').getImageData(0, 0, 256, 1).data]"
    )

    def lightness(rgb: list[int]) -> float:
        r, g, b = (c / 3294.6 if c <= 10.31 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb)
        cones = (
            0.4122 * r + 0.5363 * g + 0.0514 * b,
            0.2119 * r + 0.6807 * g + 0.1074 * b,
            0.0883 * r + 0.2817 * g + 0.63 * b,
        )
        return sum(weight * cone ** (1 / 3) for weight, cone in zip((0.21045, 0.79362, -0.00407), cones, strict=True))

    values = [lightness(pixels[4 * place : 4 * place + 3]) for place in range(256)]
    assert values[-1] - values[0] > 0.6
    even = [values[0] + (values[-1] - values[0]) * place / 255 for place in range(256)]
    assert max(abs(one - other) for one, other in zip(values, even, strict=True)) < 0.01


def test_a_phone_needs_no_sideways_scrolling(browser: Any, path: Path, tmp_path: Path) -> None:
    cross = Look("title" * 40, {"fact": "x" * 300}, [], [])
    cross.layers.append(layer("decoder.layers.0.cross_attention.inner", words(30), ["W" * 100, *words(60)], 4))
    pages = [path, page.write(cross, tmp_path / "cross.html"), page.write(synthetic(3, 40, 30), tmp_path / "wide.html")]
    view(browser, 375, 812)
    for one in pages:
        opened(browser, one)
        sizes = (
            "const d = document.documentElement; return [d.scrollWidth, window.innerWidth, document.body.scrollWidth]"
        )
        assert browser.execute_script(sizes) == [375, 375, 375]
        cell(browser, 0, 1).click()
        assert browser.execute_script(sizes) == [375, 375, 375]
        assert at(browser, "#map").size["width"] > 250
        assert complaints(browser) == []


def test_queries_and_keys_are_read_side_by_side(driver: Any, tmp_path: Path) -> None:
    look = Look("cross", {}, [layer("cross", words(30), words(60)[5:], 2, k=4)], [])
    opened(driver, page.write(look, tmp_path / "cross.html"))
    queries, keys = driver.find_elements("css selector", "[role=listbox]")
    assert [queries.get_attribute("aria-label"), keys.get_attribute("aria-label")] == ["Queries", "Keys"]
    queries.find_element("css selector", "[data-place='12']").click()
    assert same(partners(driver), strongest(look, 0, 0, 12))
    first = strongest(look, 0, 0, 12)[0][1]
    assert keys.find_element("css selector", f"[data-place='{first}']").get_attribute("style")
    assert not queries.find_element("css selector", f"[data-place='{first}']").get_attribute("style")


def test_a_long_text_is_read_part_by_part(driver: Any, tmp_path: Path) -> None:
    look = synthetic(1, 1, 1300, k=4)
    opened(driver, page.write(look, tmp_path / "long.html"))
    assert len(driver.find_elements("css selector", ".token")) < 520
    assert text(driver, ".pager select").startswith("Tokens 0–432 of 1,300")
    at(driver, "[aria-label='Next part']").click()
    assert at(driver, ".token").get_attribute("data-place") == "433"
    choose(driver, ".pager select", "Tokens 867–1,299 of 1,300")
    at(driver, ".token[data-place='1000']").click()
    assert same(partners(driver), strongest(look, 0, 0, 1000))
    at(driver, ".partner").click()  # to a key in another part
    assert f"query {strongest(look, 0, 0, 1000)[0][1]:,}" in text(driver, "#partners")


WORDPIECE = ["[CLS]", "the", "play", "##ers", "were", "play", "##ing", "un", "##believ", "##ably", "well", ".", "[SEP]"]
BYTE_PAIRS = [f" {piece}" if piece[0] != "#" else piece[2:] for piece in WORDPIECE]


@pytest.mark.parametrize(
    ("tokens", "least"),
    [(WORDPIECE * 4, 5.0), ([str(place) for place in range(60)], 5.0), (BYTE_PAIRS * 4, 1.5)],
    ids=["wordpiece", "positions", "byte pairs"],
)
def test_neighbouring_tokens_are_spaced_apart(driver: Any, tmp_path: Path, tokens: list[str], least: float) -> None:
    opened(driver, page.write(Look("apart", {}, [layer("a", tokens, tokens, 1)], []), tmp_path / "apart.html"))
    boxes = each(driver, ".token", "getBoundingClientRect()")
    gaps = [b["left"] - a["right"] for a, b in pairwise(boxes) if abs(a["top"] - b["top"]) < 1]
    assert len(gaps) > len(tokens) / 2
    assert min(gaps) >= least
    assert len({round(box["top"]) for box in boxes}) > 1  # and lines still break between them


def test_positions_that_stand_in_for_tokens_are_named_once(driver: Any, tmp_path: Path) -> None:
    tokens = [str(place) for place in range(9)]
    opened(driver, page.write(Look("once", {}, [layer("a", tokens, tokens, 1)], []), tmp_path / "once.html"))
    names = each(driver, ".partner .who", "textContent")
    assert names
    assert set(names) <= set(tokens)


@pytest.mark.parametrize("width", [1100, 1400])
def test_numbers_below_the_map_s_colours_do_not_run_together(driver: Any, tmp_path: Path, width: int) -> None:
    tokens, before = [str(place) for place in range(9)], driver.get_window_size()
    driver.set_window_size(width, 1000)
    try:
        opened(driver, page.write(Look("ticks", {}, [layer("a", tokens, tokens, 1)], []), tmp_path / "ticks.html"))
        boxes = sorted(each(driver, "#map-ticks span", "getBoundingClientRect()"), key=lambda box: box["left"])
    finally:
        driver.set_window_size(before["width"], before["height"])
    assert len(boxes) > 1
    assert all(b["left"] - a["right"] > 2 for a, b in pairwise(boxes))
