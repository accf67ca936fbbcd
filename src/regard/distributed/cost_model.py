"""What one pass of attention costs each rank: pairs, floating-point operations, bytes sent and bytes held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ..masks import Mask
from ..masks.base import FULL, HIDDEN
from .layout import Piece, counted
from .ring_plan import Routes
from .traffic import Widths, heads_bytes, ring_bytes

__all__ = ["Move", "Work"]

Move = tuple[int, int, int]
"""From which rank, to which, how many bytes."""
_GRID = 64  # parts of a side of a block whose pairs are counted


@dataclass(frozen=True, eq=False)
class Work:
    """One pass over a sequence that is cut for ranks: who computes how much in which step, and what travels."""

    routes: Routes
    mask: Mask | None
    length: int
    per_pair: int
    """Floating-point operations of one pair of a row and a key, over all heads and batch items."""
    widths: Widths
    query_back: int
    """Bytes of the gradient of a row's queries, which is added up in exact arithmetic."""
    statistics: int
    """Bytes of what is kept of a row for the backward pass."""
    backward: bool
    _counted: dict[tuple[Piece, Piece], float] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.routes.count

    def pairs(self, row: Piece, key: Piece) -> float:
        """How many pairs a block has: all, or as many as a grid of it shows, a partial cell counting for half."""
        state = self.routes.seen.get((row, key), HIDDEN)
        if state in (HIDDEN, FULL) or self.mask is None:
            return 0.0 if state == HIDDEN else float(row.size * key.size)
        if (row, key) not in self._counted:
            rows, cols = _edges(row), _edges(key)
            shares = self.mask.cover(rows, cols, self.length, self.length).double() / FULL
            self._counted[row, key] = float(rows.diff().double() @ shares @ cols.diff().double())
        return self._counted[row, key]

    def step(self, rank: int, step: int) -> float:
        """Floating-point operations of a rank in one step of the ring."""
        rows, keys = self.routes.rows[rank], self.routes.wanted(rank, step)
        return self.per_pair * sum(self.pairs(row, key) for row in rows for key in keys)

    def flops(self, strategy: str) -> list[float]:
        """Floating-point operations of every rank."""
        found = [sum(self.step(rank, step) for step in range(self.ranks)) for rank in range(self.ranks)]
        return found if strategy == "ring" else [sum(found) / self.ranks] * self.ranks

    def bytes(self, strategy: str) -> list[int]:
        """Bytes that every rank sends."""
        if strategy == "ring":
            return ring_bytes(self.routes, self.widths, self.backward)
        rows, keys = counted(self.routes.rows), counted(self.routes.keys)
        return heads_bytes(rows, keys, self.widths, self.backward)

    def out(self, step: int) -> Iterator[Move]:
        """Keys and values that must be there when a step of the ring begins."""
        for to in range(self.ranks):
            for source, key in self.routes.arrivals(to, step):
                yield source, to, key.size * (self.widths.key + self.widths.value)

    def home(self, step: int) -> Iterator[Move]:
        """Gradients of keys and values that go to their owners after a step of a backward ring."""
        if self.backward and step:
            for rank in range(self.ranks):
                for key in self.routes.wanted(rank, step):
                    yield rank, key.owner, key.size * self.widths.back

    def memory(self, strategy: str) -> list[int]:
        """Bytes of every rank's tensors: inputs and results, cotangents and gradients, and what visits."""
        w, tokens = self.widths, counted(self.routes.rows)
        own = w.query + w.key + w.value + w.output + self.statistics
        if strategy == "heads":  # the own part, and the own heads of the whole sequence
            share = self.length * own // self.ranks
            return [(t * own + share) * (2 if self.backward else 1) for t in tokens]
        slopes = w.output + self.query_back + w.back if self.backward else 0
        guest = 2 * (w.key + w.value) + (3 * w.back if self.backward else 0)  # one there, one on its way
        guests = [
            max((sum(key.size for key in self.routes.wanted(rank, s)) for s in range(1, self.ranks)), default=0)
            for rank in range(self.ranks)
        ]
        return [t * (own + slopes) + most * guest for t, most in zip(tokens, guests, strict=True)]


def _edges(piece: Piece) -> torch.Tensor:
    """The edges of a grid on a piece, without cells that have nothing in them."""
    count = min(_GRID, piece.size)
    edges = [piece.start + piece.size * at // count for at in range(count + 1)]
    return torch.tensor([edges[0], *(b for a, b in pairwise(edges) if b > a)])
