"""Heads that do not distinguish between keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..head_statistics import Head
from .base import StatisticRule, span

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform(StatisticRule):
    """Dead heads: they attend equally to all visible keys, and so average the values.

    Michel et al. 2019 ("Are Sixteen Heads Really Better than One?") remove most heads of a trained model at little
    cost; one that selects nothing is the first to go. In an untrained model this is normal.

    `relative` is a share of the entropy of uniform attention. On a long text a head that selects keys comes close to
    it too, since the entropy of uniform attention grows with the length; so the entropy must also be within `nats` of
    it. `rows` is the number of rows required.

    >>> Uniform()
    Uniform(rows=8, relative=0.99, nats=0.05)
    """

    name: ClassVar[str] = "uniform"
    shares: ClassVar[frozenset[str]] = frozenset({"relative"})

    relative: float = 0.99
    nats: float = 0.05

    def measure(self, head: Head) -> float | None:
        """The relative entropy of an almost uniform head."""
        if not head.relative_entropy >= self.relative:
            return None
        missing = head.entropy / head.relative_entropy - head.entropy
        return head.relative_entropy if missing <= self.nats else None

    def says(self, heads: list[Head], values: list[float]) -> str:
        """Say how close to uniform the head is."""
        return f"dead head: attends to every key alike, with {span(values, '.3f')} of the entropy of uniform attention"
