"""The specification of a call: everything but the tensors that have derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..biases import Bias
from ..errors import ChangedError
from ..masks import Mask
from .problem import Problem
from .versions import Versions

__all__ = ["Spec"]


@dataclass(frozen=True, eq=False)
class Spec:
    """Lengths, mask, softcap, dropout, and how logits are computed."""

    n: int
    m: int
    mask: Mask | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int | Tensor = 0  # a tensor in compiled graphs, which draw it when they run
    pair: Callable[..., Tensor] | None = None  # logits of a score that is not a dot product
    cost: int = 1  # numbers in flight per pair
    bias: Bias | None = None  # a structured bias
    paired: int = 0  # how many of the shared tensors belong to `pair`; the others belong to `bias`
    inner: int = 1  # flattened items that share one batch item of the mask
    period: int = 1  # flattened items after which the mask repeats (vmap adds copies)
    copies: int = 1  # consecutive flattened items with the same dropout (from vmap)
    origin: tuple[int, int] = (0, 0)  # batch item and query head at which this part of the whole problem begins
    corner: tuple[int, int] = (0, 0)  # row and key likewise; dropout depends on positions in the whole problem
    read: Versions | None = None  # the tensors that decide the mask, as the call found them

    @staticmethod
    def of(p: Problem, seed: int | Tensor = 0) -> Spec:
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
            read=None if p.mask is None else Versions(p.mask.sources),
        )

    def check_unchanged(self) -> None:
        """Raise if a tensor of the mask was changed in place since the call."""
        if self.read is not None and self.read.changed():
            raise ChangedError(
                "attention: a tensor of the mask was changed in place after the call, so a derivative would be that of "
                "another mask. Run the backward pass before the change, or give the call a clone of the tensor."
            )
