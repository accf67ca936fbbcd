"""regard: exact attention that you can see through."""

from __future__ import annotations

import importlib
from typing import Any

from . import backends, biases, errors, masks, positions, scores, softmax
from .backends.dispatch import Plan
from .core.contexts import TENSOR_TYPES
from .functional import attention, attention_with_weights, observe, scaled_dot_product_attention, steps, why
from .masks import (
    Mask,
    blocks,
    causal,
    dense,
    documents,
    everything,
    global_tokens,
    packed,
    padding,
    predicate,
    prefix,
    strided,
    window,
)
from .observation import Observation

__version__ = "0.1.0"

__all__ = [
    "KernelClassifier",
    "KernelRegressor",
    "Mask",
    "Memory",
    "Monitor",
    "Observation",
    "Plan",
    "attention",
    "attention_with_weights",
    "backends",
    "biases",
    "blocks",
    "causal",
    "dense",
    "distributed",
    "documents",
    "errors",
    "everything",
    "global_tokens",
    "lab",
    "masks",
    "memory",
    "models",
    "nn",
    "observe",
    "packed",
    "padding",
    "positions",
    "predicate",
    "prefix",
    "report",
    "scaled_dot_product_attention",
    "scores",
    "softmax",
    "steps",
    "strided",
    "watch",
    "why",
    "window",
]

_LAZY = {"distributed", "lab", "memory", "models", "nn", "report"}
_PLACES = {
    "KernelClassifier": "memory",
    "KernelRegressor": "memory",
    "Memory": "memory",
    "Monitor": "models",
    "watch": "models",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


TENSOR_TYPES["DTensor"] = lambda: importlib.import_module(f"{__name__}.distributed.dtensors").DTENSORS
