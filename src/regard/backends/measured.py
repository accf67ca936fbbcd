"""How fast the backends were on plain calls, from `measured.json`: TFLOP/s by dims, length and mask, each with its run.

A later run replaces figures there; nothing else has to change. The backward counts as 2.5 times the forward's work.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["CHIP", "SHORTEST", "Speeds", "speeds"]

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CHIP: tuple[int, int] = (_DATA["chip"][0], _DATA["chip"][1])
SHORTEST: int = min(figure["rows"] for figure in _DATA["figures"])
# Within 2 % of the fastest, ours is taken, which has statistics and always the same bits.
_TIE = 1.02


class Speeds(NamedTuple):
    """The backends that were measured, the fastest first, and what was measured."""

    names: tuple[str, ...]
    because: str


@cache
def speeds(dim: int, values: int, rows: int, causal: bool, derivative: bool) -> Speeds | None:
    """The speeds at the longest measured length up to `rows`; None if these dims, or their backward, were not measured.

    With a derivative, it is the speed of the forward and the backward together.
    """
    figures = [
        figure
        for figure in _DATA["figures"]
        if (figure["dim"], figure["values"], figure["causal"]) == (dim, values, causal) and figure["rows"] <= rows
    ]
    if not figures:
        return None
    figure = max(figures, key=lambda each: each["rows"])
    found = dict(figure["forward"])
    if derivative:
        found = {
            name: 3.5 / (1 / speed + 2.5 / figure["backward"][name])
            for name, speed in found.items()
            if name in figure["backward"]
        }
    if not found:
        return None
    names = sorted(found, key=lambda name: found[name] * (_TIE if name == "triton" else 1.0), reverse=True)
    what = "forward and backward" if derivative else "forward"
    listed = ", ".join(f"{name} {found[name]:.0f}" for name in names)
    mask = "causal" if causal else "full"
    dims = f"d{dim}" if dim == values else f"d{dim}/{values}"
    return Speeds(
        tuple(names),
        f"{what} in TFLOP/s at {dims}, n{figure['rows']}, {mask}: {listed} ({_DATA['runs'][figure['run']]})",
    )
