"""Who answers calls whose tensors are parts of a sequence that several processes hold: nobody, unless told so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError

__all__ = [
    "ACTIVE",
    "TENSOR_TYPES",
    "ShardedContext",
    "active_context",
    "outside_context",
    "refuse_in_context",
    "token_positions",
]


class ShardedContext(ABC):
    """One that takes parts of a sequence, and answers for this process's rows."""

    @abstractmethod
    def attention(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """Attend over all parts."""

    @abstractmethod
    def observe(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        """Attend over all parts, and see what the weights say."""

    @abstractmethod
    def token_positions(self, count: int, device: torch.device) -> Tensor:
        """The places of this process's tokens in the whole sequence."""


ACTIVE: list[ShardedContext] = []
"""Those within whose `with` a call is made; the last one answers."""
TENSOR_TYPES: dict[str, Callable[[], ShardedContext]] = {}
"""Who answers for a kind of tensor that is spread by itself, by the name of its class."""


def active_context(query: Tensor) -> ShardedContext | None:
    """Who answers a call with this query, if it is not a plain one."""
    kind = TENSOR_TYPES.get(type(query).__name__)
    if kind is not None:
        return kind()
    return ACTIVE[-1] if ACTIVE else None


def token_positions(count: int, device: torch.device) -> Tensor | None:
    """The places in the whole sequence of tokens that a module is given; None if it is given all of them."""
    return ACTIVE[-1].token_positions(count, device) if ACTIVE else None


@contextmanager
def outside_context() -> Iterator[None]:
    """Let calls in a `with` be plain ones, for tensors that are no parts whatever the context: a memory's rows."""
    hidden = ACTIVE[:]
    ACTIVE.clear()
    try:
        yield
    finally:
        ACTIVE[:] = hidden


def refuse_in_context(who: str) -> None:
    """Raise inside a context in which tensors are parts, for what does not know that."""
    if ACTIVE:
        raise ArgumentError(
            f"{who}: inside regard.distributed.over tensors are parts of a sequence, which attention and observe alone "
            f"understand. Call regard.attention, or leave the context."
        )
