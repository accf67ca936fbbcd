"""Exact arithmetic: what autocast must not touch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["exact", "exactly"]

P = ParamSpec("P")
R = TypeVar("R")


def exact() -> AbstractContextManager[None]:
    """A context in which autocast casts nothing: the arithmetic of the softmax keeps its dtype."""
    return torch._C._DisableAutocast()


def exactly(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in that context: a backward pass may be called from inside autocast too."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with exact():
            return function(*args, **kwargs)

    return wrapped
