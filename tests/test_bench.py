"""How the benchmarks measure, and what they write: the order of peers, bits that are compared, tables."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shutil
import sys
from collections import Counter
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
RECORDS = sorted((BENCH / "results").glob("*.json"))
balanced = runpy.run_path(str(BENCH / "gpu" / "_turns.py"))["balanced"]
page = runpy.run_path(str(BENCH / "_harness.py"))["page"]


@pytest.mark.parametrize("count", range(1, 10))
def test_each_peer_runs_in_every_place_and_behind_each_other_one_as_often(count: int) -> None:
    times = 1 if count % 2 == 0 or count == 1 else 2
    orders = balanced(range(count))
    assert len(orders) == times * count
    places = Counter((place, name) for order in orders for place, name in enumerate(order))
    assert places == {(place, name): times for place in range(count) for name in range(count)}
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert pairs == {(a, b): times for a in range(count) for b in range(count) if a != b}


def test_a_peer_with_other_bits_now_and_then_is_counted_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH / "gpu"), *sys.path])
    device = runpy.run_path(str(BENCH / "gpu" / "_device.py"))
    calls = itertools.count()
    x = torch.ones(3)
    peers = {
        "always": device["Peer"](lambda: (x, x.clone())),
        "every other time": device["Peer"](lambda: (x, x * (next(calls) % 2))),
        "absent": None,
    }
    assert device["with_same_bits"]("a case", peers, 10) == {"always": 10, "every other time": 5, "absent": None}


@pytest.mark.parametrize("record", [x for x in RECORDS if x.stem in ("gpu_dims", "gpu_sparse")])
def test_a_record_is_drawn_if_it_asks_for_a_plot(record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "path", [str(BENCH / "gpu"), *sys.path])
    copy = Path(shutil.copy(record, tmp_path))
    runpy.run_path(str(BENCH / "gpu" / "_device.py"))["draw"](copy)
    drawn = copy.with_suffix(".svg")
    assert drawn.exists() == record.with_suffix(".svg").exists()
    if drawn.exists():
        colours = set(re.findall("fill: (#[0-9a-f]{6})", drawn.read_text("utf-8")))
        assert colours >= {"#0d9488", "#ea580c", "#6b7280"}  # ours, FlashAttention-4, cuDNN


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_table_is_that_of_its_record_and_says_when_it_was_measured(record: Path) -> None:
    facts = json.loads(record.read_text("utf-8"))
    assert record.with_suffix(".md").read_text("utf-8") == page(facts)
    assert date.fromisoformat(facts["measured"])
