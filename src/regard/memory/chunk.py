"""Some rows of a memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Chunk", "concatenate"]


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
