"""The report as a file: one page, bounded, deterministic, with numbers that can be read back."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from looks import example, layer, synthetic, words
from regard.errors import ArgumentError, DtypeError, FileError, ShapeError
from regard.report import page
from regard.report.look import HeadLook, LayerLook, Look, Remark
from regard.report.page_budget import LIMIT, excerpts
from regard.report.page_pack import LEAST_WEIGHT, cell_edges, merge_cells, quantize_root


@pytest.fixture(scope="module")
def small() -> Look:
    return example(layers=2, heads=3, tokens=40)


def data_of(text: str) -> dict[str, Any]:
    (block,) = re.findall(r'<script id="look" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(block)


def unpacked(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=kind)


def inflated(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)


def strongest_of(entry: dict[str, Any], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and keys, (heads, rows, k), as the page unpacks them."""

    def numbers(name: str, size: int) -> np.ndarray:
        planes = inflated(entry[name]).astype(np.int64).reshape(size, len(entry["heads"]), entry["k"], rows)
        return (planes << (8 * np.arange(size))[:, None, None, None]).sum(0).transpose(0, 2, 1)

    return (numbers("weights", 2) / entry["fine"]) ** 2, numbers("strongest", entry["width"])


def test_12_by_12_heads_of_256_tokens_take_less_than_3_mb() -> None:
    text = page.render(synthetic(12, 12, 256, k=16))
    entry = data_of(text)["layers"][0]
    assert len(text.encode()) <= 3_000_000 == LIMIT
    assert entry["every"] == [1, 1]
    assert entry["k"] >= 8


@pytest.mark.parametrize(
    ("layers", "heads", "tokens", "side"),
    [(32, 32, 600, 64), (4, 4, 20_000, 64), (1, 1, 300_000, 64), (1, 2, 600, 600), (300, 16, 16, 16), (900, 8, 2, 2)],
)
def test_a_page_of_any_size_stays_within_3_mb(layers: int, heads: int, tokens: int, side: int) -> None:
    text = page.render(synthetic(layers, heads, tokens, side=side))
    data = data_of(text)
    assert len(text.encode()) <= LIMIT
    assert len(data["layers"]) == layers
    kept = sum(stop - start for start, stop in data["texts"][0]["parts"])
    assert kept == tokens or f"for {kept:,} of up to {tokens:,} queries" in data["notes"][1]
    assert inflated(data["layers"][-1]["weights"]).size == 2 * heads * kept * data["layers"][-1]["k"]


def test_a_page_is_filled_before_anything_is_left_out() -> None:
    text = page.render(synthetic(32, 32, 600))
    assert len(text.encode()) > 0.93 * LIMIT


def test_a_page_inside_a_notebook_keeps_every_token_in_less_than_300_kb() -> None:
    look = example(layers=6, heads=12, tokens=120)
    text = page.render(look, page.EMBEDDED_LIMIT)
    assert len(text.encode()) <= 300_000
    data = data_of(text)
    assert data["texts"][0]["runs"][0][1] == words(120)
    assert data["texts"][0]["parts"] == [[0, 120]]
    assert data["layers"][0]["k"] >= 2
    weights, keys = strongest_of(data["layers"][5], 120)
    for head, one in enumerate(look.layers[5].heads):
        assert np.abs(weights[head, :, 0] - one.strongest[0][:, 0].numpy()).max() <= 1 / 4095
        assert np.array_equal(keys[head, :, 0], one.strongest[1][:, 0].numpy())


def test_single_weights_are_kept_with_fewer_steps_before_cells_are_merged() -> None:
    exact = page.render(synthetic(2, 8, 200, side=200), 1_000_000)
    entry = data_of(exact)["layers"][0]
    assert entry["every"] == [1, 1]
    assert entry["steps"] < 255
    assert "a cell holds a single weight" in data_of(exact)["notes"][0]
    assert data_of(page.render(synthetic(2, 8, 200, side=200), 500_000))["layers"][0]["every"] != [1, 1]


