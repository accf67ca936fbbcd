"""A softmax so sharp that no gradient passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..head_statistics import Head
from .base import StatisticRule, span

__all__ = ["Saturated"]


@dataclass(frozen=True)
class Saturated(StatisticRule):
    """Heads with many rows in which one key has all the weight, so that queries and keys get almost no gradient.

    The Jacobian of the softmax is p_i(δ_ij − p_j), and its trace Σ p(1 − p) is 0 if one key has all the weight:
    Vaswani et al. 2017 ("Attention Is All You Need") scale by 1/√d_k for that reason.

    `share` is a share of the rows, and `rows` is the number required; a head whose mean entropy is at most `entropy`,
    in nats, is left to the rule "collapsed", which says more.

    >>> Saturated(share=0.8)
    Saturated(rows=8, share=0.8, entropy=0.1)
    """

    name: ClassVar[str] = "saturated"
    shares: ClassVar[frozenset[str]] = frozenset({"share"})

    share: float = 0.5
    entropy: float = 0.1

    def measure(self, head: Head) -> float | None:
        """The share of saturated rows."""
        return head.saturated_share if head.saturated_share >= self.share and head.entropy > self.entropy else None

    def says(self, heads: list[Head], values: list[float]) -> str:
        """Say how many rows are saturated."""
        return f"{span(values)} of the rows are saturated: one key has all the weight, and hardly any gradient passes"
