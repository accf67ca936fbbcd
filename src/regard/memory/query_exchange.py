"""How questions go round a group and answers come back, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import call_function
from ..distributed.ranks import Ranks
from ..errors import DistributedError
from ..scores import Score
from ..scores.base import Prepared
from ..scores.lending import lent_prepare
from .reading import Asked

__all__ = ["Circle"]


@dataclass(frozen=True)
class Circle:
    """Who asks how much, who holds how much, and how questions go round and answers come back."""

    ranks: Ranks
    counts: tuple[int, ...]  # queries of every rank
    rows: tuple[int, ...]  # rows of every rank
    graph: bool  # whether some rank wants a gradient
    alike: tuple[int, ...]  # the first rank that asks the same: it is answered once, where no query has a gradient

    @property
    def mine(self) -> list[int]:
        return [self.counts[self.ranks.rank]] * self.ranks.count

    @property
    def distinct(self) -> list[int]:
        return [rank for rank, first in enumerate(self.alike) if rank == first]

    def spread(self, asked: Asked) -> Asked:
        """The distinct queries of all ranks, one behind the other, and the parameters as all ranks have them."""
        if not self.graph:
            return replace(asked, queries=self.picked(self.gathered(asked.queries)))
        token = torch.empty(0, requires_grad=True)  # the answer has a graph on all ranks, or on none
        queries, *parameters = call_function(_Spread, self, token, asked.queries, *asked.parameters)
        queries, score, T = self.picked(queries), asked.score, asked.temperature
        if isinstance(T, Tensor):
            *parameters, T = parameters
        return Asked(queries, score if score is None else _Lent(score, parameters), T)

    def gathered(self, queries: Tensor) -> Tensor:
        """Every rank's queries."""
        return self.ranks.swap(queries.repeat(self.ranks.count, 1), self.mine, self.counts)

    def picked(self, x: Tensor) -> Tensor:
        """What belongs to the distinct queries, of what belongs to all."""
        blocks = x.split(self.counts)
        return x if len(self.distinct) == len(blocks) else torch.cat([blocks[rank] for rank in self.distinct])

    def returned(self, x: Tensor) -> Tensor:
        """What this rank found for the distinct queries, to who asked: (ranks, queries, …) from each rank."""
        blocks = dict(zip(self.distinct, x.split([self.counts[rank] for rank in self.distinct]), strict=True))
        x = torch.cat([blocks[first] for first in self.alike])
        came: Tensor = call_function(_Back, self, x) if self.graph and x.requires_grad else self.swapped(x)
        return came.reshape(self.ranks.count, self.counts[self.ranks.rank], *came.shape[1:])

    def swapped(self, x: Tensor) -> Tensor:
        return self.ranks.swap(x, self.counts, self.mine)


class _Spread(torch.autograd.Function):
    """(token, queries, *parameters) -> (every rank's queries, *parameters); back, gradients are added over ranks.

    All that goes back does so in one backward pass: a rank without rows or without a loss still takes its part.
    """

    @staticmethod
    def forward(ctx: Any, circle: Circle, token: Tensor, queries: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.circle = circle
        lent = [x.view_as(x) for x in parameters]
        ctx.mark_non_differentiable(*(x for x, given in zip(lent, parameters, strict=True) if not given.requires_grad))
        return circle.gathered(queries), *lent

    @staticmethod
    def backward(ctx: Any, g: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        circle: Circle = ctx.circle
        ranks = circle.ranks
        own = circle.swapped(g)
        own = own.reshape(ranks.count, circle.counts[ranks.rank], own.shape[-1]).sum(0)
        wanted = ctx.needs_input_grad[3:]
        return None, None, own, *(ranks.total(x) if want else None for x, want in zip(grads, wanted, strict=True))


class _Back(torch.autograd.Function):
    """What was found for everybody's queries -> what everybody found for this rank's."""

    @staticmethod
    def forward(ctx: Any, circle: Circle, x: Tensor) -> Tensor:
        ctx.circle = circle
        return circle.swapped(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise DistributedError(
                f"{ctx.circle.ranks.who}: over a group there are no second derivatives. Leave create_graph=True out."
            )
        return None, ctx.circle.ranks.swap(g, ctx.circle.mine, ctx.circle.counts)


class _Lent(Score):
    """A score with other tensors for its parameters: those whose gradient is added over the ranks."""

    def __init__(self, score: Score, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._score = score
        names = [name for name, _ in score.named_parameters()]
        self._lent = dict(zip(names, parameters, strict=True))
        self.pairwise = score.pairwise  # type: ignore[misc]
        self.same_dims = score.same_dims  # type: ignore[misc]

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return lent_prepare(self._score, self._lent, query, key)

    def pair(self, query: Tensor, key: Tensor, *shared: Tensor) -> Tensor:  # type: ignore[override]
        return self._score.pair(query, key, *shared)

    def parameters(self, recurse: bool = True) -> Any:
        """The tensors that stand for the parameters: it is these that a gradient goes to."""
        return iter(self._lent.values())

    def width(self, query_dim: int, key_dim: int) -> int:
        return self._score.width(query_dim, key_dim)

    @property
    def cost(self) -> int:
        return self._score.cost

    def misfit(self, query_dim: int, key_dim: int, heads: int) -> str | None:
        return self._score.misfit(query_dim, key_dim, heads)
