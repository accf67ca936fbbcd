"""Reads over a group: every rank holds rows of its own, and each query is answered as if one rank held them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from ..distributed.agreement import word
from ..distributed.ranks import Ranks, Told, digest
from ..errors import ArgumentError, DistributedError
from ..functional import observe
from ..masks import padding
from ..softmax import arithmetic_dtype
from . import readout as answers
from . import streaming as stream
from .disk_store import Mapped
from .in_memory_store import Whole
from .progress import Progress, Report
from .query_exchange import Circle
from .reading import Asked, Reading

__all__ = ["Question", "read"]

_TRIES = 5  # at finding a store on disk in one state on all ranks


@dataclass(frozen=True)
class Question:
    """What one rank asks, and the rows with which it answers the others."""

    source: Whole | Mapped
    asked: Asked
    top: int | None
    observed: bool
    size: int  # rows in memory together
    value_dim: int
    show: bool | Report | None = None  # how far the read is
    store: str = ""  # what it reads, where ranks have parts of one folder

    @property
    def graph(self) -> bool:
        """Whether the rows have a gradient."""
        return isinstance(self.source, Whole) and any(x.requires_grad for x in self.source.rows)

    def told(self) -> Told:
        """What the other ranks must know of it, and what must be the same for them."""
        asked, enabled = self.asked, torch.is_grad_enabled()
        T, own = asked.temperature, enabled and asked.queries.requires_grad
        graph = own or (enabled and (self.graph or any(x.requires_grad for x in asked.parameters)))
        sizes = len(asked.queries), self.source.count, enabled, graph, own, _number(asked.queries)
        learnt = " with a gradient" if isinstance(T, Tensor) and T.requires_grad else ""
        facts = {
            "the dtype": str(asked.queries.dtype),
            "the dim of queries": str(asked.queries.shape[-1]),
            "value_dim": str(self.value_dim),
            "the score": word(asked.score),
            "temperature": f"{float(T)!r}{learnt}",
            "top": str(self.top),
            "observe": str(self.observed),
            "the store": self.store,
        }
        return Told(tuple(int(size) for size in sizes), facts)


def read(ranks: Ranks, pose: Callable[[], Question]) -> Reading:
    """Answer this rank's queries over the rows of all ranks; every rank must call, if only with no queries.

    Each rank reads its own rows for everybody's queries, and what it finds goes to who asked: with w = exp(lse_r − lse)
    the output is Σ w·output_r, and the entropy Σ w·(entropy_r − ln w). What is the same on all ranks, the score's
    parameters and the temperature, gets the gradient of the sum of all ranks' losses.
    """
    question, circle = _agreed(ranks, pose)
    question = replace(question, asked=circle.spread(question.asked))
    if question.top is None:
        return _of_all(circle, question)
    return _of_strongest(circle, question, min(question.top, sum(circle.rows)))


def _agreed(ranks: Ranks, pose: Callable[[], Question]) -> tuple[Question, Circle]:
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        raise ArgumentError(f"{ranks.who}: over a group there is no forward mode and no transform of torch.func.")

    def told() -> tuple[Told, Question]:
        question = pose()
        return question.told(), question

    for last in range(_TRIES):
        agreed, question = ranks.agree(told, may_differ=() if last == _TRIES - 1 else ("the store",))
        if not agreed.differs:
            break
    counts, rows, enabled, graph, own, digests = zip(*agreed.sizes, strict=True)
    if any(graph) and not all(enabled):
        off = ", ".join(str(rank) for rank, on in enumerate(enabled) if not on)
        raise DistributedError(
            f"{ranks.who}: gradients are wanted on some ranks and switched off on rank {off}, which would not take "
            f"part in the backward pass. Leave torch.no_grad() there, or detach the inputs everywhere."
        )
    if not any(rows):
        raise ArgumentError(
            f"{ranks.who}: the memories of all {ranks.count} ranks are empty, so there is nothing to average."
        )
    alike = tuple(range(ranks.count)) if any(own) else tuple(digests.index(one) for one in digests)
    return question, Circle(ranks, counts, rows, any(graph), alike)


class _Found(NamedTuple):
    """What one rank's rows say to some queries, and with `top` the weights of those that were taken."""

    output: Tensor
    lse: Tensor
    entropy: Tensor
    max_logit: Tensor
    weights: Tensor

    def packed(self) -> Tensor:
        """All of it in one tensor (n, value_dim + 3 + k), in the dtype of the arithmetic."""
        facts = torch.stack((self.lse, self.entropy, self.max_logit.detach()), -1)
        return torch.cat((self.output.to(facts.dtype), facts, self.weights.to(facts.dtype)), -1)


