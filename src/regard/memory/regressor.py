"""KernelRegressor: attention over the training points as a scikit-learn regressor."""

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
    """Predict the mean of the training targets, weighted by similarity: Nadaraya–Watson kernel regression.

    The weights of a prediction are softmax(−‖x − x′‖²/2h²) over the training points x′, exact, in memory linear in
    their number. It follows the conventions of scikit-learn, so it works in pipelines and grid searches.

    - `bandwidth`: h in the units of X, one number or one per feature; "cv" finds one, "cv-per-feature" one per feature,
      by minimising the squared leave-one-out error with its exact gradient;
    - `kernel`: "gaussian", "dot" (logits x·x′/h²), or a score of `regard.scores`, whose logits are divided by h²;
    - `device`: where to compute, the CPU if None; `cv_points`: how many points the search uses at most.

    After `fit`: `bandwidth_`, and after a search `loo_loss_`, the leave-one-out error over the variance of y (1 − R²).

    >>> x = np.linspace(0, 6, 50)[:, None]
    >>> model = KernelRegressor().fit(x, np.sin(x[:, 0]))
    >>> model.predict([[1.5]])
    array([0.99])
    >>> model.explain([[1.5]], k=2).indices
    array([[12, 13]])
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelRegressor:
        """Store the points and choose the bandwidth; a whole weight counts copies of a point."""
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32), multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self._fit(X, y, y.reshape(len(y), -1), sample_weight, squared_loss)
        targets = self._y.reshape(len(self._y), -1)
        self._mean, self._std = targets.mean(0), targets.std(0)
        self._std[self._std == 0] = 1.0
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Return the weighted mean of the targets, and with `return_std` their weighted standard deviation too."""
        check_is_fitted(self)
        targets = (self._y.reshape(len(self._y), -1) - self._mean) / self._std
        columns = targets.shape[1]
        values = np.concatenate((targets, targets**2), 1) if return_std else targets
        moments = self._attend(X, values).astype(np.float64)
        mean = moments[:, :columns]
        shape = (len(mean), *self._y.shape[1:])
        prediction: Array = (mean * self._std + self._mean).reshape(shape).astype(self._x.dtype)
        if not return_std:
            return prediction
        std = np.sqrt(np.maximum(moments[:, columns:] - mean**2, 0.0)) * self._std
        return prediction, std.reshape(shape).astype(self._x.dtype)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
