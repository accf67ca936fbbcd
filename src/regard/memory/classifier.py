"""KernelClassifier: attention over the training points as a scikit-learn classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .estimator import KernelEstimator
from .leave_one_out import log_loss
from .sklearn_compat import (
    ClassifierMixin,
    check_classification_targets,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

__all__ = ["KernelClassifier"]

Array = NDArray[Any]


class KernelClassifier(ClassifierMixin, KernelEstimator):  # type: ignore[misc]
    """Predict the share of each class among the training points, weighted by similarity.

    The parameters are those of `KernelRegressor`. The bandwidth search minimises the leave-one-out log loss, which is
    `loo_loss_` after `fit`; `classes_` are the classes in order.

    >>> x = np.array([[0.0], [1.0], [4.0], [5.0]])
    >>> model = KernelClassifier(bandwidth=1.0).fit(x, ["low", "low", "high", "high"])
    >>> model.predict([[2.0], [3.0]])
    array(['low', 'high'], dtype='<U4')
    >>> model.predict_proba([[2.5]])
    array([[0.5, 0.5]])
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelClassifier:
        """Store the points and choose the bandwidth; a whole weight counts copies of a point."""
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32))
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        self.classes_, self._codes = np.unique(y, return_inverse=True)
        self._fit(X, y, self._codes, sample_weight, log_loss)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Return the share of each class, (n, classes), in the order of `classes_`."""
        check_is_fitted(self)
        member = self._codes[self._indices][:, None] == np.arange(len(self.classes_))
        shares = self._attend(X, member.astype(np.float64))
        shares /= shares.sum(1, keepdims=True)
        probabilities: Array = shares.astype(self._x.dtype, copy=False)
        return probabilities

    def predict(self, X: Any) -> Array:
        """Return the class with the largest share."""
        shares = self.predict_proba(X)
        predicted: Array = self.classes_[shares.argmax(1)]
        return predicted
