"""Heads that tell no key from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import StatisticRule, span

if TYPE_CHECKING:
    from ..head_statistics import Head

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform(StatisticRule):
    """Dead heads: they attend all the keys they see alike, and so average the values.

    Michel et al. 2019 ("Are Sixteen Heads Really Better than One?") remove most heads of a trained model at little
    cost; one that selects nothing is the first to go. In a model that has not been trained it is the usual state.

    `relative` is a share of the entropy that uniform attention has; `rows` is how many rows there must be.

    >>> Uniform()
    Uniform(rows=8, relative=0.99)
    """

    name: ClassVar[str] = "uniform"
    shares: ClassVar[frozenset[str]] = frozenset({"relative"})

    relative: float = 0.99

    def measure(self, head: Head) -> float | None:
        """Give the relative entropy of a head that is almost uniform."""
        return head.relative_entropy if head.relative_entropy >= self.relative else None

    def says(self, heads: list[Head], values: list[float]) -> str:
        """Say how close to uniform it is."""
        return f"{span(values, '.3f')} of the entropy of uniform attention (a dead head: it selects no key)"
