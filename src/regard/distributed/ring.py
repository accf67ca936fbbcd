"""The ring: keys and values go round, and every rank looks at those that its rows may see.

The next pieces travel while those that are there are computed with. On the way back they go round once more; what a
rank finds for the keys of another travels home to their owner, who adds it up in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import FIELDS, WITH_GRAD, MaybeTensors
from ..compat.torch import call_function, without_autocast
from ..core.rows import Rows
from ..errors import ArgumentError
from .blocks import Blocks
from .layout import Piece
from .merge import merged, nothing
from .ranks import Ranks, Travelling
from .ring_plan import Routes

__all__ = ["Home", "Ring", "Visit", "attended", "rounds"]

Wanted = tuple[bool, ...]


class Visit(NamedTuple):
    """The pieces of keys that a rank looks at in one step, and their parts of the tensors that go round."""

    step: int
    pieces: list[tuple[Piece, list[Tensor]]]


def rounds(ranks: Ranks, routes: Routes, tensors: Sequence[Tensor]) -> Iterator[Visit]:
    """Let tensors (…, keys of this rank, dim) go round; yield each step's visitors while the next are on the way."""
    rank = ranks.rank
    own = {key: [t.narrow(-2, key.here, key.size) for t in tensors] for key in routes.keys[rank]}
    here = own
    for step in range(routes.count):
        coming = _sent(ranks, routes, step + 1, own, here, tensors) if step + 1 < routes.count else None
        yield Visit(step, [(key, here[key]) for key in routes.wanted(rank, step)])
        if coming is not None:
            parts = iter(coming.arrived())
            here = {key: [next(parts) for _ in tensors] for _, key in routes.arrivals(rank, step + 1)}


def _sent(
    ranks: Ranks,
    routes: Routes,
    step: int,
    own: dict[Piece, list[Tensor]],
    here: dict[Piece, list[Tensor]],
    tensors: Sequence[Tensor],
) -> Travelling:
    sends = [(to, t) for to, key in routes.departures(ranks.rank, step) for t in (own.get(key) or here[key])]
    receives = [
        (source, (*t.shape[:-2], key.size, t.shape[-1]), t.dtype)
        for source, key in routes.arrivals(ranks.rank, step)
        for t in tensors
    ]
    return ranks.post(sends, receives, tensors[0].device)


class Home:
    """Sums (…, keys of this rank, dim) of what all ranks find for its keys, added up in the order of the steps."""

    def __init__(self, ranks: Ranks, routes: Routes, sums: Sequence[Tensor]) -> None:
        self._ranks, self._routes, self._sums = ranks, routes, sums
        self._coming: tuple[int, Travelling] | None = None

    def send(self, step: int, found: dict[Piece, list[Tensor]]) -> None:
        """Send home what was found in a step, and take in what others found for this rank one step earlier."""
        ranks, routes = self._ranks, self._routes
        self.settle()
        if step == 0:
            self._add(found)
            return
        sends = [(key.owner, t) for key in routes.wanted(ranks.rank, step) for t in found[key]]
        other = (ranks.rank + step) % routes.count
        receives = [
            (other, (*t.shape[:-2], key.size, t.shape[-1]), t.dtype)
            for key in routes.wanted(other, step)
            for t in self._sums
        ]
        self._coming = step, ranks.post(sends, receives, self._sums[0].device)

    def settle(self) -> None:
        """Wait for what is on its way, and add it."""
        if self._coming is None:
            return
        step, coming = self._coming
        self._coming = None
        parts = iter(coming.arrived())
        other = (self._ranks.rank + step) % self._routes.count
        self._add({key: [next(parts) for _ in self._sums] for key in self._routes.wanted(other, step)})

    def _add(self, found: dict[Piece, list[Tensor]]) -> None:
        for key, parts in found.items():
            for whole, part in zip(self._sums, parts, strict=True):
                whole.narrow(-2, key.here, key.size).add_(part)


