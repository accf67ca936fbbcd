"""Which rank needs which keys, and how they get there.

At step s every rank looks at the keys of the rank s places before it. A piece of keys comes from the neighbour that
looked at it one step earlier, or from its owner if that neighbour had no use for it. So a rank holds at most its own
pieces, those it looks at, and those that are on their way; and a piece goes once to each rank that needs it, to no
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..masks import Mask
from ..masks.base import FULL, HIDDEN, PARTIAL
from .layout import Held, Piece

__all__ = ["Routes", "routes"]


@dataclass(frozen=True, eq=False)
class Routes:
    """The pieces of rows and of keys of every rank, and which pairs of them may see each other."""

    rows: Held
    keys: Held
    seen: dict[tuple[Piece, Piece], int]  # PARTIAL or FULL; what is hidden is not in it

    @property
    def count(self) -> int:
        return len(self.rows)

    @cached_property
    def needed(self) -> list[set[Piece]]:
        """The pieces of keys that each rank needs."""
        found: list[set[Piece]] = [set() for _ in self.rows]
        for row, key in self.seen:
            found[row.owner].add(key)
        return found

    def wanted(self, rank: int, step: int) -> list[Piece]:
        """What a rank looks at in a step, in the order in which its owner holds it."""
        return [key for key in self.keys[(rank - step) % self.count] if key in self.needed[rank]]

    def arrivals(self, rank: int, step: int) -> list[tuple[int, Piece]]:
        """What must have come to a rank when a step begins, and from whom."""
        before = (rank - 1) % self.count
        return [
            (before if key in self.needed[before] else key.owner, key) for key in self.wanted(rank, step) if step > 0
        ]

    def departures(self, rank: int, step: int) -> list[tuple[int, Piece]]:
        """What a rank sends so that it is there when a step begins, and to whom."""
        return [(to, key) for to in range(self.count) for source, key in self.arrivals(to, step) if source == rank]

    def outward(self, rank: int) -> int:
        """How many keys a rank sends to others in one round."""
        return sum(key.size for step in range(1, self.count) for _, key in self.departures(rank, step))

    def homeward(self, rank: int) -> int:
        """For how many keys of others a rank has something to tell their owners after it has looked at them."""
        return sum(key.size for key in self.needed[rank] if key.owner != rank)


def routes(rows: Held, keys: Held, mask: Mask | None, n: int, m: int, known: bool = True) -> Routes:
    """Find out who needs what from a mask over all n × m pairs; one that is not `known` to all may hide nothing."""
    row_pieces, key_pieces = _ordered(rows), _ordered(keys)
    if mask is None or not known or not row_pieces or not key_pieces:
        state = FULL if mask is None and known else PARTIAL
        return Routes(rows, keys, {(row, key): state for row in row_pieces for key in key_pieces})
    cover = mask.cover(_edges(row_pieces), _edges(key_pieces), n, m).tolist()
    return Routes(
        rows,
        keys,
        {
            (row, key): state
            for row, line in zip(row_pieces, cover, strict=True)
            for key, state in zip(key_pieces, line, strict=True)
            if state != HIDDEN
        },
    )


def _edges(ordered: Sequence[Piece]) -> Tensor:
    return torch.tensor([*(piece.start for piece in ordered), ordered[-1].stop])


def _ordered(held: Held) -> Sequence[Piece]:
    """All pieces, in the order of the sequence."""
    return sorted((piece for some in held for piece in some), key=lambda piece: piece.start)
