"""Leave-one-out losses of a bandwidth: each point is predicted from all others, as attention with a masked diagonal."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..functional import observe
from ..masks import documents, window
from ..scores import Score
from .similarity import KernelInputs, kernel_inputs

__all__ = ["Points", "log_loss", "merge_duplicates", "squared_loss"]

Array = NDArray[np.float64]
_REFERENCE_POINTS = 512  # up to so many, the reference backend is fastest
_EXACT = 2.0**53  # whole numbers below this are exact in float64


class Points(NamedTuple):
    """Distinct points with their targets and weights."""

    x: Tensor  # (m, d)
    target: Tensor  # (m, outputs) numbers, or (m,) class numbers
    weight: Tensor  # (m,)
    duplicate_weight: Tensor  # (m,) the weight that is left when one copy of the point is left out


def merge_duplicates(x: Array, target: NDArray[np.generic], weight: Array | None, device: torch.device) -> Points:
    """Sort points and merge copies. A whole weight counts copies; with other weights, a point is left out as a whole.

    >>> points = merge_duplicates(np.array([[2.0], [1.0], [2.0]]), np.array([0, 1, 0]), None, torch.device("cpu"))
    >>> points.x, points.weight, points.duplicate_weight
    (tensor([[1.],
            [2.]], dtype=torch.float64), tensor([1., 2.], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
    """
    weights = np.ones(len(x)) if weight is None else np.asarray(weight, dtype=np.float64)
    duplicate_weight = np.zeros(len(x))
    if (weights == np.round(weights)).all() and weights.sum() < _EXACT:
        columns = target.reshape(len(x), -1).astype(np.float64)
        rows = np.column_stack((columns, x))  # sorted by target first, so that the keys of a class are adjacent
        _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        weights = np.bincount(group.reshape(-1), weights).astype(np.float64)
        weights /= np.gcd.reduce(weights.astype(np.int64))  # repeating every point equally changes nothing
        x, target, duplicate_weight = x[first], target[first], weights - 1
    arrays = (x, target, weights, duplicate_weight)
    return Points(*(torch.as_tensor(np.ascontiguousarray(array), device=device) for array in arrays))


def squared_loss(points: Points, kernel: str | Score, log_bandwidth: Tensor) -> Tensor:
    """The squared error of predicting each target from all other points, divided by the variance of the targets."""
    inputs, weight = _inputs(points, kernel, log_bandwidth), points.weight
    target = points.target - weight @ points.target / weight.sum()  # (m, outputs)
    seen = observe(inputs.query, inputs.key, target, mask=~window(0, 0, offset=0), **_options(points, inputs))
    error = target - seen.output
    if points.duplicate_weight.any():  # the remaining copies predict the target itself
        error = error * torch.sigmoid(seen.lse - _duplicate_logit(points, kernel, log_bandwidth))[:, None]
    variance = weight @ target.square()
    return (weight @ error.square() / torch.where(variance > 0, variance, 1.0)).mean()


def log_loss(points: Points, kernel: str | Score, log_bandwidth: Tensor) -> Tensor:
    """The mean of −ln p, where p is the weight of a point's own class among all other points.

    It is the difference of two lse, and so finite however far away the class is. A point that is alone in its class is
    ignored: no bandwidth can predict it.
    """
    inputs = _inputs(points, kernel, log_bandwidth)
    others, no_values = ~window(0, 0, offset=0), torch.zeros_like(points.x[:, :1])
    options = _options(points, inputs)
    lse_all = observe(inputs.query, inputs.key, no_values, mask=others, **options).lse
    lse_class = observe(inputs.query, inputs.key, no_values, mask=documents(points.target) & others, **options).lse
    counted = (lse_class > -torch.inf) | (points.duplicate_weight > 0)
    lse_all, lse_class, weight = lse_all[counted], lse_class[counted], points.weight[counted]
    if points.duplicate_weight.any():
        own = _duplicate_logit(points, kernel, log_bandwidth)[counted]
        lse_all, lse_class = torch.logaddexp(lse_all, own), torch.logaddexp(lse_class, own)
    return weight @ (lse_all - lse_class) / weight.sum().clamp(min=1e-300)


def _inputs(points: Points, kernel: str | Score, log_bandwidth: Tensor) -> KernelInputs:
    return kernel_inputs(kernel, points.x, points.x, log_bandwidth.exp(), points.weight.log())


def _options(points: Points, inputs: KernelInputs) -> dict[str, Any]:
    """The options of a call; few points go to the reference backend, which is faster there."""
    return {**inputs.options, "backend": "reference" if len(points.x) <= _REFERENCE_POINTS else "auto"}


def _duplicate_logit(points: Points, kernel: str | Score, log_bandwidth: Tensor) -> Tensor:
    """The logit of the remaining copies of each point, −inf if there are none: (m,)."""
    log_weight = points.duplicate_weight.log()
    inputs = kernel_inputs(kernel, points.x, points.x, log_bandwidth.exp(), log_weight)
    if "score" in inputs.options:
        logits: Tensor = inputs.options["score"](points.x[:, None], points.x[:, None])  # (m, 1, 1)
        return logits.reshape(-1) + log_weight
    products = inputs.query * torch.where(torch.isneginf(inputs.key), 0.0, inputs.key)
    return torch.where(points.duplicate_weight > 0, products.sum(-1), -torch.inf)
