"""Entropy that has collapsed: rows that attend a single key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import StatisticRule, span

if TYPE_CHECKING:
    from ..head_statistics import Head

__all__ = ["Collapsed"]


@dataclass(frozen=True)
class Collapsed(StatisticRule):
    """Heads whose attention has almost no entropy left.

    Zhai et al. 2023 ("Stabilizing Transformer Training by Preventing Attention Entropy Collapse") find that training
    turns unstable where the entropy of attention, averaged over rows and heads, falls towards 0. One sharp head alone
    may be meant (it may look at the previous token), so a finding is a problem only if it concerns `part` of a layer's
    heads, and notable otherwise.

    `entropy` is in nats, the mean over rows; `relative` is a share of the entropy that uniform attention would have;
    `part` is a share of a layer's heads; `rows` is how many rows there must be. A head at or below both is a case.

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
        """Give the entropy of a collapsed head."""
        return head.entropy if head.entropy <= self.entropy and head.relative_entropy <= self.relative else None

    def says(self, heads: list[Head], values: list[float]) -> str:
        """Say how much entropy is left."""
        keys = span((head.effective_keys for head in heads), ".1f")
        return f"the entropy has collapsed to {span(values)} nats ({keys} keys effectively attended)"

    def severity(self, part: float) -> str:
        """Give "problem" if enough heads of the layer have collapsed."""
        return "problem" if part >= self.part else "notable"
