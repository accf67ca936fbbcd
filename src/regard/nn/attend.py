"""What modules ask of attention: the output, with the weights or without, and errors that name the module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import RegardError
from ..functional import attention, observe

__all__ = ["attend"]

_ASKED = ("attention", "observe", "distributed.attention", "distributed.observe")


def attend(
    who: str, query: Tensor, key: Tensor, value: Tensor, *, weighted: bool, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """Give (output, weights), or (output, None) where they are not `weighted`; an error starts with `who`."""
    try:
        if not weighted:
            return attention(query, key, value, **given), None
        seen = observe(query, key, value, **given)
        return seen.output, seen.weights()
    except RegardError as error:
        name, _, rest = str(error).partition(": ")
        if name in _ASKED:
            error.args = (f"{who}: {rest}",)
        raise
