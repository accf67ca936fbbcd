"""A score called with other tensors in place of its parameters, so that their gradients flow to those tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.scores.base import Prepared, Score

__all__ = ["functional_factor", "functional_prepare"]


def functional_prepare(
    score: Score, parameters: Mapping[str, Tensor], query: Tensor, key: Tensor, centre: Tensor | None = None
) -> Prepared:
    """Call `score.prepare`, or `prepare_around` with a centre, with `parameters` in place of those of the same names.

    >>> from regard.scores import Scaled
    >>> score = Scaled(nn.Parameter(torch.tensor(1.0)))
    >>> functional_prepare(score, {"scale": torch.tensor(3.0)}, torch.ones(1, 1, 2), torch.ones(1, 1, 2)).query
    tensor([[[3., 3.]]])
    """
    prepared: Prepared = _call(score, parameters, query, key, centre)
    return prepared


def functional_factor(score: Score, parameters: Mapping[str, Tensor], query: Tensor) -> float | Tensor | None:
    """Call `score.factor` with `parameters` in place of those of the same names."""
    factor: float | Tensor | None = _call(score, parameters, query)
    return factor


class _ForwardAdapter(nn.Module):
    """A score's methods as a `forward`, which torch.func.functional_call needs."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score = score

    def forward(self, query: Tensor, key: Tensor | None = None, centre: Tensor | None = None) -> Any:
        if key is None:
            return self.score.factor(query)
        return self.score.prepare(query, key) if centre is None else self.score.prepare_around(centre, query, key)


def _call(score: Score, parameters: Mapping[str, Tensor], *tensors: Tensor | None) -> Any:
    named = {f"score.{name}": x for name, x in parameters.items()}
    return torch.func.functional_call(_ForwardAdapter(score), named, tensors)
