"""The exponent of a Gaussian kernel: attention as kernel regression."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.scores.base import Prepared, Score, positive

__all__ = ["Gaussian"]


class Gaussian(Score):
    """Exponent of a Gaussian kernel of bandwidth h: −‖q − k‖² / 2h².

    A learnable bandwidth stays positive because `log_bandwidth` = ln h is learned.

    >>> import torch
    >>> Gaussian(bandwidth=0.5)(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 2.0]]))
    tensor([[ 0., -2.]])
    """

    def __init__(self, bandwidth: float, learnable: bool = False) -> None:
        super().__init__()
        self.init = positive("Gaussian", "bandwidth", bandwidth)
        self.learnable = bool(learnable)
        if self.learnable:
            self.log_bandwidth = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the bandwidth to its initial value."""
        if self.learnable:
            nn.init.constant_(self.log_bandwidth, math.log(self.init))

    @property
    def bandwidth(self) -> Tensor:
        """h, a single number."""
        return self.log_bandwidth.exp() if self.learnable else torch.tensor(self.init)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        # −‖q−k‖²/2h² = (q, −‖q‖²/2, 1)·(k, 1, −‖k‖²/2) / h²: a dot product of vectors with two more dimensions.
        precision = (self.own(self.log_bandwidth, query) * -2).exp() if self.learnable else self.init**-2
        query_term = (query * query).sum(-1, keepdim=True) * -0.5
        key_term = (key * key).sum(-1, keepdim=True) * -0.5
        return Prepared(
            torch.cat([query, query_term, torch.ones_like(query_term)], -1) * precision,
            torch.cat([key, torch.ones_like(key_term), key_term], -1),
        )

    def width(self, query_dim: int, key_dim: int) -> int:
        return key_dim + 2

    def extra_repr(self) -> str:
        return f"bandwidth={self.init:g}, learnable={self.learnable}"
