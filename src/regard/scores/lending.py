"""A score asked with other tensors in the place of its parameters: those whose gradients go elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.scores.base import Prepared, Score

__all__ = ["lent_factor", "lent_prepare"]


def lent_prepare(score: Score, loan: Mapping[str, Tensor], query: Tensor, key: Tensor) -> Prepared:
    """`score.prepare` with the tensors of `loan` for the parameters of these names.

    >>> from regard.scores import Scaled
    >>> score = Scaled(nn.Parameter(torch.tensor(1.0)))
    >>> lent_prepare(score, {"scale": torch.tensor(3.0)}, torch.ones(1, 1, 2), torch.ones(1, 1, 2)).query
    tensor([[[3., 3.]]])
    """
    made: Prepared = _asked(score, loan, query, key)
    return made


def lent_factor(score: Score, loan: Mapping[str, Tensor], query: Tensor) -> float | Tensor | None:
    """`score.factor` with the tensors of `loan` for the parameters of these names."""
    found: float | Tensor | None = _asked(score, loan, query)
    return found


class _Asking(nn.Module):
    """A score's methods as a `forward`, which is what torch can lend parameters to."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score = score

    def forward(self, query: Tensor, key: Tensor | None = None) -> Any:
        return self.score.factor(query) if key is None else self.score.prepare(query, key)


def _asked(score: Score, loan: Mapping[str, Tensor], *given: Tensor) -> Any:
    named = {f"score.{name}": x for name, x in loan.items()}
    return torch.func.functional_call(_Asking(score), named, given)
