"""The additive score of Bahdanau: a small network scores every pair."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.scores.base import Prepared, Score, whole

__all__ = ["Additive"]


class Additive(Score):
    """Additive (Bahdanau) score: vᵀ tanh(W₁q + W₂k); query and key dims may differ.

    W₁ (`query_weight`) and W₂ (`key_weight`) are initialised so that inputs of variance 1 give the tanh an argument of
    variance 1, and v (`vector`) with standard deviation 1/√hidden, so that the logits are of order 1.

    >>> import torch
    >>> score = Additive(2, 3, hidden=4)
    >>> score(torch.zeros(1, 2), torch.zeros(5, 3)).shape
    torch.Size([1, 5])
    """

    pairwise = True
    same_dims = False

    def __init__(self, query_dim: int, key_dim: int, hidden: int) -> None:
        super().__init__()
        self.query_dim = whole("Additive", "query_dim", query_dim)
        self.key_dim = whole("Additive", "key_dim", key_dim)
        self.hidden = whole("Additive", "hidden", hidden)
        self.query_weight = nn.Parameter(torch.empty(self.hidden, self.query_dim))
        self.key_weight = nn.Parameter(torch.empty(self.hidden, self.key_dim))
        self.vector = nn.Parameter(torch.empty(self.hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise W₁, W₂ and v again."""
        nn.init.normal_(self.query_weight, std=(2 * self.query_dim) ** -0.5)
        nn.init.normal_(self.key_weight, std=(2 * self.key_dim) ** -0.5)
        nn.init.normal_(self.vector, std=self.hidden**-0.5)

    @property
    def cost(self) -> int:
        """The number of hidden units: each pair holds one number per unit."""
        return self.hidden

    def misfit(self, query_dim: int, key_dim: int, heads: int) -> str | None:
        if (query_dim, key_dim) != (self.query_dim, self.key_dim):
            return (
                f"it was made for query dim {self.query_dim} and key dim {self.key_dim}, "
                f"but query has {query_dim} and key has {key_dim}"
            )
        return super().misfit(query_dim, key_dim, heads)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return Prepared(
            query @ self.own(self.query_weight, query).mT,
            key @ self.own(self.key_weight, query).mT,
            (self.own(self.vector, query),),
        )

    @staticmethod
    def pair(query: Tensor, key: Tensor, *shared: Tensor) -> Tensor:
        (vector,) = shared
        return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ vector

    def extra_repr(self) -> str:
        return f"query_dim={self.query_dim}, key_dim={self.key_dim}, hidden={self.hidden}"
