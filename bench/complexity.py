"""How do time and memory grow with the sequence: the whole matrix, chunks of rows, tiles, and torch's fused kernel?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from _harness import Row, report
from torch import Tensor

import regard
from regard.backends import Chunked
from regard.lab.online import peak_bytes
from regard.softmax import online

LENGTHS = (512, 1024, 2048, 4096, 8192)
LONGER = LENGTHS[len(LENGTHS) // 2 :]
HEADS, DIM = 2, 64
ROWS, KEYS = 128, 512
ROUNDS = 9
SQUARE, LINEAR = (1.7, 2.3), (0.0, 1.2)  # powers of n; buffers of constant size keep it below 1


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by blocks of rows and keys, with the row max, row sum and numerator of `online`."""
    output = torch.empty_like(q)
    for rows, found in zip(q.split(ROWS, -2), output.split(ROWS, -2), strict=True):
        own = rows * q.shape[-1] ** -0.5
        tiles = zip(k.split(KEYS, -2), v.split(KEYS, -2), strict=True)
        found.copy_(online((own @ keys.mT, values) for keys, values in tiles))
    return output


WAYS: dict[str, Callable[..., Tensor]] = {
    "matrix": partial(regard.attention, backend="reference"),
    "chunked": partial(regard.attention, backend=Chunked(ROWS)),
    "tiled": tiled,
    "fused": partial(regard.attention, backend="sdpa"),
}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = {n: torch.randn(3, 1, HEADS, n, DIM).unbind() for n in LENGTHS}
    calls = {(way, n): partial(attend, *inputs[n]) for n in LENGTHS for way, attend in WAYS.items()}
    taken = _taken(calls)
    rows: list[Row] = []
    for way in WAYS:
        times = {n: taken[way, n] for n in LENGTHS}
        rows.append(_row(way, "time / fused", {n: times[n] / taken["fused", n] for n in LENGTHS}, times, SQUARE))
    for way in WAYS:
        peak = {n: peak_bytes(calls[way, n]) / 2**20 for n in LENGTHS}
        rows.append(_row(way, "peak, MiB", peak, peak, SQUARE if way == "matrix" else LINEAR))
    note = (
        f"One item, {HEADS} heads, d {DIM}, float32, forward. Times are CPU time on one thread, so waiting for "
        f"other jobs does not count: the median of {ROUNDS} calls taken in turns. `matrix` is the backend reference; "
        f"`chunked` has {ROWS} rows in flight, each with all its keys; `tiled` has {ROWS} rows and {KEYS} keys, with "
        "an online row max, row sum and numerator; `fused` is torch's kernel. Memory is the peak of torch's "
        "allocator above the inputs. The power of n is that of the time and of the peak between "
        f"{LONGER[0]:,} and {LONGER[-1]:,} tokens; buffers of constant size keep it below 1."
    )
    report("complexity", "Time and memory against the length of the sequence", rows, note)


def _taken(calls: dict[tuple[str, int], Callable[[], Tensor]]) -> dict[tuple[str, int], float]:
    """The median CPU time of each call, taken in turns over methods and lengths."""
    taken: dict[tuple[str, int], list[float]] = {case: [] for case in calls}
    for turn in range(ROUNDS + 1):
        for case, call in calls.items():
            start = time.thread_time()
            call()
            if turn:  # the first is a warm-up
                taken[case].append(time.thread_time() - start)
    return {case: statistics.median(times) for case, times in taken.items()}


def _row(way: str, what: str, shown: dict[int, float], grown: dict[int, float], claimed: tuple[float, float]) -> Row:
    power = math.log(grown[LONGER[-1]] / grown[LONGER[0]]) / math.log(LONGER[-1] / LONGER[0])
    low, high = claimed
    return {
        "way": way,
        "measured": what,
        **{f"n = {n}": shown[n] for n in LENGTHS},
        "power of n": power,
        "bound": f"{low} to {high}" if low else f"≤ {high}",
        "holds": "yes" if low <= power <= high else "no",
    }


if __name__ == "__main__":
    main()
