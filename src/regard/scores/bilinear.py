"""The multiplicative score: a learned matrix between query and key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.scores.base import Prepared, Score, whole

__all__ = ["Bilinear"]


class Bilinear(Score):
    """Multiplicative score with one matrix, or one per query head: qᵀ W k; query and key dims may differ.

    W is initialised with standard deviation 1/√(query_dim · key_dim), so that inputs of variance 1 give logits of
    variance 1.

    >>> import torch
    >>> score = Bilinear(2, 3)
    >>> _ = torch.nn.init.ones_(score.weight)
    >>> score(torch.ones(1, 2), torch.ones(1, 3)).item()
    6.0
    """

    same_dims = False

    def __init__(self, query_dim: int, key_dim: int, heads: int | None = None) -> None:
        super().__init__()
        self.query_dim = whole("Bilinear", "query_dim", query_dim)
        self.key_dim = whole("Bilinear", "key_dim", key_dim)
        self.heads = None if heads is None else whole("Bilinear", "heads", heads)
        shape = (self.query_dim, self.key_dim)
        self.weight = nn.Parameter(torch.empty(shape if self.heads is None else (self.heads, *shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise W again."""
        nn.init.normal_(self.weight, std=(self.query_dim * self.key_dim) ** -0.5)

    def misfit(self, query_dim: int, key_dim: int, heads: int) -> str | None:
        if (query_dim, key_dim) != (self.query_dim, self.key_dim):
            return (
                f"it was made for query dim {self.query_dim} and key dim {self.key_dim}, "
                f"but query has {query_dim} and key has {key_dim}"
            )
        if self.heads not in (None, 1) and self.heads != heads:  # torch.compile finds no symbol in a tuple
            return f"it has one matrix for each of {self.heads} heads, but query has {heads}"
        return super().misfit(query_dim, key_dim, heads)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return Prepared(query @ self.own(self.weight, query), key)

    def extra_repr(self) -> str:
        return f"query_dim={self.query_dim}, key_dim={self.key_dim}, heads={self.heads}"
