"""The contexts in which tensors are shards of a sequence that several processes hold; by default there is none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
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
    """A context that takes shards of a sequence and gives the results of this process's rows."""

    @abstractmethod
    def attention(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """Attend over all shards."""

    @abstractmethod
    def observe(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        """Attend over all shards, and observe the weights."""

    @abstractmethod
    def token_positions(self, count: int, device: torch.device) -> Tensor:
        """The positions of this process's tokens in the whole sequence."""


ACTIVE: list[ShardedContext] = []
"""The contexts entered by `with`; the last one takes the call."""


def _dtensors() -> ShardedContext:
    """The context of DTensors. It is on a level above this one, so it is imported only where there is a DTensor."""
    found: ShardedContext = import_module("..distributed.dtensors", __package__).DTENSORS
    return found


TENSOR_TYPES: dict[str, Callable[[], ShardedContext]] = {"DTensor": _dtensors}
"""Contexts for tensor types that are sharded by themselves, by the name of the class."""


def active_context(query: Tensor) -> ShardedContext | None:
    """The context that takes a call with this query; None for a plain call."""
    kind = TENSOR_TYPES.get(type(query).__name__)
    if kind is not None:
        return kind()
    return ACTIVE[-1] if ACTIVE else None


def token_positions(count: int, device: torch.device) -> Tensor | None:
    """The positions of a module's tokens in the whole sequence; None if the module gets all of them."""
    return ACTIVE[-1].token_positions(count, device) if ACTIVE else None


@contextmanager
def outside_context() -> Iterator[None]:
    """Make calls plain, for tensors that are never shards, such as the rows of a memory."""
    hidden = ACTIVE[:]
    ACTIVE.clear()
    try:
        yield
    finally:
        ACTIVE[:] = hidden


def refuse_in_context(who: str) -> None:
    """Raise inside a context, on behalf of a function that does not support shards."""
    if ACTIVE:
        raise ArgumentError(
            f"{who}: inside regard.distributed.over tensors are shards of a sequence, which only attention and observe "
            f"support. Call regard.attention, or leave the context."
        )