def test_notes_say_what_is_left_out() -> None:
    whole = data_of(page.render(synthetic(1, 1, 8, k=4)))
    assert "Maps have at most 8 × 8 cells; " in whole["notes"][0]
    assert "Each query has its 4 strongest keys, down to a weight of 0.001. " in whole["notes"][1]
    cut = data_of(page.render(synthetic(16, 32, 3000), 2_000_000))
    assert "merged from up to 64 × 64 to fit the page" in cut["notes"][0]
    kept = sum(stop - start for start, stop in cut["texts"][0]["parts"])
    assert re.search(rf"2 strongest keys of the 16 recorded, for {kept} of up to 3,000 queries", cut["notes"][1])
    long = data_of(page.render(synthetic(1, 1, 300_000)))
    assert any("too long to keep every token" in note for note in long["notes"])


def test_a_look_too_large_for_any_page_is_refused_with_a_remedy() -> None:
    look = synthetic(1, 2, 8)
    with pytest.raises(ArgumentError, match=r"^render: .* more than 3,000,000, .* fewer layers .* fewer facts"):
        page.render(Look("t", {"log": "x" * LIMIT}, look.layers, []))


def test_if_not_all_remarks_fit_the_problems_are_kept() -> None:
    look = synthetic(1, 1, 8)
    many = [Remark("r", "notable", "x" * 900, "layers.0", (0,)) for _ in range(400)]
    data = data_of(page.render(Look("t", {}, look.layers, [*many, Remark("p", "problem", "!", "layers.0", (0,))])))
    assert data["remarks"][0]["rule"] == "p"
    assert len(data["remarks"]) < 400
    assert any("of 401 findings are listed, problems first" in note for note in data["notes"])


def test_maps_come_back_within_a_255th_of_their_largest_cell(small: Look) -> None:
    entry = data_of(page.render(small))["layers"][0]
    maps = torch.stack([one.map for one in small.layers[0].heads]).double().numpy()
    largest = unpacked(entry["largest"], "<f4").astype(np.float64)[:, None, None]
    back = largest * (inflated(entry["maps"]).reshape(maps.shape) / 255) ** 2
    assert np.all(np.abs(back - maps) <= largest / 255 * (1 + 1e-6))
    assert np.array_equal(back == 0, maps == 0)
    fine = (maps > 1e-3 * largest) & (maps < 1e-2 * largest)
    assert fine.any()
    assert np.all(np.abs(back - maps)[fine] <= 0.13 * maps[fine])  # a linear scale of 255 steps would lose these


@pytest.mark.parametrize("steps", [255, 65535])
def test_quantized_roots_are_most_precise_where_weights_are_small(steps: int) -> None:
    values = np.concatenate([[0.0], np.logspace(-12, 0, 20_001)])
    back = (quantize_root(values, 1.0, steps) / steps) ** 2
    assert np.all(np.abs(back - values) <= np.sqrt(values) / steps + 1 / steps**2)
    assert np.all(np.abs(back - values) <= 1 / steps)
    assert np.all(np.diff(back) >= 0)
    assert back[0] == 0 < back[1]


def test_the_strongest_keys_come_back_with_their_weights(small: Look) -> None:
    seen = small.layers[1]
    weights, keys = strongest_of(data_of(page.render(small))["layers"][1], 40)
    for head, one in enumerate(seen.heads):
        there = (one.strongest[1].numpy() >= 0) & (one.strongest[0].numpy() >= LEAST_WEIGHT)
        assert np.all(np.abs(weights[head] - np.where(there, one.strongest[0].double().numpy(), 0.0)) <= 2e-5)
        assert np.array_equal(keys[head][there], one.strongest[1].numpy()[there])
        assert np.array_equal(weights[head] > 0, there)


@pytest.mark.parametrize("count", [256, 257, 70_000])
def test_a_key_at_any_position_comes_back(count: int) -> None:
    keys = torch.tensor([[count - 1, 255, -1]])
    head = HeadLook(0, {}, torch.ones(1, 1), (torch.tensor([[0.5, 0.75, 0.0]]), keys))
    data = data_of(page.render(Look("t", {}, [LayerLook("a", ["q"], [""] * count, [head])], [])))
    weights, back = strongest_of(data["layers"][0], 1)
    assert back[0, 0, :2].tolist() == [255, count - 1]
    assert weights[0, 0].round(4).tolist() == [0.75, 0.5, 0.0]


