"""Who answers calls whose tensors are parts of a sequence that several processes hold: nobody, unless told so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError

__all__ = ["KINDS", "SPREAD", "Spread", "alone", "elsewhere", "nowhere_else", "places"]


class Spread(ABC):
    """One that takes parts of a sequence, and answers for this process's rows."""

    @abstractmethod
    def attention(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """Attend over all parts."""

    @abstractmethod
    def observe(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        """Attend over all parts, and see what the weights say."""

    @abstractmethod
    def places(self, count: int, device: torch.device) -> Tensor:
        """The places of this process's tokens in the whole sequence."""


SPREAD: list[Spread] = []
"""Those within whose `with` a call is made; the last one answers."""
KINDS: dict[str, Callable[[], Spread]] = {}
"""Who answers for a kind of tensor that is spread by itself, by the name of its class."""


def elsewhere(query: Tensor) -> Spread | None:
    """Who answers a call with this query, if it is not a plain one."""
    kind = KINDS.get(type(query).__name__)
    if kind is not None:
        return kind()
    return SPREAD[-1] if SPREAD else None


def places(count: int, device: torch.device) -> Tensor | None:
    """The places in the whole sequence of tokens that a module is given; None if it is given all of them."""
    return SPREAD[-1].places(count, device) if SPREAD else None


@contextmanager
def alone() -> Iterator[None]:
    """Let calls in a `with` be plain ones, for tensors that are no parts whatever the context: a memory's rows."""
    hidden = SPREAD[:]
    SPREAD.clear()
    try:
        yield
    finally:
        SPREAD[:] = hidden


def nowhere_else(who: str) -> None:
    """Raise inside a context in which tensors are parts, for what does not know that."""
    if SPREAD:
        raise ArgumentError(
            f"{who}: inside regard.distributed.over tensors are parts of a sequence, which attention and observe alone "
            f"understand. Call regard.attention, or leave the context."
        )
