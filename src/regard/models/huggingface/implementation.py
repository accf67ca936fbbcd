"""Let Hugging Face models answer through our registered function for a while, whatever implementation they have set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

from torch import nn

from . import NAME, register
from .attention import call_as_problem

__all__ = ["answered_by_regard", "observed_beside"]

_HEARD = {"sdpa", NAME}  # implementations whose calls are heard anyway
_FIELD = "_attn_implementation_internal"  # where transformers keeps the name; its property would also set sub-configs


@contextmanager
def answered_by_regard(model: nn.Module) -> Iterator[None]:
    """Set `attn_implementation="regard"` where a model has another one that makes no call to be heard.

    The masks are then ours too. On exit, even after an exception, every config has the name that it had before.
    """
    configs = _configs(model)
    if configs:
        register()
    before = [(config, getattr(config, _FIELD)) for config in configs]
    try:
        for config in configs:
            setattr(config, _FIELD, NAME)
        yield
    finally:
        for config, name in before:
            setattr(config, _FIELD, name)


@contextmanager
def observed_beside(model: nn.Module, respond: Callable[..., Any]) -> Iterator[None]:
    """Let the model call its own function as ever, and pass each call to `respond(problem, original)` besides."""
    if not _configs(model):
        yield
        return
    table: Any = import_module("transformers").AttentionInterface
    found: Callable[..., Callable[..., Any]] = table.get_interface

    @wraps(found)
    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = found(self, name, default)
        return function if name in _HEARD else _heard(function, respond)

    table.get_interface = get_interface
    try:
        yield
    finally:
        table.get_interface = found


def _heard(function: Callable[..., Any], respond: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
        more: list[Any] = []

        def original() -> Any:
            output, *rest = function(module, query, key, value, attention_mask, **given)
            more.extend(rest)
            return output.transpose(1, 2)

        output = respond(lambda: call_as_problem(module, query, key, value, attention_mask, **given), original)
        return (output.transpose(1, 2), *more)

    return call


def _configs(model: nn.Module) -> list[Any]:
    """The configs whose implementation makes no call to be heard, of modules that look it up in transformers' table."""
    found: dict[int, Any] = {}
    if "transformers" not in sys.modules:
        return []
    for module in model.modules():
        config = getattr(module, "config", None)
        name = getattr(config, _FIELD, NAME)
        code = sys.modules.get(type(module).__module__)
        if name not in _HEARD and not str(name).startswith("paged|") and hasattr(code, "ALL_ATTENTION_FUNCTIONS"):
            found[id(config)] = config
    return list(found.values())
