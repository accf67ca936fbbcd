"""ScaledDotProductAttention: the textbook module."""

from __future__ import annotations

from torch import Tensor, nn

from ..masks import Mask
from ..masks.arguments import textbook_mask
from ..scores import Score
from .arguments import optional_score, probability
from .attend import attend

__all__ = ["ScaledDotProductAttention"]

_WHO = "ScaledDotProductAttention"


class ScaledDotProductAttention(nn.Module):
    """Attend with softmax(QKᵀ / √d), or with another `score`, and return the output with the weights.

    Dropout applies to the weights, in training mode only. The returned weights are those before dropout: each row that
    attends to something sums to 1. With `return_weights=False` they are never formed, and memory is linear in the
    sequence.

    >>> import torch
    >>> output, weights = ScaledDotProductAttention()(*torch.randn(3, 2, 5, 8).unbind())
    >>> output.shape, weights.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 5]))
    """

    def __init__(self, dropout: float = 0.0, score: Score | None = None) -> None:
        super().__init__()
        self.dropout = probability(_WHO, dropout)
        self.score = optional_score(_WHO, score)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | Tensor | None = None,
        return_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, weights), or (output, None); in `mask`, 0 and False hide, also in a float tensor of 0 and 1.

        The shapes are those of `regard.attention`: (…, heads, N, D), (batch, N, D) or (N, D).
        """
        dropout = self.dropout if self.training else 0.0
        options = {"mask": textbook_mask(_WHO, mask), "score": self.score, "dropout": dropout}
        return attend(_WHO, query, key, value, return_weights=return_weights, **options)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout:g}"
