"""What the kernel regressor and the kernel classifier share: points, bandwidth, and the attention over them."""

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
from .bandwidth import choose_bandwidth, sample
from .leave_one_out import gathered
from .similarity import KERNELS, Likeness, likeness
from .sklearn_compat import BaseEstimator, check_is_fitted, checked_sample_weight, validate_data

__all__ = ["Explanation", "KernelEstimator"]

Array = NDArray[Any]
SEARCHES = ("cv", "cv-per-feature")
_NARROW = 32  # keys so narrow that wider values cost less than a fused kernel saves
_ROUNDING = 1e-3  # the largest error of a logit that single precision may leave


class Explanation(NamedTuple):
    """The training points that made each prediction, the strongest first."""

    weights: Array
    """(n, k) the share of each; what is missing to 1 came from all others."""
    indices: Array
    """(n, k) its place among the training points."""
    targets: Array
    """(n, k) or (n, k, outputs): what was known of it."""


class KernelEstimator(BaseEstimator):  # type: ignore[misc]
    """Predict from all training points, each weighted by how like it is."""

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
        """Give the k training points with the largest weights behind each prediction."""
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise ArgumentError(f"explain: k must be a whole number, at least 1. Got {k!r}.")
        like, _ = self._like(X)
        seen = observe(like.query, like.key, like.key[:, :1], **like.options)
        weights, indices = (found.cpu().numpy() for found in seen.top(min(int(k), len(self._x))))
        return Explanation(weights.astype(self._x.dtype), self._place[indices], self._known[indices])

    def _remember(self, X: Array, known: Array, target: Array, sample_weight: Any, loss: Callable[..., Tensor]) -> None:
        """Keep the points that count, what is `known` of them, and a bandwidth, told by `target` if it is searched."""
        _check(self)
        weight = None if sample_weight is None else checked_sample_weight(sample_weight, X, dtype=np.float64)
        if weight is not None and ((weight < 0).any() or not weight.any()):
            raise ArgumentError(
                f"{type(self).__name__}: sample_weight must be at least 0, and above 0 somewhere. "
                f"Got {weight.min():g} to {weight.max():g}."
            )
        self._place = np.arange(len(X)) if weight is None else np.flatnonzero(weight)
        self._x, self._known = X[self._place], known[self._place]
        self._weight = None if weight is None else weight[self._place]
        self._score = (
            copy.deepcopy(self.kernel).requires_grad_(False) if isinstance(self.kernel, Score) else self.kernel
        )
        self._centre = self._x.mean(0, dtype=np.float64) if self.kernel == "gaussian" else np.zeros(X.shape[1])
        if isinstance(self.bandwidth, str):
            self.bandwidth_, self.loo_loss_ = self._searched(target[self._place], loss)
        else:
            self.bandwidth_ = np.asarray(self.bandwidth, dtype=np.float64)[()]

    def _searched(self, target: Array, loss: Callable[..., Tensor]) -> tuple[Any, float]:
        """The bandwidth of least leave-one-out loss, and that loss."""
        some = sample(len(self._x), self.cv_points)
        weight = None if self._weight is None else self._weight[some]
        points = gathered(self._x[some].astype(np.float64), target[some], weight, self._device())
        if self.kernel == "gaussian":
            points = points._replace(x=points.x - points.x.mean(0))
        per_feature = self.bandwidth == "cv-per-feature"
        bandwidth, left = choose_bandwidth(points, self._score_on(points.x.device), loss, per_feature)
        if self.kernel == "gaussian":  # what is best for a sample is too wide for all: it shrinks as n^(−1/(d + 4))
            bandwidth = bandwidth * (len(some) / len(self._x)) ** (1 / (self._x.shape[1] + 4))
        return (bandwidth if per_feature else float(bandwidth[0])), left

    def _like(self, X: Any) -> tuple[Likeness, torch.dtype]:
        """Checked queries beside the training points, in the precision that the numbers ask for."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        device, bandwidth = self._device(), np.asarray(self.bandwidth_)
        query, key = ((x.astype(np.float64) - self._centre) for x in (X, self._x))
        dtype = torch.float32 if X.dtype == self._x.dtype == np.float32 else torch.float64
        if dtype == torch.float32 and _rounding(query, key, bandwidth) > _ROUNDING:
            dtype = torch.float64
        made = [torch.as_tensor(x, dtype=dtype, device=device) for x in (query, key, bandwidth)]
        log_weight = None
        if self._weight is not None:
            log_weight = torch.as_tensor(np.log(self._weight), dtype=dtype, device=device)
        return likeness(self._score_on(device), made[0], made[1], made[2], log_weight), dtype

    def _attend(self, X: Any, values: Array) -> Array:
        """The mean of the training points' values, weighted by likeness to each row of X: (n, columns)."""
        like, dtype = self._like(X)
        held = torch.as_tensor(values, dtype=dtype, device=like.key.device)
        columns, width = held.shape[1], like.key.shape[1]
        if columns < width <= _NARROW and "scale" in like.options:  # torch's fused kernels want values as wide as keys
            held = pad(held, (0, width - columns))
        return attention(like.query, like.key, held, **like.options)[:, :columns].cpu().numpy()

    def _device(self) -> torch.device:
        return torch.device("cpu" if self.device is None else self.device)

    def _score_on(self, device: torch.device) -> str | Score:
        return self._score.to(device) if isinstance(self._score, Score) else self._score


def _rounding(query: Array, key: Array, bandwidth: Array) -> float:
    """How far single precision may leave a logit from the truth."""
    sizes = [float(np.sqrt(np.square(x / bandwidth).sum(-1).max(initial=0.0))) for x in (query, key)]
    return float(np.finfo(np.float32).eps) * sizes[1] * max(sizes)


def _check(estimator: KernelEstimator) -> None:
    """Raise about a parameter that has no meaning."""
    who, kernel, bandwidth = type(estimator).__name__, estimator.kernel, estimator.bandwidth
    if not isinstance(kernel, Score) and not (isinstance(kernel, str) and kernel in KERNELS):
        raise ArgumentError(f"{who}: kernel must be 'gaussian', 'dot' or a score of regard.scores. Got {kernel!r}.")
    limit = estimator.cv_points
    if isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 2:
        raise ArgumentError(f"{who}: cv_points must be a whole number, at least 2. Got {limit!r}.")
    if isinstance(bandwidth, str):
        if bandwidth not in SEARCHES:
            raise ArgumentError(
                f"{who}: bandwidth must be 'cv', 'cv-per-feature', a number, or one number a feature. "
                f"Got {bandwidth!r}."
            )
        many = bandwidth == "cv-per-feature"
    else:
        many = _checked_numbers(who, bandwidth, estimator.n_features_in_)
    if many and isinstance(kernel, Score):
        raise ArgumentError(
            f"{who}: a score has one bandwidth, which divides its logits by h². Got one a feature; they go with "
            f"kernel='gaussian' or 'dot'."
        )


def _checked_numbers(who: str, bandwidth: Any, features: int) -> bool:
    """Whether a given bandwidth has one number a feature."""
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, Real | np.ndarray | list | tuple):
        raise DtypeError(
            f"{who}: bandwidth must be 'cv', 'cv-per-feature', a number, or one number a feature. "
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
