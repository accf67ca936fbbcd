"""The scaled dot product with its scale shared out between both sides."""

from __future__ import annotations

from torch import Tensor

from regard.scores.base import Prepared, Score

__all__ = ["Balanced"]


class Balanced(Score):
    """Scaled dot product whose two sides are scaled alike: (q·D^-¼)·(k·D^-¼), which keeps both small in half precision.

    >>> import torch
    >>> Balanced()(torch.ones(1, 16), torch.ones(2, 16))
    tensor([[4., 4.]])
    """

    def factor(self, query: Tensor) -> float | Tensor | None:
        return float(max(query.shape[-1], 1) ** -0.5)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        scale = max(query.shape[-1], 1) ** -0.25
        return Prepared(query * scale, key * scale)
