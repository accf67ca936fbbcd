"""One call of attention, checked and in one layout: nothing after `pose` checks an argument again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..biases import Bias
from ..masks import Mask
from ..masks.index import fits
from ..scores import Score
from ..softmax import arithmetic_dtype

__all__ = ["Problem"]


class Problem(NamedTuple):
    """One call of attention, validated and in one layout: 4-D tensors, one batch dimension."""

    query: Tensor  # (B, Hq, N, D)
    key: Tensor  # (B, Hk, M, D)
    value: Tensor  # (B, Hk, M, Dv)
    mask: Mask | None
    bias: Tensor | Bias | None  # a tensor is (B|1, Hq|1, N|1, M|1)
    score: Score | None
    scale: float | Tensor  # a tensor has one element, or one per head
    softcap: float | None
    sink: Tensor | None  # (Hq,)
    dropout: float
    lead: tuple[int, ...]  # the dimensions of the results before (N, …)
    observed: bool
    who: str  # the public function, for messages

    def with_tensors(self, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """The same call of other tensors; sooner than by `_replace`."""
        _, _, _, mask, bias, score, scale, softcap, sink, dropout, lead, observed, who = self
        return Problem(query, key, value, mask, bias, score, scale, softcap, sink, dropout, lead, observed, who)

    @property
    def rows(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def exact_dtype(self) -> torch.dtype:
        """The dtype of scores, statistics and the arithmetic of the softmax."""
        return arithmetic_dtype(self.query.dtype)

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def items_per_mask(self) -> int:
        """How many flattened batch items, one after the other, share one item of the mask."""
        batch = self.query.shape[0]
        return 1 if self.mask is None or fits(self.mask.lead[0], batch) else batch // self.mask.lead[0]

    @property
    def plain_scale(self) -> bool:
        """Whether the logits are q·k times a number."""
        return self.score is None and not isinstance(self.scale, Tensor)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that the result depends on."""
        found = [self.query, self.key, self.value]
        if self.mask is not None:
            found += self.mask.tensors
        if isinstance(self.bias, Tensor):
            found.append(self.bias)
        elif self.bias is not None:
            found += self.bias.tensors
        if self.score is not None:
            found += self.score.tensors
        found += [t for t in (self.scale, self.sink) if isinstance(t, Tensor)]
        return tuple(found)

    def shaped(self, x: Tensor) -> Tensor:
        """View a result (B, Hq, …) in the dimensions that the caller gave."""
        return x if len(self.lead) == 2 else x.reshape(self.lead + x.shape[2:])
