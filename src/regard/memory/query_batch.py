"""A batch of queries, and how it is compared with keys: the score and the temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..scores import Scaled, Score
from .similarity import TemperedScore

__all__ = ["QueryBatch"]


@dataclass(frozen=True)
class QueryBatch:
    """Queries (n, dim) with the score and the temperature that turn them and keys into logits."""

    queries: Tensor
    score: Score | None
    temperature: float | Tensor

    @property
    def options(self) -> dict[str, Any]:
        """The equivalent arguments of `regard.attention`."""
        if self.score is None:
            return {"scale": self._scale}
        plain = not isinstance(self.temperature, Tensor) and self.temperature == 1.0
        return {"score": self.score if plain else self._tempered_score}

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The other tensors that the logits depend on."""
        of_score = tuple(self.score.parameters()) if self.score is not None else ()
        return (*of_score, self.temperature) if isinstance(self.temperature, Tensor) else of_score

    @property
    def cost(self) -> int:
        """How many numbers each pair needs while its logit is computed."""
        return 1 if self.score is None else self.score.cost

    @property
    def _scale(self) -> float | Tensor:
        scale: float = self.queries.shape[-1] ** -0.5
        return scale / self.temperature

    @property
    def _tempered_score(self) -> Score:
        T = (
            self.temperature
            if isinstance(self.temperature, Tensor)
            else torch.tensor(self.temperature, device="cpu").double()
        )
        return TemperedScore(self.score or Scaled(), T.reshape(()).sqrt())

    def logits(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Compute the logits (n, m) of queries and keys that are already in the dtype of the arithmetic."""
        if self.score is None:
            return (queries * self._scale) @ keys.mT
        score: Score = self.options["score"]
        query, key, shared = score.prepare(queries[None], keys[None])
        return score.pair(query, key, *shared)[0]
