"""Two censuses compared head by head: which heads moved, in which statistic, and how far."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...errors import ArgumentError
from .counted_heads import CountedHeads
from .groups import PROFILE
from .summary import HeadRecord, Summary

__all__ = ["CensusDifference", "Moved", "compare"]


@dataclass(frozen=True)
class Moved:
    """How one head differs between two censuses."""

    layer: str  # in the first
    head: int
    distance: float  # the mean over the profile's statistics of how far their histograms are apart, 0 to 1
    first: dict[str, float]  # the mean of each statistic in the first
    changes: dict[str, float]  # second minus first, of the mean of each statistic
    apart: dict[str, float]  # of each statistic: the largest difference between the two cumulative histograms, 0 to 1

    @property
    def most(self) -> str:
        """The statistic whose histogram moved most."""
        return max(self.apart, key=lambda name: (self.apart[name], name))


@dataclass(frozen=True)
class CensusDifference:
    """Every head that two censuses share, the one that moved most first."""

    titles: tuple[str, str]
    heads: list[Moved]
    layers: list[str]
    only: tuple[list[str], list[str]]  # layers that only the first has, or only the second

    def __repr__(self) -> str:
        most = self.heads[0] if self.heads else None
        moved = f"; L{self.layers.index(most.layer)} H{most.head} moved most, {most.distance:.3f}" if most else ""
        return f"CensusDifference({self.titles[1]} against {self.titles[0]}: {len(self.heads)} heads{moved})"


def compare(first: CountedHeads, second: CountedHeads) -> CensusDifference:
    """Compare the heads of two censuses; layers pair by name, or by order if they share no name."""
    shared = [name for name in first.layers if name in second.layers]
    if shared:
        pairs = {name: name for name in shared}
    elif len(first.layers) == len(second.layers):
        pairs = dict(zip(first.layers, second.layers, strict=True))
    else:
        raise ArgumentError(
            f"diff: the censuses share no layer, and have {len(first.layers)} and {len(second.layers)}. Compare models "
            f"of one architecture."
        )
    theirs = {(one.layer, one.head): one for one in second.heads}
    moved = [
        _moved(one, theirs[pairs[one.layer], one.head])
        for one in first.heads
        if one.layer in pairs and (pairs[one.layer], one.head) in theirs
    ]
    moved.sort(key=lambda one: (-one.distance, first.layers.index(one.layer), one.head))
    titles = (
        (first.title, second.title)
        if first.title != second.title
        else (f"{first.title}, first", f"{first.title}, second")
    )
    paired = set(pairs.values())
    only = [name for name in first.layers if name not in pairs], [name for name in second.layers if name not in paired]
    return CensusDifference(titles, moved, first.layers, only)


def _moved(a: HeadRecord, b: HeadRecord) -> Moved:
    ours, theirs = a.summaries(), b.summaries()
    apart = {name: _apart(one, theirs[name]) for name, one in ours.items()}
    changes = {name: theirs[name].mean - one.mean for name, one in ours.items()}
    distance = float(np.mean([apart[name] for name in (*PROFILE, "distance")]))
    means = {name: one.mean for name, one in ours.items()}
    return Moved(a.layer, a.head, distance, means, changes, apart)


def _apart(a: Summary, b: Summary) -> float:
    """The Kolmogorov–Smirnov distance of two histograms; 0 if one is empty and 1 if just one is undefined."""
    if not a.count or not b.count:
        return 0.0 if a.count == b.count else 1.0
    far = np.abs(a.counts.cumsum() / a.count - b.counts.cumsum() / b.count).max()
    return 0.0 if math.isnan(far) else float(far)
