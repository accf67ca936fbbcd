"""Reading: the result of a read, with the statistics of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Reading"]


class Reading(NamedTuple):
    """The output of each query, and the statistics of its weights."""

    output: Tensor
    """(…, value_dim) the mean of the values under the weights."""
    lse: Tensor
    """(…) log of the softmax denominator over the rows that were read."""
    entropy: Tensor
    """(…) −Σ p ln p, in nats: its exponential is the effective number of rows that were read."""
    max_logit: Tensor
    """(…) the largest logit."""
    ids: Tensor | None = None
    """(…, top) the rows that were read, strongest first; None if all rows were."""
    weights: Tensor | None = None
    """(…, top) their weights."""
    ranks: Tensor | None = None
    """(…, top) the rank that holds each row, in a read over a group; otherwise None."""

    def shaped(self, lead: Sequence[int]) -> Reading:
        """Reshape to the leading dimensions of the queries."""
        return Reading(*(None if x is None else x.reshape((*lead, *x.shape[1:])) for x in self))  # type: ignore[arg-type]
