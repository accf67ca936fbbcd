"""The exchange of queries and results between the ranks of a group, with their gradients."""

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
from ..scores.functional_call import functional_prepare
from .query_batch import QueryBatch

__all__ = ["QueryExchange"]


@dataclass(frozen=True)
class QueryExchange:
    """How many queries and rows each rank has, and how queries are gathered and results returned."""

    ranks: Ranks
    query_counts: tuple[int, ...]  # per rank
    row_counts: tuple[int, ...]  # per rank
    requires_grad: bool  # whether some rank needs a gradient
    first_with_same: tuple[int, ...]  # per rank, the first rank with the same queries, which are computed once

    @property
    def own_counts(self) -> list[int]:
        """This rank's number of queries, once per rank."""
        return [self.query_counts[self.ranks.rank]] * self.ranks.count

    @property
    def distinct_ranks(self) -> list[int]:
        """The ranks whose queries are computed."""
        return [rank for rank, first in enumerate(self.first_with_same) if rank == first]

    def gather(self, batch: QueryBatch) -> QueryBatch:
        """Gather the distinct queries of all ranks, with parameters whose gradients are summed over the ranks."""
        if not self.requires_grad:
            return replace(batch, queries=self.select_distinct(self.gather_queries(batch.queries)))
        token = torch.empty(
            0, requires_grad=True, device="cpu"
        )  # so that the result has a graph on all ranks, or on none
        queries, *parameters = call_function(_Gather, self, token, batch.queries, *batch.parameters)
        queries, score, T = self.select_distinct(queries), batch.score, batch.temperature
        if isinstance(T, Tensor):
            *parameters, T = parameters
        return QueryBatch(queries, score if score is None else _ScoreWithParameters(score, parameters), T)

    def gather_queries(self, queries: Tensor) -> Tensor:
        """Gather the queries of all ranks."""
        return self.ranks.all_to_all(queries.repeat(self.ranks.count, 1), self.own_counts, self.query_counts)

    def select_distinct(self, x: Tensor) -> Tensor:
        """Select the rows of the distinct queries from the rows of all queries."""
        blocks = x.split(self.query_counts)
        distinct = self.distinct_ranks
        return x if len(distinct) == len(blocks) else torch.cat([blocks[rank] for rank in distinct])

    def return_results(self, x: Tensor) -> Tensor:
        """Send this rank's results for the distinct queries to the ranks that asked: (ranks, queries, …) on each."""
        distinct = self.distinct_ranks
        blocks = dict(zip(distinct, x.split([self.query_counts[rank] for rank in distinct]), strict=True))
        x = torch.cat([blocks[first] for first in self.first_with_same])
        needs_graph = self.requires_grad and x.requires_grad
        received: Tensor = call_function(_ReturnResults, self, x) if needs_graph else self.send_back(x)
        return received.reshape(self.ranks.count, self.query_counts[self.ranks.rank], *received.shape[1:])

    def send_back(self, x: Tensor) -> Tensor:
        """Send each rank the rows of its queries, and receive every rank's rows for this rank's queries."""
        return self.ranks.all_to_all(x, self.query_counts, self.own_counts)


class _Gather(torch.autograd.Function):
    """(token, queries, *parameters) -> (every rank's queries, *parameters); backward sums gradients over the ranks.

    All gradients go through one backward pass, so a rank without rows or without a loss still takes part.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: QueryExchange, token: Tensor, queries: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        views = [x.view_as(x) for x in parameters]
        ctx.mark_non_differentiable(*(x for x, given in zip(views, parameters, strict=True) if not given.requires_grad))
        return exchange.gather_queries(queries), *views

    @staticmethod
    def backward(ctx: Any, grad_queries: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange: QueryExchange = ctx.exchange
        ranks = exchange.ranks
        own = exchange.send_back(grad_queries)
        own = own.reshape(ranks.count, exchange.query_counts[ranks.rank], own.shape[-1]).sum(0)
        _, _, _, *needed = ctx.needs_input_grad
        return None, None, own, *(ranks.all_reduce(x) if need else None for x, need in zip(grads, needed, strict=True))


class _ReturnResults(torch.autograd.Function):
    """This rank's results for all queries -> all ranks' results for this rank's queries."""

    @staticmethod
    def forward(ctx: Any, exchange: QueryExchange, x: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.send_back(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: QueryExchange = ctx.exchange
        if torch.is_grad_enabled():
            raise DistributedError(
                f"{exchange.ranks.who}: over a group there are no second derivatives. Leave create_graph=True out."
            )
        return None, exchange.ranks.all_to_all(grad, exchange.own_counts, exchange.query_counts)


class _ScoreWithParameters(Score):
    """A score that uses other tensors as its parameters: those whose gradients are summed over the ranks."""

    def __init__(self, score: Score, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._score = score
        names = [name for name, _ in score.named_parameters()]
        self._tensors = dict(zip(names, parameters, strict=True))
        self.pairwise = score.pairwise  # type: ignore[misc]
        self.same_dims = score.same_dims  # type: ignore[misc]

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return functional_prepare(self._score, self._tensors, query, key)

    def pair(self, query: Tensor, key: Tensor, *shared: Tensor) -> Tensor:  # type: ignore[override]
        return self._score.pair(query, key, *shared)

    def parameters(self, recurse: bool = True) -> Any:
        """The tensors that replace the parameters, and that get the gradients."""
        return iter(self._tensors.values())

    def width(self, query_dim: int, key_dim: int) -> int:
        return self._score.width(query_dim, key_dim)

    @property
    def cost(self) -> int:
        return self._score.cost

    def misfit(self, query_dim: int, key_dim: int, heads: int) -> str | None:
        return self._score.misfit(query_dim, key_dim, heads)
