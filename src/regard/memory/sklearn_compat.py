"""The parts of scikit-learn that we use, or one clear error if it is not installed."""

from __future__ import annotations

from ..errors import MissingPackageError

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
except ImportError as missing:
    raise MissingPackageError(
        "memory: KernelRegressor and KernelClassifier need scikit-learn 1.6 or newer: pip install 'regard[learn]'."
    ) from missing

__all__ = [
    "BaseEstimator",
    "ClassifierMixin",
    "RegressorMixin",
    "check_classification_targets",
    "check_is_fitted",
    "checked_sample_weight",
    "column_or_1d",
    "validate_data",
]

checked_sample_weight = _check_sample_weight
