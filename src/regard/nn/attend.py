"""Attention as the modules call it: with or without weights, and with errors that name the module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import RegardError
from ..functional import attention, observe

__all__ = ["attend"]

_CALLED = ("attention", "observe", "distributed.attention", "distributed.observe")


def attend(
    who: str, query: Tensor, key: Tensor, value: Tensor, *, return_weights: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return (output, weights), or (output, None) without `return_weights`; an error starts with `who`."""
    try:
        if not return_weights:
            return attention(query, key, value, **options), None
        seen = observe(query, key, value, **options)
        return seen.output, seen.weights()
    except RegardError as error:
        name, _, rest = str(error).partition(": ")
        if name in _CALLED:
            error.args = (f"{who}: {rest}",)
        raise
