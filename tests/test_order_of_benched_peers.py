"""In which order the benchmarks on a GPU let their peers run."""

from __future__ import annotations

import runpy
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

balanced = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "gpu" / "_turns.py"))["balanced"]


@pytest.mark.parametrize("count", range(1, 10))
def test_each_peer_runs_in_every_place_and_behind_each_other_one_as_often(count: int) -> None:
    times = 1 if count % 2 == 0 or count == 1 else 2
    orders = balanced(range(count))
    assert len(orders) == times * count
    places = Counter((place, name) for order in orders for place, name in enumerate(order))
    assert places == {(place, name): times for place in range(count) for name in range(count)}
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert pairs == {(a, b): times for a in range(count) for b in range(count) if a != b}