def test_statistics_come_back_and_nan_stays_nan(small: Look) -> None:
    data = data_of(page.render(small))
    numbers = unpacked(data["layers"][0]["statistics"], "<f4").reshape(3, -1)
    for row, one in zip(numbers, small.layers[0].heads, strict=True):
        given = [one.statistics[about["name"]] for about in data["statistics"]]
        np.testing.assert_allclose(row, given, rtol=1e-6)
    assert np.isnan(numbers[:, -1]).all()
    assert data["statistics"][0]["unit"] == "nats"


def test_statistics_that_only_some_heads_have_are_nan_elsewhere() -> None:
    def head(at: int, name: str, value: float) -> HeadLook:
        return HeadLook(at, {name: value}, torch.ones(1, 1), (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)))

    layers = [
        LayerLook("a", ["x"], ["x"], [head(0, "entropy", 1e300)]),
        LayerLook("b", ["x"], ["x"], [head(0, "x", 2)]),
    ]
    data = data_of(page.render(Look("t", {}, layers, [])))
    assert [about["name"] for about in data["statistics"]] == ["entropy", "x"]
    first, second = (unpacked(entry["statistics"], "<f4") for entry in data["layers"])
    assert np.isposinf(first[0])
    assert np.isnan(first[1])
    assert np.isnan(second[0])
    assert second[1] == 2


