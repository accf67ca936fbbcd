"""The statistics of a census: what each measures, the bins of its histogram, and the units in which it is summed.

Sums are kept as whole numbers of a small unit, and histograms as counts, so that they do not depend on the order in
which batches, shards and machines are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["BINS", "LENGTH_EDGES", "NAMES", "SCALES", "Scale", "edge_buckets"]

BINS = 256
"""How many bins a histogram has."""

_OCTAVES = 20


@dataclass(frozen=True)
class Scale:
    """How the values of one statistic are binned and summed."""

    name: str
    title: str
    about: str
    unit: float  # sums are whole numbers of it
    low: float  # the first edge, after `transform`
    high: float  # the last
    transform: str = "linear"  # "linear", "log" of 1 + x, or "asinh": where bins are of equal width
    whole: bool = False  # whether it is 0 or 1

    @property
    def edges(self) -> np.ndarray:
        """The BINS + 1 edges of the histogram; values outside are counted in the first or the last bin."""
        transformed = np.linspace(self.low, self.high, BINS + 1)
        return _INVERSES[self.transform](transformed)

    def bins(self, values: Tensor) -> Tensor:
        """The bin of each value, int64; NaN goes to bin 0, and must be left out by the caller."""
        transformed = _TRANSFORMS[self.transform](values)
        steps = (transformed - self.low) * (BINS / (self.high - self.low))
        return steps.nan_to_num(0.0, BINS, 0.0).clamp_(0, BINS - 1).long()

    @property
    def resolution(self) -> str:
        """How exact deciles are, in words."""
        width = (self.high - self.low) / BINS
        if self.transform == "linear":
            return f"{width:.3g}"
        return (
            f"{100 * width:.2g} % of the value" if self.transform == "log" else f"{width:.2g}, or {100 * width:.2g} %"
        )


_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda x: x, "log": torch.log1p, "asinh": torch.asinh}
_INVERSES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda x: x,
    "log": np.expm1,
    "asinh": np.sinh,
}

_SHARE = 2.0**-30
_NUMBER = 2.0**-20

SCALES = (
    Scale("entropy", "entropy", "of the weights of a row, in nats", 2.0**-26, 0.0, 12.0),
    Scale("relative_entropy", "relative entropy", "divided by that of uniform weights: 1 is uniform", _SHARE, 0.0, 1.0),
    Scale("effective_keys", "effective keys", "exp(entropy)", _NUMBER, 0.0, 12.0, "log"),
    Scale(
        "max_logit", "max logit", "the largest logit of a row, as it enters the softmax", _NUMBER, -8.0, 8.0, "asinh"
    ),
    Scale("first_share", "first token", "the weight on the first key that anything attends to", _SHARE, 0.0, 1.0),
    Scale("self_share", "self", "the weight on the row's own position", _SHARE, 0.0, 1.0),
    Scale("previous_share", "previous token", "the weight on the position before", _SHARE, 0.0, 1.0),
    Scale(
        "saturated_share",
        "saturated",
        "1 for a row with more than 0.99 on one key, otherwise 0",
        _SHARE,
        0.0,
        1.0,
        whole=True,
    ),
    Scale(
        "distance", "distance", "from the row's position to what it attends to, in tokens", _NUMBER, 0.0, 12.0, "log"
    ),
    Scale(
        "concentration", "concentration", "the sum of squared weights: 1 if one key has everything", _SHARE, 0.0, 1.0
    ),
    Scale("induction", "induction", "the weight on tokens that follow an earlier copy of the row's", _SHARE, 0.0, 1.0),
    Scale("duplicate", "duplicate token", "the weight on earlier copies of the row's token", _SHARE, 0.0, 1.0),
)
"""Every statistic of a row that a census counts."""

NAMES = tuple(scale.name for scale in SCALES)

LENGTH_EDGES = (0, *sorted({math.ceil(part * 2**octave) for octave in range(_OCTAVES) for part in (1.0, 1.5)}))
"""Where the buckets of positions and lengths begin: 0, 1, 2, 3, 4, 6, 8, 12, …"""


def edge_buckets(values: Tensor) -> Tensor:
    """The bucket of `LENGTH_EDGES` that each whole number falls into.

    >>> edge_buckets(torch.tensor([0, 1, 5, 6, 100])).tolist()
    [0, 1, 4, 5, 13]
    """
    edges = torch.tensor(LENGTH_EDGES[1:], device=values.device)
    return torch.bucketize(values, edges, right=True)
