"""The atlas in a browser: it shows what was observed at any position and zoom, and runs only our own scripts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from browser import chrome, complaints, prefer, view
from regard.observation import Observation
from regard.report.atlas import Atlas, AtlasLayer, Serving, serve
from regard.report.look import HeadLook, LayerLook, Look, Remark
from regard.report.page import render

N = 2100  # long enough for a level that is computed meanwhile
HOSTILE = "<img src=x onerror=window.broken=1>"
WORDS = [HOSTILE, "\n", " the", "\u202eturned", "plain", ""]
TOKENS = [f"{WORDS[i % len(WORDS)]}{i}" for i in range(N)]


Q, K = (torch.randn(1, 2, N, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


@pytest.fixture(scope="module")
def seen() -> Observation:
    return regard.observe(Q, K, K[..., :2], mask=regard.causal(), scale=torch.tensor([0.4, 1.2]), backend="chunked")


@pytest.fixture(scope="module")
def weights(seen: Observation) -> Tensor:
    return seen.weights()[0]


@pytest.fixture(scope="module")
def serving(seen: Observation) -> Iterator[Serving]:
    small = regard.observe(Q[..., :4, :], K[..., :6, :], K[..., :6, :2])
    layers = [
        AtlasLayer(f"first {HOSTILE}", seen, TOKENS, TOKENS),
        AtlasLayer("second", small, list("abcd"), list("uvwxyz")),
    ]
    with serve(Atlas(f"An atlas {HOSTILE}", layers, f"A note {HOSTILE}")) as running:
        yield running


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chrome(1000, 700) as running:
        yield running


def test_the_page_opens_before_the_first_layer_and_adds_the_others_as_they_come(driver: Any) -> None:
    x = torch.zeros(1, 2, 3, 8)
    growing = Atlas("growing", expected=2)

    def text(name: str) -> str:
        return str(driver.find_element("id", name).text)

    with serve(growing) as serving:
        driver.get(serving.url)
        until(lambda: text("notice-text") == "The model is reading the text: 0 of 2 layers so far")
        growing.add(AtlasLayer("one", regard.observe(x, x, x), list("abc"), list("abc")))
        until(lambda: text("kicker").lower() == "attention atlas · 1 of 2 layers so far")
        assert not text("notice-text")
        growing.add(AtlasLayer("two", regard.observe(x, x, x), list("abc"), list("abc")))
        growing.complete()
        until(lambda: text("kicker").lower() == "attention atlas")
        assert text("layer").split() == ["one", "two"]
    driver.get("about:blank")
    driver.get_log("browser")


class Page:
    """The atlas, opened at a position, and what it shows."""

    def __init__(self, driver: Any, serving: Serving, place: str = "") -> None:
        self.driver, self.url = driver, serving.url
        driver.get_log("browser")
        driver.get("about:blank")
        driver.get(f"{serving.url}{place}")
        self.settle()

    def settle(self) -> None:
        ready = "return document.documentElement.dataset.ready === 'true' && document.getElementById('notice').hidden"
        until(lambda: bool(self.run(ready)))

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def place(self) -> tuple[int, int, float, float, float]:
        """Layer, head, central query and key, and pixels per pair: from the address."""
        layer, head, query, key, scale = self.run("return location.hash").lstrip("#").split("/")[:5]
        return int(layer), int(head), float(query), float(key), float(scale)

    def spot(self, query: float, key: float) -> tuple[float, float]:
        """The pixel of a position on the map, relative to the centre of the canvas."""
        _, _, y, x, scale = self.place()
        return (key - x) * scale, (query - y) * scale

    def point(self, query: float, key: float) -> str:
        """Move the pointer over a position, and return the readout."""
        from selenium.webdriver import ActionChains

        dx, dy = self.spot(query, key)
        ActionChains(self.driver).move_to_element_with_offset(self.by_id("map"), round(dx), round(dy)).perform()
        self.settle()
        until(lambda: re.search(r"weight [0-9]", self.text("readout")) is not None)
        return self.text("readout")

    def colour(self, query: float, key: float) -> tuple[int, ...]:
        """The colour at a position on the canvas."""
        dx, dy = self.spot(query, key)
        script = (
            "const c = document.getElementById('map'), at = (size, d) => Math.floor(size / 2 + d);"
            "const [x, y] = [at(c.clientWidth, arguments[0]), at(c.clientHeight, arguments[1])];"
            "return [...c.getContext('2d').getImageData(x, y, 1, 1).data]"
        )
        return tuple(self.run(script, dx, dy))

    def press(self, keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(keys).perform()
        self.settle()

    def by_id(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        return str(self.by_id(name).text)


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def wrong(driver: Any) -> list[str]:
    """The console's complaints, except about the pixels that these tests read back."""
    return [complaint for complaint in complaints(driver) if "willReadFrequently" not in complaint]


