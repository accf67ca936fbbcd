"""What turns dot products into weights, apart from the tensors that have derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..biases import Bias
from ..masks import Mask
from .problem import Problem

__all__ = ["Spec"]


@dataclass(frozen=True, eq=False)
class Spec:
    """Lengths, mask, cap, dropout, and how logits come about."""

    n: int
    m: int
    mask: Mask | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    pair: Callable[..., Tensor] | None = None  # logits of a score that is no dot product
    cost: int = 1  # numbers in flight for each pair
    bias: Bias | None = None  # a structured bias
    paired: int = 0  # how many of the shared tensors belong to `pair`; the others to `bias`
    inner: int = 1  # flattened items that share one batch item of the mask
    period: int = 1  # flattened items before the mask begins again (vmap puts more in front)
    copies: int = 1  # flattened items, one after the other, that share one fate under dropout (vmap puts them so)
    origin: tuple[int, int] = (0, 0)  # batch item and query head of the whole problem at which this part of it begins
    corner: tuple[int, int] = (0, 0)  # likewise row and key; what dropout drops is decided by places in the whole

    @staticmethod
    def of(p: Problem, seed: int = 0) -> Spec:
        """The spec of a whole problem, its score left out; `seed` decides what dropout drops."""
        batch = p.query.shape[0]
        return Spec(
            n=p.rows,
            m=p.keys,
            mask=p.mask,
            softcap=p.softcap,
            dropout=p.dropout,
            seed=seed,
            bias=p.bias if isinstance(p.bias, Bias) else None,
            inner=p.items_per_mask,
            period=batch,
        )