def test_merged_cells_hold_the_mean_of_all_their_pairs() -> None:
    n, m = 23, 17
    weights = torch.rand(n, m, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()

    def pooled(rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        return np.array([[weights[a:b, c:d].mean() for c, d in pairwise(cols)] for a, b in pairwise(rows)])

    rows, cols = cell_edges(n, 10), cell_edges(m, 7)
    merged = merge_cells(pooled(rows, cols)[None], (n, m), (3, 2))[0]
    expected = pooled(np.append(rows[:-1][::3], n), np.append(cols[:-1][::2], m))
    np.testing.assert_allclose(merged, expected)
    assert all(rows[i * 10 // n] <= i < rows[i * 10 // n + 1] for i in range(n))


def test_excerpts_of_a_long_text_are_disjoint_and_reach_both_ends() -> None:
    for length, kept in [(1000, 999), (1000, 130), (100_000, 5_001), (5, 5)]:
        parts = excerpts(length, kept)
        assert parts[0][0] == 0
        assert parts[-1][1] == length
        assert all(before[1] <= after[0] for before, after in pairwise(parts))
        assert kept - len(parts) < sum(stop - start for start, stop in parts) <= kept
    assert excerpts(9, 0) == []


def test_the_same_look_gives_the_same_bytes(small: Look) -> None:
    assert page.render(small) == page.render(example(layers=2, heads=3, tokens=40))


def test_the_file_refers_to_nothing_on_the_network(small: Look) -> None:
    text = page.render(small)
    assert not re.search(r"(https?:)?//[\w-]+\.\w|@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|\bimport\(", text)
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,", "#overview"]


def test_only_our_own_style_and_script_may_run(small: Look) -> None:
    text = page.render(small)
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bon\w+=", text)


def test_nothing_from_outside_is_markup(small: Look) -> None:
    text = page.render(small)
    assert text.count("</script>") == 2
    assert "<!--" not in text
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert "<title>Heads of &lt;a small&gt; model &amp; its &quot;text&quot;</title>" in text
    data = data_of(text)
    assert data["texts"][0]["runs"][0][1] == words(40)
    assert data["facts"][0] == ["model", "hand-built <i>model</i>"]


def test_placeholders_in_a_text_are_not_replaced() -> None:
    look = synthetic(1, 1, 2)
    text = page.render(Look("{{script}} {{data}}", {"{{style}}": "{{policy}}"}, look.layers, []))
    assert "<title>{{script}} {{data}}</title>" in text
    assert data_of(text)["facts"] == [["{{style}}", "{{policy}}"]]


def test_a_very_long_token_is_clipped() -> None:
    head = HeadLook(0, {}, torch.ones(1, 1), (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)))
    data = data_of(page.render(Look("t", {}, [LayerLook("a", ["x" * 10_000], ["y"], [head])], [])))
    assert data["texts"][0]["runs"][0][1] == ["x" * 119 + "…"]


def test_a_remark_names_only_heads_of_the_look(small: Look) -> None:
    last = small.layers[-1].name
    remarks = [Remark("r", "notable", "t", last, (2, 77)), Remark("r", "problem", "u", "gone", (0,))]
    data = data_of(page.render(Look("t", {}, small.layers, remarks)))
    assert [(one["text"], one["layer"], one["heads"]) for one in data["remarks"]] == [("u", -1, []), ("t", 1, [2])]


def test_nonfinite_and_negative_numbers_are_packed() -> None:
    map_ = torch.tensor([[float("nan"), -0.1], [float("inf"), 0.5]], dtype=torch.bfloat16, requires_grad=True)
    strongest = (torch.tensor([[0.5], [float("nan")]], dtype=torch.float16), torch.tensor([[1], [0]]))
    look = Look(
        "t", {}, [LayerLook("", ["a", "b"], ["a", "b"], [HeadLook(0, {"x": -float("inf")}, map_, strongest)])], []
    )
    entry = data_of(page.render(look))["layers"][0]
    assert inflated(entry["maps"]).tolist() == [0, 0, 0, 255]
    assert inflated(entry["weights"]).tolist() == [46340 % 256, 0, 46340 // 256, 0]


@pytest.mark.parametrize("layers", [[], [LayerLook("a", ["x"], ["x"], [])]])
def test_a_look_without_heads_is_refused_with_what_to_do(layers: list[LayerLook], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^render: there are no heads .*regard\.watch"):
        page.write(Look("t", {}, layers, []), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_page_is_written_whole_and_over_an_older_one(small: Look, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("older")
    assert page.write(small, str(path)) == path
    assert path.read_text(encoding="utf-8") == page.render(small)
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("name", ["gone/page.html", "a folder", "file/page.html", "x" * 300, ""])
def test_a_path_that_cannot_be_written_is_a_file_error(
    small: Look, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileError, match=r"^write: .* cannot be written: .*Give the path of a file"):
        page.write(small, name)
    assert sorted(os.listdir(tmp_path)) == ["a folder", "file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_an_inconsistent_look_is_refused(small: Look) -> None:
    good = small.layers[0].heads[0]
    text = small.layers[0].queries
    weights, keys = good.strongest
    with pytest.raises(ShapeError, match="HeadLook: map must be"):
        HeadLook(0, {}, good.map[None], good.strongest)
    with pytest.raises(ShapeError, match="HeadLook: strongest must be"):
        HeadLook(0, {}, good.map, (weights, keys[:, :1]))
    with pytest.raises(ShapeError, match="has 39 queries, but head 0 has the strongest keys of 40"):
        LayerLook("a", text[1:], text, [good])
    with pytest.raises(ArgumentError, match="has 39 keys, but head 0 names keys"):
        LayerLook("a", text, text[1:], [good])
    with pytest.raises(ShapeError, match="no cell may be empty"):
        LayerLook("a", text, text, [HeadLook(0, {}, torch.ones(41, 40), good.strongest)])
    with pytest.raises(ShapeError, match="all heads of 'a' must have maps of one shape"):
        LayerLook("a", text, text, [good, HeadLook(1, {}, good.map[:5], good.strongest)])
    with pytest.raises(ArgumentError, match="level must be 'problem' or 'notable'"):
        Remark("r", "fatal", "t", "a", ())


def test_queries_and_keys_may_be_different_texts() -> None:
    data = data_of(
        page.render(Look("t", {}, [layer("cross", words(30), words(70), 2), layer("b", words(70), words(9), 1)], []))
    )
    assert [text["length"] for text in data["texts"]] == [30, 70, 9]
    assert [(entry["queries"], entry["keys"]) for entry in data["layers"]] == [(0, 1), (1, 2)]


def test_anything_but_a_look_is_refused_with_how_to_get_one(tmp_path: Path) -> None:
    with regard.watch(torch.nn.Module()) as seen:
        regard.attention(*torch.randn(3, 1, 2, 12, 4).unbind())
    says = r": look must be a Look\. Got Seen; .* seen\.look\(tokens=…\)\.$"
    with pytest.raises(DtypeError, match=f"^render{says}"):
        page.render(seen)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=f"^write{says}"):
        page.write(seen, tmp_path / "never.html")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