@dataclass(frozen=True, eq=False)
class Ring:
    """Attention of this rank's rows over the keys of all, as passes without a graph."""

    ranks: Ranks
    routes: Routes
    blocks: Blocks

    @without_autocast
    def forward(self, x: MaybeTensors) -> Rows:
        """The forward pass."""
        mine = self.routes.rows[self.ranks.rank]
        found: dict[Piece, Rows] = {}
        for _, visitors in rounds(self.ranks, self.routes, _travellers(x)):
            for key, visitor in visitors:
                for row, state in self._pairs(key):
                    seen = self.blocks.forward(x, row, key, state, visitor)
                    found[row] = merged(found.get(row), seen, self.blocks.observed)
        return _whole(x, mine, found)

    @without_autocast
    def vjp(self, x: MaybeTensors, found: Rows, g: MaybeTensors, wanted: Wanted) -> list[Tensor | None]:
        """The cotangents of the inputs that are wanted, for cotangents g of output, lse and entropy."""
        exact = found.lse.dtype
        grads = [
            None if t is None or not want else torch.zeros(t.shape, dtype=exact, device=t.device)
            for t, want in zip(x, wanted, strict=True)
        ]
        home = Home(self.ranks, self.routes, [t for t in grads[1:3] if t is not None])
        for step, visitors in rounds(self.ranks, self.routes, _travellers(x)):
            told: dict[Piece, list[Tensor]] = {}
            for key, visitor in visitors:
                told[key] = self._pulled(x, found, g, wanted, key, visitor, grads)
            if any(wanted[1:3]):
                home.send(step, told)
        home.settle()
        return [None if d is None or t is None else d.to(t.dtype) for d, t in zip(grads, x, strict=True)]

    def _pulled(
        self,
        x: MaybeTensors,
        found: Rows,
        g: MaybeTensors,
        wanted: Wanted,
        key: Piece,
        visitor: list[Tensor],
        grads: list[Tensor | None],
    ) -> list[Tensor]:
        """Add what one piece of keys means for this rank's inputs, and give what it means for that piece."""
        told: list[Tensor] = []
        for row, state in self._pairs(key):
            rows = Rows(*(_part(t, row, at) for at, t in enumerate(found)))
            slopes = tuple(None if t is None else _part(t, row, at) for at, t in enumerate(g))
            back = self.blocks.vjp(x, rows, slopes, wanted, row, key, state, visitor)
            if grads[0] is not None and back[0] is not None:
                grads[0].narrow(-2, row.here, row.size).add_(back[0])
            if (bias := self.blocks.bias(grads[3], row, key)) is not None and back[3] is not None:
                bias.add_(back[3])
            for total, part in zip(grads[4:], back[4:], strict=True):
                if total is not None and part is not None:
                    total.add_(part)
            parts = [t.to(found.lse.dtype) for t in back[1:3] if t is not None]
            told = parts if not told else [a.add_(b) for a, b in zip(told, parts, strict=True)]
        return told

    def _pairs(self, key: Piece) -> list[tuple[Piece, int]]:
        """The pieces of this rank's rows that may see a piece of keys, and whether they see all of it."""
        seen = self.routes.seen
        return [(row, seen[row, key]) for row in self.routes.rows[self.ranks.rank] if (row, key) in seen]


def attended(ring: Ring, x: MaybeTensors) -> Rows:
    """Attend, with a graph where one is asked for."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        return Rows(*call_function(_Attend, ring, *x))
    return ring.forward(x)


class _Attend(torch.autograd.Function):
    """x -> found, with first derivatives."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, *x: Tensor | None) -> Rows:
        found = ring.forward(x)
        ctx.ring, ctx.wanted = ring, ctx.needs_input_grad[1:]  # what is wanted then is alike on all ranks
        ctx.mark_non_differentiable(*found[WITH_GRAD:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*x, *found)
        return found

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x, found = saved[:-FIELDS], Rows(*saved[-FIELDS:])
        with torch.no_grad():
            grads = ctx.ring.vjp(x, found, g[:WITH_GRAD], ctx.wanted)
        if torch.is_grad_enabled():
            grads = list(call_function(_Once, ctx.ring.ranks.who, len(grads), *grads, *x, *g))
        return None, *grads


class _Once(torch.autograd.Function):
    """Gradients as they are; but they have none of their own, and say so if one is asked for."""

    @staticmethod
    def forward(ctx: Any, who: str, count: int, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.who = who
        return tuple(None if t is None else t.view_as(t) for t in given[:count])

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        raise ArgumentError(
            f"{ctx.who}: it has first derivatives only. For second ones gather the sequence on one rank, with "
            f"regard.distributed.gather, and call regard.attention."
        )


def _travellers(x: MaybeTensors) -> list[Tensor]:
    key, value = x[1:3]
    if key is None or value is None:
        raise RuntimeError("a rank has keys and values")
    return [key, value]


def _part(t: Tensor, row: Piece, at: int) -> Tensor:
    """The rows of a piece: of the output, which comes first, or of a statistic."""
    return t.narrow(-1 if at else -2, row.here, row.size)


def _whole(x: MaybeTensors, mine: Sequence[Piece], found: dict[Piece, Rows]) -> Rows:
    """Put the rows of a rank's pieces together; those that met no key saw nothing."""
    query, value = x[0], x[2]
    if query is None or value is None:
        raise RuntimeError("a rank has queries and values")
    blank = [query.new_empty(*query.shape[:-2], row.size, value.shape[-1]) for row in mine]
    rows = [found[row] if row in found else nothing(empty) for row, empty in zip(mine, blank, strict=True)]
    if not rows:
        return nothing(query.new_empty(*query.shape[:-1], value.shape[-1]))
    return Rows(*(torch.cat(parts, -2 if at == 0 else -1) for at, parts in enumerate(zip(*rows, strict=True))))
