"""KernelRegressor: attention over the training points as an estimator of scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .estimator import KernelEstimator
from .leave_one_out import squared_loss
from .sklearn_compat import RegressorMixin, check_is_fitted, validate_data

__all__ = ["KernelRegressor"]

Array = NDArray[Any]


class KernelRegressor(RegressorMixin, KernelEstimator):  # type: ignore[misc]
    """Predict the mean of the training targets, weighted by likeness: the regression of Nadaraya and Watson.

    The weights of a prediction are softmax(−‖x − x′‖²/2h²) over the training points x′, exact, in memory linear in
    their number. In the conventions of scikit-learn, so it stands in pipelines and grid searches.

    - `bandwidth`: h in the units of X, one number or one a feature; "cv" finds one, "cv-per-feature" one a feature,
      by least squared leave-one-out error, followed down with its exact gradient;
    - `kernel`: "gaussian", "dot" (logits x·x′/h²), or a score of `regard.scores`, whose logits are divided by h²;
    - `device`: where to compute, the CPU if None; `cv_points`: how many points the search looks at.

    After `fit`: `bandwidth_`, and after a search `loo_loss_`, the leave-one-out error over the variance of y (1 − R²).

    >>> x = np.linspace(0, 6, 50)[:, None]
    >>> model = KernelRegressor().fit(x, np.sin(x[:, 0]))
    >>> model.predict([[1.5]])
    array([0.99])
    >>> model.explain([[1.5]], k=2).indices
    array([[12, 13]])
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelRegressor:
        """Remember the points and choose the bandwidth; whole weights mean so many copies of a point."""
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32), multi_output=True, y_numeric=True)
        known = np.asarray(y, dtype=np.float64)
        self._remember(X, known, known.reshape(len(known), -1), sample_weight, squared_loss)
        held = self._known.reshape(len(self._known), -1)
        self._mean, self._unit = held.mean(0), held.std(0)
        self._unit[self._unit == 0] = 1.0
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Give the weighted mean of the targets, and with `return_std` their weighted standard deviation too."""
        check_is_fitted(self)
        units = (self._known.reshape(len(self._known), -1) - self._mean) / self._unit
        columns = units.shape[1]
        found = self._attend(X, np.concatenate((units, units**2), 1) if return_std else units).astype(np.float64)
        mean = found[:, :columns]
        shape = (len(mean), *self._known.shape[1:])
        told: Array = (mean * self._unit + self._mean).reshape(shape).astype(self._x.dtype)
        if not return_std:
            return told
        spread = np.sqrt(np.maximum(found[:, columns:] - mean**2, 0.0)) * self._unit
        return told, spread.reshape(shape).astype(self._x.dtype)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
