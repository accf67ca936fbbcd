"""The rows of a memory at one moment, read in chunks or by position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Chunk", "Snapshot", "concatenate"]


class Chunk(NamedTuple):
    """Some rows of a memory, in the order in which they were written."""

    keys: Tensor
    """(n, key_dim)"""
    values: Tensor
    """(n, value_dim)"""
    ids: Tensor
    """(n,) int64"""


def concatenate(chunks: list[Chunk]) -> Chunk:
    """Join chunks in order; a single one is not copied."""
    chunks = [chunk for chunk in chunks if len(chunk.ids)] or chunks[:1]
    if len(chunks) == 1:
        return chunks[0]
    keys, values, ids = (torch.cat(column) for column in zip(*chunks, strict=True))
    return Chunk(keys, values, ids)


class Snapshot(Protocol):
    """The rows of a memory at one moment: later writes and deletions do not change them."""

    @property
    def count(self) -> int:
        """How many rows there are."""

    def chunks(self, chunk_rows: int) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield all rows in order, at most `chunk_rows` at a time, with their positions."""

    def take(self, positions: Tensor) -> Chunk:
        """Return the rows at 1-D positions."""

    def verified(self) -> Snapshot:
        """The same rows, compared with their checksums if they have any."""
