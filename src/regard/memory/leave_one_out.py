"""How well a bandwidth serves: each point told from all others, as one attention whose diagonal is hidden."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..functional import observe
from ..masks import documents, window
from ..scores import Score
from .similarity import Likeness, likeness

__all__ = ["Points", "class_loss", "gathered", "squared_loss"]

Array = NDArray[np.float64]
_FEW = 512
_EXACT = 2.0**53  # whole numbers below this are exact


class Points(NamedTuple):
    """Distinct points, what is known of each, and how much each counts."""

    x: Tensor  # (m, d)
    target: Tensor  # (m, outputs) numbers, or (m,) the number of a class
    weight: Tensor  # (m,)
    stays: Tensor  # (m,) the weight that stays when one of its copies is left out


def gathered(x: Array, target: NDArray[np.generic], weight: Array | None, device: torch.device) -> Points:
    """Put points in one order, copies together, whole weights as so many copies; any other weight leaves as a whole.

    >>> points = gathered(np.array([[2.0], [1.0], [2.0]]), np.array([0, 1, 0]), None, torch.device("cpu"))
    >>> points.x, points.weight, points.stays
    (tensor([[1.],
            [2.]], dtype=torch.float64), tensor([1., 2.], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
    """
    weights = np.ones(len(x)) if weight is None else np.asarray(weight, dtype=np.float64)
    stays = np.zeros(len(x))
    if (weights == np.round(weights)).all() and weights.sum() < _EXACT:
        known = target.reshape(len(x), -1).astype(np.float64)
        rows = np.column_stack((known, x))  # by class first: its keys lie together
        _, first, place = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        weights = np.bincount(place.reshape(-1), weights).astype(np.float64)
        weights /= np.gcd.reduce(weights.astype(np.int64))  # all points twice are all points once
        x, target, stays = x[first], target[first], weights - 1
    made = (torch.as_tensor(np.ascontiguousarray(part), device=device) for part in (x, target, weights, stays))
    return Points(*made)


def squared_loss(points: Points, kernel: str | Score, log_bandwidth: Tensor) -> Tensor:
    """The squared error of each point's target, told from all other points, over the target's variance."""
    like, weight = _like(points, kernel, log_bandwidth), points.weight
    target = points.target - weight @ points.target / weight.sum()  # (m, outputs)
    seen = observe(like.query, like.key, target, mask=~window(0, 0, offset=0), **_by(points, like))
    error = target - seen.output
    if points.stays.any():  # the copies that stay tell the target itself
        error = error * torch.sigmoid(seen.lse - _own(points, kernel, log_bandwidth))[:, None]
    variance = weight @ target.square()
    return (weight @ error.square() / torch.where(variance > 0, variance, 1.0)).mean()


def class_loss(points: Points, kernel: str | Score, log_bandwidth: Tensor) -> Tensor:
    """The mean of −ln p, p the weight of each point's own class among all other points.

    It is the difference of two lse, and so finite however far away the class is. A point alone in its class counts
    for nothing: no bandwidth can tell it.
    """
    like = _like(points, kernel, log_bandwidth)
    others, nothing = ~window(0, 0, offset=0), torch.zeros_like(points.x[:, :1])
    how = _by(points, like)
    every = observe(like.query, like.key, nothing, mask=others, **how).lse
    mine = observe(like.query, like.key, nothing, mask=documents(points.target) & others, **how).lse
    told = (mine > -torch.inf) | (points.stays > 0)
    every, mine, weight = every[told], mine[told], points.weight[told]
    if points.stays.any():
        own = _own(points, kernel, log_bandwidth)[told]
        every, mine = torch.logaddexp(every, own), torch.logaddexp(mine, own)
    return weight @ (every - mine) / weight.sum().clamp(min=1e-300)


def _like(points: Points, kernel: str | Score, log_bandwidth: Tensor) -> Likeness:
    return likeness(kernel, points.x, points.x, log_bandwidth.exp(), points.weight.log())


def _by(points: Points, like: Likeness) -> dict[str, Any]:
    """The options of a call: few points are looked at in one piece, which is quicker."""
    return {**like.options, "backend": "reference" if len(points.x) <= _FEW else "auto"}


def _own(points: Points, kernel: str | Score, log_bandwidth: Tensor) -> Tensor:
    """The logit of a point's copies that stay with it, −inf where none does: (m,)."""
    own = likeness(kernel, points.x, points.x, log_bandwidth.exp(), points.stays.log())
    if "score" in own.options:
        logits: Tensor = own.options["score"](points.x[:, None], points.x[:, None])  # (m, 1, 1)
        return logits.reshape(-1) + points.stays.log()
    finite = points.stays > 0
    parts = own.query * torch.where(torch.isneginf(own.key), 0.0, own.key)
    return torch.where(finite, parts.sum(-1), -torch.inf)
