"""regard: exact attention that you can see through."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        backends,
        biases,
        distributed,
        errors,
        lab,
        masks,
        memory,
        models,
        nn,
        positions,
        report,
        scores,
        softmax,
    )
    from .backends.dispatch import Plan
    from .functional import (
        attention,
        attention_with_weights,
        divergence,
        observe,
        scaled_dot_product_attention,
        steps,
        why,
    )
    from .masks import (
        Mask,
        blocks,
        causal,
        chosen,
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
    from .memory import KernelClassifier, KernelRegressor, Memory
    from .models import Monitor, edit, watch
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
    "chosen",
    "dense",
    "distributed",
    "divergence",
    "documents",
    "edit",
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

# Where each name is defined. It is imported at its first use, so that `regard --version` does not wait for torch.
_PLACES = {
    **dict.fromkeys(("KernelClassifier", "KernelRegressor", "Memory"), "memory"),
    **dict.fromkeys(("Monitor", "edit", "watch"), "models"),
    **dict.fromkeys(
        ("attention", "attention_with_weights", "observe", "scaled_dot_product_attention", "steps", "why"), "functional"
    ),
    "divergence": "functional",
    **dict.fromkeys(
        ("Mask", "blocks", "causal", "dense", "documents", "everything", "global_tokens", "packed", "padding"), "masks"
    ),
    **dict.fromkeys(("chosen", "predicate", "prefix", "strided", "window"), "masks"),
    "Observation": "observation",
    "Plan": "backends.dispatch",
}
_MODULES = {
    *(name for name in __all__ if name not in _PLACES),
    *("autograd", "chunked", "compat", "core", "functional", "kernels", "observation"),
}

if not TYPE_CHECKING:  # type checkers know the names above and report all others

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
