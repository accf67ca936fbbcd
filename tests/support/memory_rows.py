"""Rows of a Memory that follow from their ids, so that a row in the wrong place is noticed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from regard.memory import Memory


def numbered(start: int, stop: int) -> tuple[Tensor, Tensor, list[int]]:
    """Keys, values and ids of the rows from `start` to `stop`."""
    ids = torch.arange(start, stop)
    return torch.stack((ids, -ids), -1).float(), ids[:, None].float() * 10, ids.tolist()


def saved(path: Path, count: int = 5) -> Path:
    """Save a memory with the first `count` rows."""
    memory = Memory(2, 1)
    memory.write(*numbered(0, count)[:2])
    memory.save(path)
    return path


def held(memory: Memory) -> list[int]:
    """The ids, after a check that each row is the one that belongs to its id."""
    chunks = list(memory)
    ids = [i for chunk in chunks for i in chunk.ids.tolist()]
    for keys, values, some in chunks:
        assert torch.equal(keys, torch.stack((some, -some), -1).float())
        assert torch.equal(values, some[:, None].float() * 10)
    return ids
