"""A softmax so sharp that no gradient passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..head_statistics import Head
from ..record import AttentionRecord
from .base import StatisticRule, span
from .positional import heads_by_position
from .sink import resting_heads

__all__ = ["Saturated"]


@dataclass(frozen=True)
class Saturated(StatisticRule):
    """Heads with many rows in which one key has all the weight, so that queries and keys get almost no gradient.

    The Jacobian of the softmax is p_i(δ_ij − p_j), and its trace Σ p(1 − p) is 0 if one key has all the weight:
    Vaswani et al. 2017 ("Attention Is All You Need") scale by 1/√d_k for that reason.

    `share` is a share of the rows, and `rows` is the number required. Three kinds of head are left to other rules,
    which say more: those whose mean entropy is at most `entropy`, in nats ("collapsed"), those that attend by position
    ("positional"), and those that rest on one token ("sink").

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
        return f"saturated: one key has all the weight in {span(values)} of the rows, and hardly any gradient passes"

    def weigh(
        self, seen: AttentionRecord, matching: dict[str, dict[Head, float]]
    ) -> dict[str, tuple[str, dict[Head, float]]]:
        """Leave out the heads that are sharp for a known reason."""
        healthy, resting = heads_by_position(seen, matching), resting_heads(seen, matching)
        left = {
            layer: {head: x for head, x in cases.items() if head.head not in healthy[layer] | resting[layer]}
            for layer, cases in matching.items()
        }
        return {layer: ("notable", cases) for layer, cases in left.items() if cases}