def said(readout: str) -> float:
    found = re.match(r"(?:mean )?weight ([0-9.]+(?:e−[0-9]+)?), ", readout)
    assert found, readout
    return float(found[1].replace("−", "-"))


def test_the_whole_map_is_shown_first_and_nothing_complains(driver: Any, serving: Serving) -> None:
    page = Page(driver, serving)
    _, _, _, _, scale = page.place()
    assert 500 < N * scale < 700
    visible, hidden = page.colour(2000, 100), page.colour(100, 2000)
    assert visible[3] == hidden[3] == 255
    assert hidden[:3] == (0xEC, 0xEC, 0xEA)
    assert visible != hidden
    assert page.text("title") == f"An atlas {HOSTILE}"
    assert page.text("note") == f"A note {HOSTILE}"
    assert not page.by_id("overview").is_displayed()
    assert wrong(driver) == []


def test_a_single_weight_is_shown_with_its_tokens(driver: Any, serving: Serving, weights: Tensor) -> None:
    page = Page(driver, serving, "#0/0/1500/1400/30")
    readout = page.point(1502.5, 1405.5)
    assert readout.endswith(", query 1,502 “·the1502” → key 1,405 “↵1405”")
    assert said(readout) == pytest.approx(float(weights[0, 1502, 1405]), rel=1e-3)
    assert page.text("unit") == "weight"
    assert "query 1,503 “\\u202eturned1503” →" in page.point(1503.5, 1405.5)


def test_a_cell_of_many_pairs_shows_their_range_and_mean(driver: Any, serving: Serving, weights: Tensor) -> None:
    page = Page(driver, serving, "#0/1/1200/700/0.3")
    readout = page.point(1402, 806)
    assert ", queries 1,400–1,403 " in readout
    assert " → keys 804–807 " in readout
    assert said(readout) == pytest.approx(float(weights[1, 1400:1404, 804:808].mean()), rel=2e-3)
    assert page.text("unit") == "mean of 4 × 4 weights"


def test_the_coarse_levels_show_the_means_that_were_observed(driver: Any, serving: Serving, weights: Tensor) -> None:
    try:
        view(driver, 800, 340)
        page = Page(driver, serving)
        assert page.text("unit") == "mean of 16 × 16 weights"
        readout = page.point(1608, 408)
        found = re.search(r"queries ([0-9,]+)–([0-9,]+) .* keys ([0-9,]+)–([0-9,]+) ", readout)
        assert found, readout
        top, bottom, left, right = (int(number.replace(",", "")) for number in found.groups())
        assert abs(top - 1600) <= 16
        assert abs(left - 400) <= 16
        mean = weights[0, top : bottom + 1, left : right + 1].mean()
        assert said(readout) == pytest.approx(float(mean), rel=1e-3)
    finally:
        view(driver, 1000, 700)


