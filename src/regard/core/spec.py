"""The specification of a call: everything but the tensors that have derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..biases import Bias
from ..errors import ChangedError
from ..masks import Mask
from ..scores import Score
from ..scores.pointwise import Pointwise
from ..scores.tracing import Bound
from .problem import Problem
from .versions import Versions

__all__ = ["Positions", "Spec"]


class Positions(NamedTuple):
    """Where the rows and keys of a part with gathered keys are in the whole problem; its items are lists of keys."""

    item: int  # the batch item of the whole problem, as dropout counts them
    rows: Tensor  # int64 (lists, rows)
    keys: Tensor  # int64 (lists, heads|1, W)
    shown: Tensor  # bool (lists, heads|1, groups|1, rows|1, W): which pairs are visible
    groups: int  # query heads per head
    n: int  # of the whole problem
    m: int


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
    paired: int = 0  # how many of the shared tensors belong to `pair` and `pointwise`; the others belong to `bias`
    pointwise: Bound | None = None  # a function of each score; the last of those tensors are its tables
    inner: int = 1  # flattened items that share one batch item of the mask
    period: int = 1  # flattened items after which the mask repeats (vmap adds copies)
    copies: int = 1  # consecutive flattened items with the same dropout (from vmap)
    origin: tuple[int, int] = (0, 0)  # batch item and query head at which this part of the whole problem begins
    corner: tuple[int, int] = (0, 0)  # row and key likewise; dropout depends on positions in the whole problem
    positions: Positions | None = None  # of a part with gathered keys
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

    @property
    def pairwise(self) -> bool:
        """Whether scores are more than dot products."""
        return self.pair is not None or self.pointwise is not None

    @property
    def hides_by_value(self) -> bool:
        """Whether logits may be −inf, which hides a pair, apart from those of a bias tensor."""
        return self.bias is not None or (self.pointwise is not None and self.pointwise.may_hide)

    def with_score(self, score: Score, shared: int, dtype: torch.dtype) -> Spec:
        """The same with a score that was prepared, and left so many shared tensors."""
        if not isinstance(score, Pointwise):
            return replace(self, pair=score.pair if score.pairwise else None, cost=score.cost, paired=shared)
        return self.with_score(score.base, shared, dtype).with_function(score.read(dtype)[0], shared)

    def with_function(self, f: Bound, shared: int) -> Spec:
        """The same with a function of each score; the last of so many shared tensors are its tables."""
        masks = () if self.mask is None else self.mask.sources
        return replace(self, pointwise=f, paired=shared, read=Versions((*masks, *f.whole.values())))

    @property
    def tables(self) -> slice:
        """Which of the shared tensors are tables of `pointwise`."""
        count = 0 if self.pointwise is None else self.pointwise.differentiable
        return slice(self.paired - count, self.paired)

    def check_unchanged(self) -> None:
        """Raise if a tensor of the mask was changed in place since the call."""
        if self.read is not None and self.read.changed():
            raise ChangedError(
                "attention: a tensor of the mask or the score was changed in place after the call, so a derivative "
                "would be that of another call. Run the backward pass before the change, or give the call a clone of "
                "the tensor."
            )
