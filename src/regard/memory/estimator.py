"""The base of KernelRegressor and KernelClassifier: training points, bandwidth, and attention over the points."""

from __future__ import annotations

import copy
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ..errors import ArgumentError, DtypeError
from ..functional import attention, observe
from ..scores import Score
from .bandwidth import sample_indices, select_bandwidth
from .leave_one_out import merge_duplicates
from .similarity import KERNELS, KernelInputs, kernel_inputs
from .sklearn_compat import BaseEstimator, check_is_fitted, checked_sample_weight, validate_data

__all__ = ["Explanation", "KernelEstimator"]

Array = NDArray[Any]
SEARCHES = ("cv", "cv-per-feature")
_NARROW_KEYS = 32  # up to this width, padding the values costs less than a fused kernel saves
_MAX_LOGIT_ERROR = 1e-3  # above it, float64 replaces float32


class Explanation(NamedTuple):
    """The training points with the largest weights in each prediction, largest first."""

    weights: Array
    """(n, k) the weight of each point; the other points share the rest up to 1."""
    indices: Array
    """(n, k) its index among the training points."""
    targets: Array
    """(n, k) or (n, k, outputs): its target."""


class KernelEstimator(BaseEstimator):  # type: ignore[misc]
    """Predict from all training points, weighted by their similarity to the query."""

    def __init__(
        self,
        bandwidth: float | Array | str = "cv",
        kernel: str | Score = "gaussian",
        device: str | torch.device | None = None,
        cv_points: int = 2000,
    ) -> None:
        self.bandwidth = bandwidth
        self.kernel = kernel
        self.device = device
        self.cv_points = cv_points

    def explain(self, X: Any, k: int = 5) -> Explanation:
        """Return the k training points with the largest weights in each prediction."""
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise ArgumentError(f"explain: k must be a whole number, at least 1. Got {k!r}.")
        inputs = self._kernel_inputs(X)
        seen = observe(inputs.query, inputs.key, inputs.key[:, :1], **inputs.options)
        weights, indices = (found.cpu().numpy() for found in seen.top(min(int(k), len(self._x))))
        return Explanation(weights.astype(self._x.dtype), self._indices[indices], self._y[indices])

    def _fit(self, X: Array, y: Array, target: Array, sample_weight: Any, loss: Callable[..., Tensor]) -> None:
        """Store the points of nonzero weight with their `y`, and the bandwidth, selected with `target` if need be."""
        _check_parameters(self)
        weight = None if sample_weight is None else checked_sample_weight(sample_weight, X, dtype=np.float64)
        if weight is not None and ((weight < 0).any() or not weight.any()):
            raise ArgumentError(
                f"{type(self).__name__}: sample_weight must be at least 0, and above 0 somewhere. "
                f"Got {weight.min():g} to {weight.max():g}."
            )
        self._indices = np.arange(len(X)) if weight is None else np.flatnonzero(weight)
        self._x, self._y = X[self._indices], y[self._indices]
        self._weight = None if weight is None else weight[self._indices]
        self._score = (
            copy.deepcopy(self.kernel).requires_grad_(False) if isinstance(self.kernel, Score) else self.kernel
        )
        self._centre = self._x.mean(0, dtype=np.float64) if self.kernel == "gaussian" else np.zeros(X.shape[1])
        if isinstance(self.bandwidth, str):
            self.bandwidth_, self.loo_loss_ = self._search_bandwidth(target[self._indices], loss)
        else:
            self.bandwidth_ = np.asarray(self.bandwidth, dtype=np.float64)[()]

    def _search_bandwidth(self, target: Array, loss: Callable[..., Tensor]) -> tuple[Any, float]:
        """Find the bandwidth with the least leave-one-out loss, and return both."""
        sample = sample_indices(len(self._x), self.cv_points)
        weight = None if self._weight is None else self._weight[sample]
        points = merge_duplicates(self._x[sample].astype(np.float64), target[sample], weight, self._device())
        if self.kernel == "gaussian":
            points = points._replace(x=points.x - points.x.mean(0))
        per_feature = self.bandwidth == "cv-per-feature"
        bandwidth, least_loss = select_bandwidth(points, self._score_on(points.x.device), loss, per_feature)
        if self.kernel == "gaussian":  # the best bandwidth shrinks as n^(−1/(d + 4)), and the sample has fewer points
            bandwidth = bandwidth * (len(sample) / len(self._x)) ** (1 / (self._x.shape[1] + 4))
        return (bandwidth if per_feature else float(bandwidth[0])), least_loss

    def _kernel_inputs(self, X: Any) -> KernelInputs:
        """Check queries, and prepare them and the training points in the precision that they need."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        device, bandwidth = self._device(), np.asarray(self.bandwidth_)
        query, key = ((x.astype(np.float64) - self._centre) for x in (X, self._x))
        dtype = torch.float32 if X.dtype == self._x.dtype == np.float32 else torch.float64
        if dtype == torch.float32 and _logit_error(query, key, bandwidth) > _MAX_LOGIT_ERROR:
            dtype = torch.float64
        q, k, h = (torch.as_tensor(x, dtype=dtype, device=device) for x in (query, key, bandwidth))
        log_weight = None
        if self._weight is not None:
            log_weight = torch.as_tensor(np.log(self._weight), dtype=dtype, device=device)
        return kernel_inputs(self._score_on(device), q, k, h, log_weight)

    def _attend(self, X: Any, values: Array) -> Array:
        """Average the values of the training points with the kernel's weights for each row of X: (n, columns)."""
        inputs = self._kernel_inputs(X)
        value = torch.as_tensor(values, dtype=inputs.key.dtype, device=inputs.key.device)
        columns, width = value.shape[1], inputs.key.shape[1]
        if columns < width <= _NARROW_KEYS and "scale" in inputs.options:  # torch's fused kernels want equal widths
            value = pad(value, (0, width - columns))
        return attention(inputs.query, inputs.key, value, **inputs.options)[:, :columns].cpu().numpy()

    def _device(self) -> torch.device:
        return torch.device("cpu" if self.device is None else self.device)

    def _score_on(self, device: torch.device) -> str | Score:
        return self._score.to(device) if isinstance(self._score, Score) else self._score


