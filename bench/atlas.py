"""Does an attention map of 100,000 × 100,000 stay responsive? Tiles at each level, the coarse levels, their memory."""

from __future__ import annotations

import resource
import statistics
import sys
import time

import torch
from _harness import Row, report

import regard
from regard.report.pyramid import SIDE, Pyramid

LENGTH, DIM = 100_000, 64
BOUND = 100.0  # ms for a tile


def tile_ms(pyramid: Pyramid, level: int, row: int, col: int, rounds: int = 9) -> float:
    """The median time of a tile in milliseconds."""
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        pyramid.tile(level, row, col)
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[1:])


def peak() -> float:
    """The peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(n: int) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, n, DIM), torch.randn(1, 1, n, DIM)
    start = time.perf_counter()
    seen = regard.observe(q, k, k, mask=regard.causal())
    observing = time.perf_counter() - start
    before = peak()
    pyramid = Pyramid(seen)
    start = time.perf_counter()
    while pyramid.advance():
        pass
    seconds, memory = time.perf_counter() - start, peak() - before
    rows: list[Row] = []
    for level in range(pyramid.top + 1):
        middle = (pyramid.shape(level)[0] - 1) // SIDE // 2
        below, on = tile_ms(pyramid, level, middle, middle // 2), tile_ms(pyramid, level, middle, middle)
        row: Row = {"level": level, "pairs": f"{SIDE << level:,} × {SIDE << level:,}"}
        row["computed"] = "on demand" if level < pyramid.base else "from the sums"
        row |= {"below the diagonal, ms": below, "on it, ms": on}
        rows.append(row | {"bound": f"≤ {BOUND:.0f}", "holds": "yes" if max(below, on) <= BOUND else "no"})
    note = (
        f"One causal head of {n:,} × {n:,}, d {DIM}, float32; tiles of {SIDE} × {SIDE} cells. Levels {pyramid.base} to "
        f"{pyramid.top} use sums that are computed once: {seconds:.1f} s, {memory:,.0f} MiB on top of observe "
        f"({observing:.1f} s); all weights would take {n * n * 4 / 2**30:,.1f} GiB."
    )
    more = {"coarse_seconds": seconds, "coarse_mib": memory, "observe_seconds": observing}
    report("atlas", f"A tile of an attention map of {n:,} × {n:,}", rows, note, **more)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else LENGTH)
