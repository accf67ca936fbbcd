"""Collapsed entropy: rows that attend to a single key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..head_statistics import Head
from ..record import AttentionRecord
from .base import StatisticRule, span
from .positional import heads_by_position
from .sink import resting_heads

__all__ = ["Collapsed"]


@dataclass(frozen=True)
class Collapsed(StatisticRule):
    """Heads whose attention has almost no entropy left.

    Zhai et al. 2023 ("Stabilizing Transformer Training by Preventing Attention Entropy Collapse") find that training
    becomes unstable when the entropy of attention, averaged over rows and heads, falls towards 0. A head that attends
    by position, as to the previous token, is sharp and healthy, and is left to the rule "positional"; so is one that
    rests on the first token or a special one, and is left to the rule "sink". A finding is a problem if it concerns
    `part` of a layer's heads, and notable otherwise.

    `entropy` is in nats, the mean over rows; `relative` is a share of the entropy that uniform attention would have;
    `part` is a share of a layer's heads; `rows` is the number of rows required. A head matches at or below both.

    >>> Collapsed(entropy=0.05)
    Collapsed(rows=8, entropy=0.05, relative=0.05, part=0.5)
    """

    name: ClassVar[str] = "collapsed"
    falling: ClassVar[bool] = True
    shares: ClassVar[frozenset[str]] = frozenset({"relative", "part"})

    entropy: float = 0.1
    relative: float = 0.05
    part: float = 0.5

    def measure(self, head: Head) -> float | None:
        """The entropy of a collapsed head."""
        return head.entropy if head.entropy <= self.entropy and head.relative_entropy <= self.relative else None

    def says(self, heads: list[Head], values: list[float]) -> str:
        """Say how much entropy is left."""
        keys = span((head.effective_keys for head in heads), ".1f")
        return f"the entropy has collapsed to {span(values)} nats: a row attends to {keys} keys"

    def weigh(
        self, seen: AttentionRecord, matching: dict[str, dict[Head, float]]
    ) -> dict[str, tuple[str, dict[Head, float]]]:
        """Leave out healthy heads; of a few collapsed ones, leave those with a sink to the rule for sinks."""
        by_position, resting = heads_by_position(seen, matching), resting_heads(seen, matching)
        at_rest = resting_heads(seen, matching, healthy=True)
        found = {}
        for layer, cases in matching.items():
            healthy = by_position[layer] | at_rest[layer]
            left = {head: value for head, value in cases.items() if head.head not in healthy}
            problem = len(left) >= self.part * seen[layer].shape[-3]
            some = left if problem else {h: value for h, value in left.items() if h.head not in resting[layer]}
            if some:
                found[layer] = ("problem" if problem else "notable", some)
        return found