def test_moving_with_keys_wheel_drag_and_buttons(driver: Any, serving: Serving) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, serving, "#0/0/1000/900/0.5")
    page.press(Keys.ARROW_RIGHT)
    assert page.place()[3] == pytest.approx(900 + 0.2 * 1000 / 0.5, abs=2)
    page.press(Keys.ARROW_UP)
    assert page.place()[2] < 1000
    page.press("+")
    assert page.place()[4] == pytest.approx(1.0)
    page.press("-")
    assert page.place()[4] == pytest.approx(0.5)
    page.press("0")
    assert page.place()[4] < 0.32
    target = page.by_id("map")
    before = page.place()
    ActionChains(driver).drag_and_drop_by_offset(target, 40, 30).perform()
    page.settle()
    after = page.place()
    assert before[3] - after[3] == pytest.approx(40 / before[4], abs=4)
    assert before[2] - after[2] == pytest.approx(30 / before[4], abs=4)
    ActionChains(driver).scroll_from_origin(ScrollOrigin.from_element(target, 100, 50), 0, -200).perform()
    page.settle()
    zoomed = page.place()
    assert zoomed[4] > 1.2 * after[4]
    assert zoomed[3] + 100 / zoomed[4] == pytest.approx(after[3] + 100 / after[4], abs=3)  # it stays under the pointer
    assert zoomed[2] + 50 / zoomed[4] == pytest.approx(after[2] + 50 / after[4], abs=3)
    page.by_id("in").click()
    page.settle()
    assert page.place()[4] == pytest.approx(2 * zoomed[4], rel=1e-3)
    ActionChains(driver).double_click(target).perform()
    page.settle()
    assert page.place()[4] == pytest.approx(4 * zoomed[4], rel=1e-3)
    assert page.by_id("overview").is_displayed()
    page.by_id("whole").click()
    page.settle()
    assert not page.by_id("overview").is_displayed()
    assert wrong(driver) == []


def test_an_animated_step_ends_where_an_instant_one_does(driver: Any, serving: Serving) -> None:
    try:
        prefer(driver, dark=False, still=False)
        page = Page(driver, serving, "#0/0/1000/900/0.5")
        page.press("+")
        until(lambda: page.place()[4] == 1.0)
        glided = page.place()
    finally:
        prefer(driver, dark=False)
    page = Page(driver, serving, "#0/0/1000/900/0.5")
    page.press("+")
    assert page.place() == pytest.approx(glided, abs=0.02)


def test_a_click_on_the_overview_moves_there(driver: Any, serving: Serving) -> None:
    from selenium.webdriver import ActionChains

    page = Page(driver, serving, "#0/0/300/200/3")
    small = page.by_id("overview")
    ActionChains(driver).move_to_element_with_offset(small, 0, 30).click().perform()
    page.settle()
    _, _, query, key, scale = page.place()
    assert scale == 3
    assert key == pytest.approx(N / 2, abs=40)
    assert query > 0.6 * N


def test_the_address_restores_the_view(driver: Any, serving: Serving) -> None:
    page = Page(driver, serving, "#0/1/1234/777/5/linear")
    assert page.place() == (0, 1, 1234.0, 777.0, 5.0)
    assert page.run("return document.querySelector('[name=scale]:checked').value") == "linear"
    driver.refresh()
    page.settle()
    assert page.place() == (0, 1, 1234.0, 777.0, 5.0)
    for nonsense in ("#9/0/1/1/1", "#0/0/x/NaN/1", "#-1", "#%00", "#0/0/1/1/-3"):
        assert Page(driver, serving, nonsense).place()[:2] == (0, 0)
    assert wrong(driver) == []


def test_heads_and_layers_are_switched(driver: Any, serving: Serving, weights: Tensor) -> None:
    from selenium.webdriver.support.select import Select

    page = Page(driver, serving, "#0/0/1500/1400/30")
    for press, head in (("]", 1), ("[", 0)):
        page.press(press)
        assert page.place()[1] == head
        assert said(page.point(1502.5, 1405.5)) == pytest.approx(float(weights[head, 1502, 1405]), rel=1e-3)
    Select(page.by_id("head")).select_by_visible_text("1")
    page.settle()
    assert page.place()[1] == 1
    layers = Select(page.by_id("layer"))
    assert [option.text for option in layers.options] == [f"first {HOSTILE}", "second"]
    layers.select_by_visible_text("second")
    page.settle()
    assert page.place()[:2] == (1, 1)
    assert page.point(2.5, 4.5).endswith(", query 2 “c” → key 4 “y”")
    assert wrong(driver) == []


