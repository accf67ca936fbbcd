"""Rows held in memory; rows that require a gradient stay in the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .chunk import Chunk, concatenate

__all__ = ["InMemorySnapshot", "InMemoryStore"]


@dataclass(frozen=True)
class InMemorySnapshot:
    """All rows as three tensors."""

    rows: Chunk

    @property
    def count(self) -> int:
        return len(self.rows.ids)

    def chunks(self, chunk_rows: int) -> Iterator[tuple[Chunk, Tensor]]:
        for start in range(0, self.count, chunk_rows):
            stop = min(start + chunk_rows, self.count)
            positions = torch.arange(start, stop, device=self.rows.keys.device)
            yield Chunk(*(x[start:stop] for x in self.rows)), positions

    def take(self, positions: Tensor) -> Chunk:
        return Chunk(*(x.index_select(0, positions) for x in self.rows))

    def verified(self) -> InMemorySnapshot:
        return self


class _Block(NamedTuple):
    """The rows of one write; `kept` indexes those that are left after deletions."""

    rows: Chunk
    kept: Tensor | None = None

    @property
    def requires_grad(self) -> bool:
        return self.rows.keys.requires_grad or self.rows.values.requires_grad

    @property
    def remaining(self) -> Chunk:
        kept = self.kept
        return self.rows if kept is None else Chunk(*(x.index_select(0, kept) for x in self.rows))


class InMemoryStore:
    """Rows in memory. Tensors that require a gradient are held as they are, all others as copies."""

    def __init__(self, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        keys, values = (torch.empty(0, dim, dtype=dtype, device=device) for dim in (key_dim, value_dim))
        self._blocks = [_Block(Chunk(keys, values, torch.empty(0, dtype=torch.int64, device=device)))]
        self.next_id = 0

    @property
    def count(self) -> int:
        return sum(len(block.rows.ids if block.kept is None else block.kept) for block in self._blocks)

    def snapshot(self) -> InMemorySnapshot:
        """Join the blocks of all writes; if no row requires a gradient, keep the result as the only block."""
        if not any(block.requires_grad for block in self._blocks):
            self._blocks = [_Block(concatenate([block.remaining for block in self._blocks]))]
            return InMemorySnapshot(self._blocks[0].rows)
        return InMemorySnapshot(concatenate([block.remaining for block in self._blocks]))

    def write(self, keys: Tensor, values: Tensor, ids: Tensor) -> None:
        keys, values = (x if x.requires_grad else x.detach().clone() for x in (keys, values))
        self.next_id = max(self.next_id, int(ids.max()) + 1)  # first: a fork in between skips ids and repeats none
        self._blocks.append(_Block(Chunk(keys, values, ids.clone())))

    def contains(self, ids: Tensor) -> Tensor:
        """Return a bool per id: whether it is held."""
        found = torch.zeros_like(ids, dtype=torch.bool)
        for block in self._blocks:
            found |= torch.isin(ids, block.remaining.ids)
        return found

    def delete(self, ids: Tensor) -> None:
        self._blocks = [_without(block, ids) for block in self._blocks]


def _without(block: _Block, ids: Tensor) -> _Block:
    """Drop some ids from a block. Rows with a gradient keep their tensors, so that later changes to them are seen."""
    held = block.remaining.ids
    deleted = torch.isin(held, ids)
    if not bool(deleted.any()):
        return block
    kept = (~deleted).nonzero().squeeze(-1)
    block = block._replace(kept=kept if block.kept is None else block.kept[kept])
    return block if block.requires_grad else _Block(block.remaining)
