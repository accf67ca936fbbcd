"""What a census says about one head: a summary of each statistic, and the tokens that it attends to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .pieces import CLASSES
from .scales import BINS, LENGTH_EDGES, SCALES, Scale

__all__ = ["Curve", "HeadRecord", "Histogram", "Summary", "TokenShare", "summarise"]


class Histogram(NamedTuple):
    """Counts between edges; values outside are counted in the first or the last bin."""

    counts: np.ndarray  # int64 (256,)
    edges: np.ndarray  # float64 (257,)


class Curve(NamedTuple):
    """Means in buckets that have any rows."""

    buckets: tuple[str, ...]  # "0", "4–5", … or the name of a class
    means: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, eq=False)
class Summary:
    """One statistic of one head over all rows it applies to; a number is nan if there is none.

    The mean, the smallest and the largest are exact. Deciles are read off the histogram, and are as exact as its bins:
    1/256 for shares, 0.05 nats for entropy, 5 % of a distance or of a number of effective keys, and 6 % of a logit.
    """

    scale: Scale
    count: int  # rows
    undefined: int  # rows whose logits are not finite
    mean: float
    smallest: float
    largest: float
    counts: np.ndarray
    sums: dict[str, tuple[np.ndarray, np.ndarray]]  # by position, length and class: sums in units, and counts

    @property
    def histogram(self) -> Histogram:
        """How often the statistic falls into each of 256 bins."""
        return Histogram(self.counts, self.scale.edges)

    @property
    def deciles(self) -> tuple[float, ...]:
        """The values below which 10 %, 20 %, … 90 % of the rows are."""
        if not self.count:
            return (float("nan"),) * 9
        edges, below = self.scale.edges, np.concatenate(([0], self.counts.cumsum()))
        wanted = np.arange(1, 10) / 10 * self.count
        at = np.searchsorted(below[1:], wanted, side="left").clip(0, BINS - 1)
        inside = (wanted - below[at]) / np.maximum(self.counts[at], 1)
        found = edges[at] + inside * (edges[at + 1] - edges[at])
        found = found.round() if self.scale.whole else found
        return tuple(found.clip(self.smallest, self.largest).tolist())

    @property
    def by_position(self) -> Curve:
        """The mean by the position of the row in its text: 0, 1, 2, 3, 4–5, 6–7, 8–11, …"""
        return self._curve("position", _RANGES)

    @property
    def by_length(self) -> Curve:
        """The mean by the length of the text, in tokens."""
        return self._curve("length", _RANGES)

    @property
    def by_class(self) -> Curve:
        """The mean by the class of the row's token: special, word, continuation, number, punctuation, …"""
        return self._curve("class", CLASSES)

    def _curve(self, name: str, labels: tuple[str, ...]) -> Curve:
        sums, counts = self.sums[name]
        some = np.flatnonzero(counts)
        means = sums[some] * self.scale.unit / counts[some]
        return Curve(tuple(labels[at] for at in some), means, counts[some])

    def __repr__(self) -> str:
        return f"Summary({self.scale.name}: mean {self.mean:.4g} over {self.count:,} rows)"


def _range_text(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


_RANGES = (
    *(_range_text(first, after - 1) for first, after in pairwise(LENGTH_EDGES)),
    f"{LENGTH_EDGES[-1]:,}+",
)


@dataclass(frozen=True)
class TokenShare:
    """A token, and its part in what a head does."""

    token: int
    text: str  # empty if nobody gave the texts of the ids
    share: float  # as a key: of all weight. As a query: the mean of the strongest weight that is away from the diagonal
    count: int  # how often the token occurs


@dataclass(frozen=True, eq=False)
class HeadRecord:
    """One head: its layer, its number, and a summary of each statistic, as in `record.entropy.mean`."""

    layer: str
    head: int
    keys: tuple[TokenShare, ...]  # the tokens that receive most
    queries: tuple[TokenShare, ...]  # the tokens at which the head attends most to one that is further away
    entropy: Summary
    relative_entropy: Summary
    effective_keys: Summary
    max_logit: Summary
    first_share: Summary
    self_share: Summary
    previous_share: Summary
    saturated_share: Summary
    distance: Summary
    concentration: Summary
    induction: Summary
    duplicate: Summary

    def summaries(self) -> dict[str, Summary]:
        """Every summary by the name of its statistic."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name in _BY_NAME}

    def __repr__(self) -> str:
        return f"HeadRecord({self.layer!r}, head {self.head}: {self.entropy.count:,} rows)"


_BY_NAME = {scale.name: scale for scale in SCALES}


def summarise(parts: dict[str, np.ndarray], head: int) -> dict[str, Summary]:
    """The summaries of one head from the tallies of its layer."""
    found = {}
    for at, scale in enumerate(SCALES):
        sums = {
            name: (parts[f"{name}_sum"][at, head], parts[f"{name}_count"][at, head])
            for name in ("position", "length", "class")
        }
        total, count = int(sums["position"][0].sum()), int(sums["position"][1].sum())
        found[scale.name] = Summary(
            scale,
            count,
            int(parts["undefined"][at, head]),
            total * scale.unit / count if count else float("nan"),
            float(parts["smallest"][at, head]) if count else float("nan"),
            float(parts["largest"][at, head]) if count else float("nan"),
            parts["histogram"][at, head],
            sums,
        )
    return found
