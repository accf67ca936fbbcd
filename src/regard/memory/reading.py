"""What a read tells, and the rule by which queries and keys make logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..scores import Scaled, Score
from .similarity import Tempered

__all__ = ["Asked", "Reading"]


class Reading(NamedTuple):
    """What a memory gave to each query, and what the weights say; all but the ids is differentiable or a plain fact."""

    output: Tensor
    """(…, value_dim) the values, averaged with the weights."""
    lse: Tensor
    """(…) log of the softmax denominator over the rows that were read."""
    entropy: Tensor
    """(…) −Σ p ln p, in nats: its exponential is how many rows were effectively read."""
    max_logit: Tensor
    """(…) the largest logit."""
    ids: Tensor | None = None
    """(…, top) the rows that were read, strongest first; None where all were."""
    weights: Tensor | None = None
    """(…, top) their weights."""
    ranks: Tensor | None = None
    """(…, top) which rank holds each, in a read over a group; None elsewhere."""

    def shaped(self, lead: Sequence[int]) -> Reading:
        """Give the same in the dimensions in which the queries came."""
        return Reading(*(None if x is None else x.reshape((*lead, *x.shape[1:])) for x in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Asked:
    """Queries (n, dim), and how they are compared with keys."""

    queries: Tensor
    score: Score | None
    temperature: float | Tensor

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `regard.attention` that mean the same."""
        if self.score is None:
            return {"scale": self._scale}
        plain = not isinstance(self.temperature, Tensor) and self.temperature == 1.0
        return {"score": self.score if plain else self._tempered}

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What else the logits depend on."""
        own = tuple(self.score.parameters()) if self.score is not None else ()
        return (*own, self.temperature) if isinstance(self.temperature, Tensor) else own

    @property
    def cost(self) -> int:
        """How many numbers a pair holds in flight."""
        return 1 if self.score is None else self.score.cost

    @property
    def _scale(self) -> float | Tensor:
        plain: float = self.queries.shape[-1] ** -0.5
        return plain / self.temperature

    @property
    def _tempered(self) -> Score:
        T = self.temperature if isinstance(self.temperature, Tensor) else torch.tensor(self.temperature).double()
        return Tempered(self.score or Scaled(), T.reshape(()).sqrt())

    def logits(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Give the logits (n, m) of queries and keys that are of the dtype of the arithmetic."""
        if self.score is None:
            return (queries * self._scale) @ keys.mT
        score: Score = self.options["score"]
        query, key, shared = score.prepare(queries[None], keys[None])
        return score.pair(query, key, *shared)[0]
