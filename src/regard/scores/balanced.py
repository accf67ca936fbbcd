"""The scaled dot product with its scale split between query and key."""

from __future__ import annotations

from torch import Tensor

from regard.scores.base import Prepared, Score

__all__ = ["Balanced"]


class Balanced(Score):
    """Scaled dot product with both sides scaled alike: (q·D^-¼)·(k·D^-¼), the same logits as `Scaled()`.

    The prepared query and key can be multiplied in half precision: the sum is the logit itself, not √D times it, and
    neither side shrinks by the whole D^-½. `forward` and the backends do not need this: they sum in float32 or float64,
    and kernels that multiply the sum by D^-½ leave both sides as they are.

    >>> import torch
    >>> Balanced()(torch.ones(1, 16), torch.ones(2, 16))
    tensor([[4., 4.]])
    """

    def factor(self, query: Tensor) -> float | Tensor | None:
        return float(max(query.shape[-1], 1) ** -0.5)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        scale = max(query.shape[-1], 1) ** -0.25
        return Prepared(query * scale, key * scale)