def test_colours_follow_the_scale_that_is_chosen(driver: Any, serving: Serving) -> None:
    page = Page(driver, serving, "#0/0/1500/1400/30")
    log, ticks = page.colour(1502.5, 1405.5), page.text("ticks")
    page.run("document.querySelector('[name=scale][value=linear]').click()")
    page.settle()
    assert page.colour(1502.5, 1405.5) != log
    assert page.text("ticks") != ticks


def test_text_from_outside_is_only_text(driver: Any, serving: Serving) -> None:
    page = Page(driver, serving, "#0/0/1500/1400/30")
    assert f"query 1,500 “{HOSTILE.replace(' ', '·')[:23]}…”" in page.point(1500.5, 1404.5)
    assert page.run("return window.broken") is None
    assert page.run("return document.images.length") == 0
    origins = page.run("return performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)")
    assert set(origins) == {serving.url.removesuffix(f"/{serving._server.token}/")}


def test_it_works_in_the_dark_and_on_a_narrow_screen(driver: Any, serving: Serving) -> None:
    try:
        prefer(driver, dark=True)
        view(driver, 375, 667)
        page = Page(driver, serving)
        assert page.colour(100, 2000)[:3] == (0x2A, 0x30, 0x39)
        assert page.run("return document.documentElement.scrollWidth") <= 375
        page.by_id("theme").click()
        page.settle()
        assert page.colour(100, 2000)[:3] == (0xEC, 0xEC, 0xEA)
        small = page.run(
            "return [...document.querySelectorAll('button, select')].filter((x) => x.checkVisibility())"
            ".map((x) => x.getBoundingClientRect())"
            ".filter((box) => box.height < 32 || box.right > innerWidth || box.left < 0).length"
        )
        assert small == 0
        assert wrong(driver) == []
    finally:
        prefer(driver, dark=False)
        view(driver, 1000, 700)


def test_two_fingers_zoom(driver: Any, serving: Serving) -> None:
    page = Page(driver, serving, "#0/0/1000/900/0.5")

    def fingers(kind: str, *spots: tuple[int, int]) -> None:
        points = [{"x": x, "y": y, "id": at} for at, (x, y) in enumerate(spots)]
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", (450, 350), (550, 350))
    fingers("touchMove", (400, 350), (600, 350))
    fingers("touchEnd")
    page.settle()
    assert page.place()[4] == pytest.approx(1.0, rel=0.02)


@pytest.fixture(scope="module")
def described(seen: Observation) -> Iterator[Serving]:
    """An atlas that knows its heads and has a report; findings name head 1 of the second layer."""
    maps = Atlas("described", expected=2)
    for name in ("one", "two"):
        maps.add(AtlasLayer(name, seen, TOKENS, TOKENS))
        numbers = [{"entropy": 1.0 + head, "first_share": 0.25} for head in range(2)]
        maps.heads.add(numbers, seen.map(64, 64)[0])
    maps.complete()
    pairs = tuple(x[0].cpu() for x in seen.top(2))
    heads = [HeadLook(h, {"entropy": 1.0}, seen.map(64, 64)[0, h], (pairs[0][h], pairs[1][h])) for h in range(2)]
    look = Look("described", {}, [LayerLook(name, TOKENS, TOKENS, heads) for name in ("one", "two")], [])
    maps.report = lambda: render(look, 1_000_000, atlas="./")
    maps.heads.conclude([Remark("sink", "notable", f"rests on {HOSTILE}", "two", (1,))])
    with serve(maps) as running:
        yield running


def test_it_opens_on_the_most_notable_head_with_the_heads_at_its_side(driver: Any, described: Serving) -> None:
    try:
        view(driver, 1200, 700)
        page = Page(driver, described)
        until(lambda: page.place()[:2] == (1, 1))
        entries = page.run("return [...document.querySelectorAll('.head')].map((x) => x.innerText)")
        assert entries[0].split("\n") == ["L1 H1", "sink", "entropy 2\u00a0nats, on the first key 25\u00a0%"]
        assert [entry.split("\n")[0] for entry in entries[1:]] == ["L0 H0", "L0 H1", "L1 H0"]
        assert page.run("return document.querySelectorAll('.head canvas[data-drawn]').length") == 4
        from selenium.webdriver.support.select import Select

        Select(page.by_id("order")).select_by_visible_text("Entropy, smallest first")
        page.run("document.querySelector('.head').click()")
        page.settle()
        assert page.place()[:2] == (0, 0)
        assert page.run("return window.broken") is None
        assert Page(driver, described, "#0/1/900/900/1/log").place()[:2] == (0, 1)  # an address wins
        assert wrong(driver) == []
    finally:
        view(driver, 1000, 700)


