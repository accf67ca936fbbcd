"""The options of attention, named in one place."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from ..biases import Bias
from ..masks import Mask
from ..scores import Score

__all__ = ["Options"]


class Options(TypedDict):
    """What `attention`, `observe` and `why` take besides query, key, value and backend; `pose` checks it."""

    mask: Mask | Tensor | None
    bias: Tensor | Bias | None
    score: Score | None
    scale: float | Tensor | None
    softcap: float | None
    sink: Tensor | None
    dropout: float
