"""Checks of the constructor arguments that the modules share."""

from __future__ import annotations

from numbers import Real

from ..errors import ArgumentError, DtypeError
from ..scores import Score

__all__ = ["optional_score", "probability"]


def probability(who: str, value: float) -> float:
    """Check the probability of dropout, 0 ≤ p < 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1:
        raise ArgumentError(f"{who}: dropout must be a probability, 0 ≤ p < 1. Got {value!r}.")
    return float(value)


def optional_score(who: str, value: Score | None) -> Score | None:
    """Check a score; None is the scaled dot product."""
    if value is not None and not isinstance(value, Score):
        raise DtypeError(f"{who}: score must be a regard.scores Score or None. Got {type(value).__name__}.")
    return value
