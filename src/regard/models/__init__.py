"""Whole models: watch them, diagnose them, monitor their training, and run them with regard's attention."""

from __future__ import annotations

import importlib
from typing import Any

from .contributions import Contributions, HeadContribution, contributions, value_weighted
from .difference import Difference
from .edit import Edit, edit
from .head_census import Census, census
from .head_statistics import Head
from .importance import HeadImportance, Importance, importance
from .monitor import Monitor
from .qk_clip import qk_clip_
from .seen import Seen
from .watch import watch

__all__ = [
    "Census",
    "Contributions",
    "Difference",
    "Edit",
    "Head",
    "HeadContribution",
    "HeadImportance",
    "Importance",
    "Monitor",
    "Seen",
    "builtin",
    "census",
    "contributions",
    "edit",
    "findings",
    "importance",
    "qk_clip_",
    "register",
    "value_weighted",
    "watch",
]


_LAZY = {"builtin", "callbacks", "findings", "huggingface", "inspection", "loading", "loggers"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def register() -> None:
    """Register `attn_implementation="regard"` with Hugging Face transformers."""
    from .huggingface import register as register_with_transformers

    register_with_transformers()
