"""Sampling rows: a few, evenly spaced, whose exact weights fit in memory linear in the sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["evenly_spaced", "flatten_batch", "row_batches"]

_BATCH_SIZE = 1 << 22  # weights held at a time
_BATCH_SIZE_ON_GPU = 1 << 24  # more, since a launch costs more than the work


def flatten_batch(x: Tensor, after: int) -> Tensor:
    """View a member of an Observation as (items, heads, …), where `after` dimensions follow the heads.

    >>> [tuple(flatten_batch(torch.zeros(shape), 1).shape) for shape in ((2, 3, 8, 16), (5, 16), (16,))]
    [(6, 8, 16), (5, 1, 16), (1, 1, 16)]
    """
    lead, rest = x.shape[: x.dim() - after], x.shape[x.dim() - after :]
    items, heads = (math.prod(lead[:-1]), lead[-1]) if len(lead) >= 2 else (math.prod(lead), 1)
    return x.reshape(items, heads, *rest)


def evenly_spaced(positions: Tensor, most: int) -> Tensor:
    """Take at most `most` of the positions, evenly spaced and always the same.

    >>> evenly_spaced(torch.arange(10), 4).tolist()
    [0, 3, 6, 9]
    """
    if len(positions) <= most:
        return positions
    return positions[(torch.arange(most, device=positions.device) * (len(positions) - 1)) // max(1, most - 1)]


def row_batches(rows: Tensor, each: int, device: torch.device) -> Iterator[Tensor]:
    """Split rows into batches that fit in memory, at `each` numbers per row."""
    most = _BATCH_SIZE if device.type == "cpu" else _BATCH_SIZE_ON_GPU
    yield from rows.split(max(1, most // max(1, each)))
