"""What a read reads: rows in chunks, or some rows by their places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Chunk", "Source", "joined"]


class Chunk(NamedTuple):
    """Some rows of a memory, in the order in which they were written."""

    keys: Tensor
    """(n, key_dim)"""
    values: Tensor
    """(n, value_dim)"""
    ids: Tensor
    """(n,) int64"""


def joined(parts: list[Chunk]) -> Chunk:
    """Put chunks one behind the other; a single one is not copied."""
    parts = [part for part in parts if len(part.ids)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    keys, values, ids = (torch.cat(column) for column in zip(*parts, strict=True))
    return Chunk(keys, values, ids)


class Source(Protocol):
    """The rows of a memory at one moment: later writes and deletions do not change them."""

    @property
    def count(self) -> int:
        """How many rows there are."""

    def chunks(self, size: int) -> Iterator[tuple[Chunk, Tensor]]:
        """Give all rows in order, at most `size` at a time, each with its place."""

    def at(self, places: Tensor) -> Chunk:
        """Give the rows (n, …) of 1-D places."""
