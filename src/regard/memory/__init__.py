"""Attention as a content-addressable memory, and as kernel regression."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .classifier import KernelClassifier
    from .memory import Memory
    from .reading import Reading
    from .regressor import KernelRegressor

__all__ = ["KernelClassifier", "KernelRegressor", "Memory", "Reading"]

_MODULES = {"KernelClassifier": "classifier", "KernelRegressor": "regressor", "Memory": "memory", "Reading": "reading"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
