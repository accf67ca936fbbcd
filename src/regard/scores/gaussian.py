"""The exponent of a Gaussian kernel: attention as kernel regression."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.scores.base import Prepared, Score, positive

__all__ = ["Gaussian"]

_SAMPLE = 63  # keys whose median is the centre


class Gaussian(Score):
    """Exponent of a Gaussian kernel of bandwidth h: −‖q − k‖² / 2h².

    Queries and keys are first moved together, so that the keys lie around the origin: the squares of points far from it
    would leave no digits for their differences.

    A learnable bandwidth stays positive because `log_bandwidth` = ln h is learned.

    >>> import torch
    >>> Gaussian(bandwidth=0.5)(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 2.0]]))
    tensor([[ 0., -2.]])
    """

    def __init__(self, bandwidth: float, learnable: bool = False) -> None:
        super().__init__()
        self.init = positive("Gaussian", "bandwidth", bandwidth)
        self.learnable = bool(learnable)
        if self.learnable:
            self.log_bandwidth = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the bandwidth to its initial value."""
        if self.learnable:
            nn.init.constant_(self.log_bandwidth, math.log(self.init))

    @property
    def bandwidth(self) -> Tensor:
        """h, a single number."""
        return self.log_bandwidth.exp() if self.learnable else torch.tensor(self.init, device="cpu")

    def centre(self, query: Tensor, key: Tensor) -> Tensor:
        return _centre(key.detach())  # moving both changes no logit, so no derivative either

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return self.prepare_around(self.centre(query, key), query, key)

    def prepare_around(self, centre: Tensor, query: Tensor, key: Tensor) -> Prepared:
        groups = query.shape[-3] // max(key.shape[-3], 1)
        query, key = query - centre.repeat_interleave(groups, -3), key - centre
        # −‖q−k‖²/2h² = (q, −‖q‖²/2, 1)·(k, 1, −‖k‖²/2) / h²: a dot product of vectors with two more dimensions.
        precision = (self.own(self.log_bandwidth, query) * -2).exp() if self.learnable else self.init**-2
        query_term = (query * query).sum(-1, keepdim=True) * -0.5
        key_term = (key * key).sum(-1, keepdim=True) * -0.5
        return Prepared(
            torch.cat([query, query_term, torch.ones_like(query_term)], -1) * precision,
            torch.cat([key, torch.ones_like(key_term), key_term], -1),
        )

    def width(self, query_dim: int, key_dim: int) -> int:
        return key_dim + 2

    def extra_repr(self) -> str:
        return f"bandwidth={self.init:g}, learnable={self.learnable}"


def _centre(key: Tensor) -> Tensor:
    """A point (…, H, 1, D) near the keys (…, H, M, D): in each dim the median of some of them, on a coarse grid.

    The step of the grid is a power of two of about six times the keys' spread. So keys around the origin have the
    centre 0, and a few other keys, which a mask may hide, hardly ever move it, and with it the last bits of a result.
    Keys of zeros are left out, since padding is made of them, and so are keys that are not finite.
    """
    count = key.shape[-2]
    if not count:
        return key.new_zeros(*key.shape[:-2], 1, key.shape[-1])
    some = key.index_select(-2, torch.arange(_SAMPLE, device=key.device) * count // _SAMPLE)
    usable = (some.isfinite() & (some != 0).any(-1, keepdim=True)).all(-1, keepdim=True)
    median = _median(some, usable)
    spread = _median((some - median).abs(), usable)  # the median distance from the median
    step = torch.exp2((4 * spread).log2().ceil())
    return torch.where(spread > 0, (median / step).round() * step, median)


def _median(x: Tensor, usable: Tensor) -> Tensor:
    """The median of the usable rows of (…, H, M, D), by dim: (…, H, 1, D); 0 if there are none."""
    ranked = torch.where(usable, x, torch.inf).sort(-2).values
    found = usable.sum(-2, keepdim=True)  # (…, H, 1, 1)
    middle = ((found - 1) // 2).clamp(min=0).expand(*found.shape[:-1], x.shape[-1])
    return torch.where(found > 0, ranked.gather(-2, middle), 0.0)