def test_a_search_leads_from_token_to_token(driver: Any, described: Serving) -> None:
    from selenium.webdriver.common.keys import Keys

    try:
        view(driver, 1200, 700)
        page = Page(driver, described, "#0/0/100/100/1")
        page.by_id("search").send_keys("THE 200", Keys.ENTER)  # " the200", " the2000", " the2006"
        until(lambda: page.text("matches") == "1 of 3")
        page.settle()
        assert page.place()[2:4] == pytest.approx((200, 200), abs=5)
        page.by_id("search").send_keys(Keys.ENTER)
        until(lambda: page.text("matches") == "2 of 3")
        page.settle()
        assert page.place()[2:4] == pytest.approx((2000, 2000), abs=5)
        page.by_id("search").send_keys("nowhere", Keys.ENTER)
        until(lambda: page.text("matches") == "not found")
        assert wrong(driver) == []
    finally:
        view(driver, 1000, 700)


def test_the_strongest_cells_in_view_come_one_after_the_other(driver: Any, serving: Serving, weights: Tensor) -> None:
    page = Page(driver, serving, "#0/1/1500/1400/30")
    found = []
    for _ in range(3):
        page.press("n")
        found.append(said(page.text("readout")))
    assert found == sorted(found, reverse=True)
    cells = page.run(
        "const c = document.getElementById('map'); return [c.clientWidth, c.clientHeight].map((size) => size / 60)"
    )
    near = weights[1, int(1500 - cells[1] + 4) : int(1500 + cells[1]), int(1400 - cells[0] + 5) : int(1400 + cells[0])]
    assert found[0] == pytest.approx(float(near.max()), rel=1e-3)
    page = Page(driver, serving, "#0/1/1500/1000/2")
    page.run("document.getElementById('map').focus()")
    page.press("n")
    spot = re.search(r"query ([0-9,]+) .* key ([0-9,]+) ", page.text("readout"))
    assert spot, page.text("readout")
    page.press("\ue007")  # Enter
    _, _, query, key, scale = page.place()
    assert scale == 24
    assert (query, key) == pytest.approx([int(at.replace(",", "")) for at in spot.groups()], abs=4)


def test_the_atlas_and_the_report_link_to_each_other(driver: Any, described: Serving) -> None:
    page = Page(driver, described, "#1/0/900/900/1")
    until(lambda: page.by_id("report").is_displayed())
    driver.get(page.by_id("report").get_attribute("href"))
    until(lambda: page.text("detail-title") == "two · head 0")
    page.by_id("before").click()
    assert page.text("detail-title") == "one · head 1"
    page.by_id("atlas").click()
    page.settle()
    assert page.place()[:2] == (0, 1)
    assert wrong(driver) == []


def test_a_phone_says_how_to_touch(driver: Any, described: Serving) -> None:
    try:
        view(driver, 400, 800)
        driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
        page = Page(driver, described)
        assert page.by_id("touch").is_displayed()
        assert page.text("readout").startswith("Drag to move, pinch to zoom")
        points = [{"x": 200, "y": 400}]
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": points})
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        until(lambda: not page.by_id("touch").is_displayed())
        page.by_id("listed").click()
        assert page.by_id("heads").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
        view(driver, 1000, 700)


def test_a_closed_atlas_says_so(driver: Any) -> None:
    seen = regard.observe(Q[..., :600, :], K[..., :600, :], K[..., :600, :2])
    with serve(Atlas("short-lived", [AtlasLayer("one", seen, TOKENS[:600], TOKENS[:600])])) as ending:
        page = Page(driver, ending)
    page.run("document.getElementById('in').click()")
    page.run("document.getElementById('in').click()")
    until(lambda: "no longer answers" in page.text("notice"))
