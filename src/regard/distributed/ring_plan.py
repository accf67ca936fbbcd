"""Which rank needs which keys, and how the ring brings them there.

At step s every rank attends to the keys of the rank s positions before it. A range of keys comes from the neighbour
that used it one step earlier, or from its owner if that neighbour did not need it. So a rank holds at most its own
ranges, those it attends to, and those in transit; and a range goes once to each rank that needs it, and to no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Mask
from ..masks.base import FULL, HIDDEN, PARTIAL
from .layout import Sharding, TokenRange

__all__ = ["Hop", "RingPlan", "plan_ring"]


class Hop(NamedTuple):
    """A range of keys and the rank it comes from, or goes to."""

    peer: int
    keys: TokenRange


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The row ranges and key ranges of every rank, and which pairs of them the mask allows."""

    rows: Sharding
    keys: Sharding
    blocks: dict[tuple[TokenRange, TokenRange], int]
    """PARTIAL or FULL for each (rows, keys); hidden blocks are left out."""

    @property
    def count(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @cached_property
    def needed(self) -> list[set[TokenRange]]:
        """The key ranges that each rank needs."""
        needed: list[set[TokenRange]] = [set() for _ in self.rows]
        for rows, keys in self.blocks:
            needed[rows.owner].add(keys)
        return needed

    def keys_at(self, rank: int, step: int) -> list[TokenRange]:
        """The key ranges that a rank attends to in a step, in the order in which their owner holds them."""
        return [keys for keys in self.keys[(rank - step) % self.count] if keys in self.needed[rank]]

    def receives(self, rank: int, step: int) -> list[Hop]:
        """What a rank receives for a step, and from which ranks."""
        previous = (rank - 1) % self.count
        return [
            Hop(previous if keys in self.needed[previous] else keys.owner, keys)
            for keys in self.keys_at(rank, step)
            if step > 0
        ]

    def sends(self, rank: int, step: int) -> list[Hop]:
        """What a rank sends for a step, and to which ranks."""
        return [Hop(to, keys) for to in range(self.count) for source, keys in self.receives(to, step) if source == rank]

    def keys_sent(self, rank: int) -> int:
        """How many keys a rank sends in one round of the ring."""
        return sum(keys.size for step in range(1, self.count) for _, keys in self.sends(rank, step))

    def gradients_sent(self, rank: int) -> int:
        """For how many keys of other ranks a rank sends gradients back to the owners."""
        return sum(keys.size for keys in self.needed[rank] if keys.owner != rank)


def plan_ring(rows: Sharding, keys: Sharding, mask: Mask | None, n: int, m: int, known: bool = True) -> RingPlan:
    """Plan the ring for a mask over all n × m pairs; a mask that is not `known` to all ranks may hide no block."""
    row_ranges, key_ranges = _in_sequence_order(rows), _in_sequence_order(keys)
    if mask is None or not known or not row_ranges or not key_ranges:
        state = FULL if mask is None and known else PARTIAL
        return RingPlan(rows, keys, {(i, j): state for i in row_ranges for j in key_ranges})
    cover = mask.cover(_edges(row_ranges), _edges(key_ranges), n, m).tolist()
    blocks = {
        (i, j): state
        for i, states in zip(row_ranges, cover, strict=True)
        for j, state in zip(key_ranges, states, strict=True)
        if state != HIDDEN
    }
    return RingPlan(rows, keys, blocks)


def _edges(ranges: Sequence[TokenRange]) -> Tensor:
    return torch.tensor([*(tokens.start for tokens in ranges), ranges[-1].stop], device="cpu")


def _in_sequence_order(sharding: Sharding) -> Sequence[TokenRange]:
    return sorted((tokens for of_rank in sharding for tokens in of_rank), key=lambda tokens: tokens.start)