def _logit_error(query: Array, key: Array, bandwidth: Array) -> float:
    """Bound the rounding error of a logit in float32."""
    sizes = [float(np.sqrt(np.square(x / bandwidth).sum(-1).max(initial=0.0))) for x in (query, key)]
    return float(np.finfo(np.float32).eps) * sizes[1] * max(sizes)


def _check_parameters(estimator: KernelEstimator) -> None:
    """Raise an error if a parameter is invalid."""
    who, kernel, bandwidth = type(estimator).__name__, estimator.kernel, estimator.bandwidth
    if not isinstance(kernel, Score) and not (isinstance(kernel, str) and kernel in KERNELS):
        raise ArgumentError(f"{who}: kernel must be 'gaussian', 'dot' or a score of regard.scores. Got {kernel!r}.")
    limit = estimator.cv_points
    if isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 2:
        raise ArgumentError(f"{who}: cv_points must be a whole number, at least 2. Got {limit!r}.")
    if isinstance(bandwidth, str):
        if bandwidth not in SEARCHES:
            raise ArgumentError(
                f"{who}: bandwidth must be 'cv', 'cv-per-feature', a number, or one number per feature. "
                f"Got {bandwidth!r}."
            )
        per_feature = bandwidth == "cv-per-feature"
    else:
        per_feature = _is_per_feature(who, bandwidth, estimator.n_features_in_)
    if per_feature and isinstance(kernel, Score):
        raise ArgumentError(
            f"{who}: a score has one bandwidth, which divides its logits by h². Got one per feature, which needs "
            f"kernel='gaussian' or 'dot'."
        )


def _is_per_feature(who: str, bandwidth: Any, features: int) -> bool:
    """Check a bandwidth given as numbers, and say whether there is one per feature."""
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, Real | np.ndarray | list | tuple):
        raise DtypeError(
            f"{who}: bandwidth must be 'cv', 'cv-per-feature', a number, or one number per feature. "
            f"Got {type(bandwidth).__name__}."
        )
    numbers = np.asarray(bandwidth, dtype=np.float64)
    if numbers.shape not in ((), (features,)):
        raise ArgumentError(
            f"{who}: bandwidth must be one number, or one for each of {features} features. Got shape {numbers.shape}."
        )
    if not (np.isfinite(numbers).all() and (numbers > 0).all()):
        raise ArgumentError(f"{who}: bandwidth must be finite and above 0. Got {bandwidth!r}.")
    return numbers.ndim > 0
