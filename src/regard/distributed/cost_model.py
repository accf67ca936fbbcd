"""What one pass of attention costs each rank: pairs, floating-point operations, bytes sent and bytes held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from ..masks import Mask
from ..masks.base import FULL, HIDDEN
from .layout import TokenRange, tokens_per_rank
from .ring_plan import RingPlan
from .traffic import TokenBytes, heads_bytes, ring_bytes

__all__ = ["CostModel", "Message"]

_GRID = 64  # cells per side of a block whose pairs are estimated


class Message(NamedTuple):
    """Bytes from one rank to another."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, eq=False)
class CostModel:
    """One pass over a sharded sequence: how much each rank computes in each step, and what it sends."""

    plan: RingPlan
    mask: Mask | None
    length: int
    flops_per_pair: int
    """Over all heads and batch items."""
    per_token: TokenBytes
    query_gradient: int
    """Bytes of the gradient of a row's queries, which is summed in exact arithmetic."""
    statistics: int
    """Bytes of a row's statistics, which are kept for the backward pass."""
    backward: bool
    _pairs: dict[tuple[TokenRange, TokenRange], float] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.plan.count

    def pairs(self, rows: TokenRange, keys: TokenRange) -> float:
        """How many pairs a block has; if it is partial, estimated on a grid in which a partial cell counts half."""
        state = self.plan.blocks.get((rows, keys), HIDDEN)
        if state in (HIDDEN, FULL) or self.mask is None:
            return 0.0 if state == HIDDEN else float(rows.size * keys.size)
        if (rows, keys) not in self._pairs:
            row_edges, key_edges = _grid_edges(rows), _grid_edges(keys)
            shares = self.mask.cover(row_edges, key_edges, self.length, self.length).double() / FULL
            self._pairs[rows, keys] = float(row_edges.diff().double() @ shares @ key_edges.diff().double())
        return self._pairs[rows, keys]

    def step_flops(self, rank: int, step: int) -> float:
        """Floating-point operations of a rank in one step of the ring."""
        ranges, key_ranges = self.plan.rows[rank], self.plan.keys_at(rank, step)
        return self.flops_per_pair * sum(self.pairs(rows, keys) for rows in ranges for keys in key_ranges)

    def flops(self, strategy: str) -> list[float]:
        """Floating-point operations of every rank."""
        found = [sum(self.step_flops(rank, step) for step in range(self.ranks)) for rank in range(self.ranks)]
        return found if strategy == "ring" else [sum(found) / self.ranks] * self.ranks

    def bytes(self, strategy: str) -> list[int]:
        """Bytes that every rank sends."""
        if strategy == "ring":
            return ring_bytes(self.plan, self.per_token, self.backward)
        rows, keys = tokens_per_rank(self.plan.rows), tokens_per_rank(self.plan.keys)
        return heads_bytes(rows, keys, self.per_token, self.backward)

    def key_messages(self, step: int) -> Iterator[Message]:
        """Keys and values that must arrive before a step of the ring begins."""
        for target in range(self.ranks):
            for source, keys in self.plan.receives(target, step):
                yield Message(source, target, keys.size * (self.per_token.key + self.per_token.value))

    def gradient_messages(self, step: int) -> Iterator[Message]:
        """Gradients of keys and values that go to their owners after a step of a backward ring."""
        if self.backward and step:
            for rank in range(self.ranks):
                for keys in self.plan.keys_at(rank, step):
                    yield Message(rank, keys.owner, keys.size * self.per_token.kv_gradients)

    def memory(self, strategy: str) -> list[int]:
        """Bytes of every rank's tensors: inputs and results, cotangents and gradients, and other ranks' keys."""
        w, tokens = self.per_token, tokens_per_rank(self.plan.rows)
        own = w.query + w.key + w.value + w.output + self.statistics
        if strategy == "heads":  # this rank's tokens, and its heads of the whole sequence
            share = self.length * own // self.ranks
            return [(t * own + share) * (2 if self.backward else 1) for t in tokens]
        gradients = w.output + self.query_gradient + w.kv_gradients if self.backward else 0
        # One range of another rank's keys is in use, and one in transit.
        per_visitor = 2 * (w.key + w.value) + (3 * w.kv_gradients if self.backward else 0)
        visitors = [
            max((sum(keys.size for keys in self.plan.keys_at(rank, s)) for s in range(1, self.ranks)), default=0)
            for rank in range(self.ranks)
        ]
        return [t * (own + gradients) + most * per_visitor for t, most in zip(tokens, visitors, strict=True)]


def _grid_edges(tokens: TokenRange) -> torch.Tensor:
    """The edges of a grid on a range, without empty cells."""
    count = min(_GRID, tokens.size)
    edges = [tokens.start + tokens.size * at // count for at in range(count + 1)]
    return torch.tensor([edges[0], *(b for a, b in pairwise(edges) if b > a)], device="cpu")
