"""Rows held in memory: in the graph, where they have a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .snapshot import Chunk, joined

__all__ = ["Held", "Whole"]


@dataclass(frozen=True)
class Whole:
    """All rows as three tensors."""

    rows: Chunk

    @property
    def count(self) -> int:
        return len(self.rows.ids)

    def chunks(self, size: int) -> Iterator[tuple[Chunk, Tensor]]:
        for start in range(0, self.count, size):
            stop = min(start + size, self.count)
            places = torch.arange(start, stop, device=self.rows.keys.device)
            yield Chunk(*(x[start:stop] for x in self.rows)), places

    def at(self, places: Tensor) -> Chunk:
        return Chunk(*(x.index_select(0, places) for x in self.rows))


class _Block(NamedTuple):
    """What one write brought; `kept` says which of its rows are left, where some are deleted."""

    rows: Chunk
    kept: Tensor | None = None

    @property
    def graph(self) -> bool:
        return self.rows.keys.requires_grad or self.rows.values.requires_grad

    @property
    def left(self) -> Chunk:
        kept = self.kept
        return self.rows if kept is None else Chunk(*(x.index_select(0, kept) for x in self.rows))


class Held:
    """Rows in memory. Tensors that require a gradient are held as they are, all others as copies."""

    def __init__(self, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        keys, values = (torch.empty(0, dim, dtype=dtype, device=device) for dim in (key_dim, value_dim))
        self._blocks = [_Block(Chunk(keys, values, torch.empty(0, dtype=torch.int64, device=device)))]
        self.next_id = 0

    @property
    def count(self) -> int:
        return sum(len(block.rows.ids if block.kept is None else block.kept) for block in self._blocks)

    def snapshot(self) -> Whole:
        """Join what the writes brought; where no row has a gradient, once and for all."""
        if not any(block.graph for block in self._blocks):
            self._blocks = [_Block(joined([block.left for block in self._blocks]))]
            return Whole(self._blocks[0].rows)
        return Whole(joined([block.left for block in self._blocks]))

    def write(self, keys: Tensor, values: Tensor, ids: Tensor) -> None:
        keys, values = (x if x.requires_grad else x.detach().clone() for x in (keys, values))
        self._blocks.append(_Block(Chunk(keys, values, ids.clone())))
        self.next_id = max(self.next_id, int(ids.max()) + 1)

    def present(self, ids: Tensor) -> Tensor:
        """Say which of some ids are held."""
        found = torch.zeros_like(ids, dtype=torch.bool)
        for block in self._blocks:
            found |= torch.isin(ids, block.left.ids)
        return found

    def delete(self, ids: Tensor) -> None:
        self._blocks = [_without(block, ids) for block in self._blocks]


def _without(block: _Block, ids: Tensor) -> _Block:
    """A block without some ids; rows with a gradient stay what they are, so that a change of them is still seen."""
    left = block.left.ids
    gone = torch.isin(left, ids)
    if not bool(gone.any()):
        return block
    kept = (~gone).nonzero().squeeze(-1)
    block = block._replace(kept=kept if block.kept is None else block.kept[kept])
    return block if block.graph else _Block(block.left)