def _of_all(circle: Circle, q: Question) -> Reading:
    queries = len(q.asked.queries)
    if not (queries and q.source.count):
        found = _nothing(q, 0)
    else:
        with Progress(q.show, queries if q.graph else q.source.count) as progress:
            seen = (
                answers.observed(q.source, q.asked, q.size, progress)
                if q.graph
                else stream.read(q.source, q.asked, q.size, q.observed, progress)
            )
        found = _Found(*seen[:4], seen.lse.new_empty(queries, 0))
    return _merged(circle.returned(found.packed()), q.value_dim, q.asked.queries.dtype)


def _of_strongest(circle: Circle, q: Question, k: int) -> Reading:
    """Every rank offers its k strongest rows; who asked takes the strongest of all, which each rank then averages."""
    offered = [min(k, rows) for rows in circle.rows]
    with torch.no_grad(), Progress(q.show, q.source.count) as progress:
        logits, places = stream.strongest(q.source, q.asked, min(k, q.source.count), q.size, progress)
        everywhere = _joined(circle.returned(_wide(logits, k)), offered)  # (n, all offers)
        order = everywhere.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        holder = torch.cat([order.new_full((count,), rank) for rank, count in enumerate(offered)])[order]  # (n, k)
        taken = torch.cat([(holder == rank).sum(-1) for rank in range(len(offered))])
        taken = circle.picked(circle.ranks.swap(taken, circle.mine, circle.counts))  # so many of this rank's offers
    found, ids = _taken(q, places[:, : int(taken.max()) if len(taken) else 0], taken, k)
    reading = _merged(circle.returned(found.packed()), q.value_dim, q.asked.queries.dtype, (offered, order))
    return reading._replace(ids=_joined(circle.returned(_wide(ids, k)), offered).gather(-1, order), ranks=holder)


def _taken(q: Question, places: Tensor, counts: Tensor, k: int) -> tuple[_Found, Tensor]:
    """Average, for each query, the first `counts` of some rows of this rank; and the ids of these rows."""
    if not places.numel():
        return _nothing(q, k), places
    keys, values, ids = (x.unflatten(0, places.shape) for x in q.source.at(places.flatten()))
    seen = observe(q.asked.queries[:, None], keys, values, mask=padding(counts), **q.asked.options)
    weights = _wide(seen.weights(), k)
    parts = (x[:, 0] for x in (seen.output, seen.lse, seen.entropy, seen.max_logit, weights))
    return _Found(*parts), ids


def _nothing(q: Question, k: int) -> _Found:
    """What a rank says that has no rows; it stays in the graph, so that it takes its part in the backward pass."""
    queries = q.asked.queries
    zero = queries[:, :0].sum(-1, dtype=arithmetic_dtype(queries.dtype))  # (n)
    output, weights = (zero[:, None].expand(-1, width) for width in (q.value_dim, k))
    return _Found(output, zero - torch.inf, zero, zero - torch.inf, weights)


def _merged(came: Tensor, width: int, dtype: torch.dtype, top: tuple[list[int], Tensor] | None = None) -> Reading:
    """One reading from those of all ranks, (ranks, n, …)."""
    output, (lse, entropy, peak), weights = (
        came[..., :width],
        came[..., width : width + 3].unbind(-1),
        came[..., width + 3 :],
    )
    whole = lse.logsumexp(0)
    log_share = lse - whole
    share = log_share.exp()  # (ranks, n)
    entropy = (share * (entropy - torch.where(lse == -torch.inf, 0.0, log_share))).sum(0)
    found = Reading((share[..., None] * output).sum(0).to(dtype), whole, entropy, peak.amax(0))
    if top is None:
        return found
    offered, order = top
    return found._replace(weights=_joined(share[..., None] * weights, offered).gather(-1, order).to(dtype))


def _joined(x: Tensor, counts: list[int]) -> Tensor:
    """The first counts[r] columns that came from each rank r, (ranks, n, k), beside one another: (n, all)."""
    return torch.cat([part[:, :count] for part, count in zip(x, counts, strict=True)], -1)


def _wide(x: Tensor, k: int) -> Tensor:
    """Columns up to k; what stands in the new ones is never looked at."""
    return pad(x, (0, k - x.shape[-1]))


def _number(x: Tensor) -> int:
    """Tell tensors apart by a number."""
    x = x.detach().cpu().contiguous()
    content = sha256(x.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
    return digest(f"{x.dtype} {tuple(x.shape)} {content}")
