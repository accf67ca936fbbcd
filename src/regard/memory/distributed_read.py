"""Reads over a group: every rank holds its own rows, and each query is answered as if one rank held them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..compat.torch import forward_mode_is_active, transforms_are_active
from ..distributed.consistency import fingerprint
from ..distributed.ranks import RankInfo, Ranks, checksum
from ..errors import ArgumentError, DistributedError
from ..functional import observe
from ..masks import padding
from ..softmax import arithmetic_dtype
from . import streaming
from .disk_store import Snapshot
from .in_memory_store import InMemorySnapshot
from .progress import Progress, Report
from .query_batch import QueryBatch
from .query_exchange import QueryExchange
from .reading import Reading
from .readout import read_observed

__all__ = ["ReadRequest", "read"]

_TRIES = 5  # to find a folder in the same state on all ranks


@dataclass(frozen=True)
class ReadRequest:
    """The queries of one rank, and the rows with which it answers the queries of all ranks."""

    snapshot: Snapshot
    batch: QueryBatch
    top: int | None
    observe: bool
    chunk_rows: int
    value_dim: int
    progress: bool | Report | None = None
    store: str = ""  # the state of the store, if the ranks read parts of one folder

    @property
    def rows_require_grad(self) -> bool:
        return isinstance(self.snapshot, InMemorySnapshot) and any(x.requires_grad for x in self.snapshot.rows)

    def describe(self) -> RankInfo:
        """What the other ranks need to know of this request, and what must be the same on all ranks."""
        batch, grad_enabled = self.batch, torch.is_grad_enabled()
        T, queries_need_grad = batch.temperature, grad_enabled and batch.queries.requires_grad
        others_need_grad = self.rows_require_grad or any(x.requires_grad for x in batch.parameters)
        needs_grad = queries_need_grad or (grad_enabled and others_need_grad)
        counts = len(batch.queries), self.snapshot.count
        sizes = *counts, grad_enabled, needs_grad, queries_need_grad, _content_hash(batch.queries)
        learnt = " with a gradient" if isinstance(T, Tensor) and T.requires_grad else ""
        facts = {
            "the dtype": str(batch.queries.dtype),
            "the dim of queries": str(batch.queries.shape[-1]),
            "value_dim": str(self.value_dim),
            "the score": fingerprint(batch.score),
            "temperature": f"{float(T)!r}{learnt}",
            "top": str(self.top),
            "observe": str(self.observe),
            "the store": self.store,
        }
        return RankInfo(tuple(int(size) for size in sizes), facts)


def read(ranks: Ranks, make_request: Callable[[], ReadRequest]) -> Reading:
    """Answer this rank's queries over the rows of all ranks; every rank must call, even without queries.

    Each rank reads its own rows for the queries of all ranks, and sends its results to the ranks that asked. With
    w = exp(lse_r − lse) the output is Σ w·output_r, and the entropy Σ w·(entropy_r − ln w). The score's parameters and
    the temperature are the same on all ranks, and get the gradient of the sum of all ranks' losses.
    """
    request, exchange = _agree(ranks, make_request)
    request = replace(request, batch=exchange.gather(request.batch))
    if request.top is None:
        return _read_all(exchange, request)
    return _read_top_k(exchange, request, min(request.top, sum(exchange.row_counts)))


def _agree(ranks: Ranks, make_request: Callable[[], ReadRequest]) -> tuple[ReadRequest, QueryExchange]:
    """Compare the requests of all ranks, and set up the exchange."""
    if forward_mode_is_active() or transforms_are_active():
        raise ArgumentError(f"{ranks.who}: over a group there is no forward mode and no transform of torch.func.")

    def describe() -> tuple[RankInfo, ReadRequest]:
        request = make_request()
        return request.describe(), request

    for attempt in range(_TRIES):
        agreed, request = ranks.agree(describe, may_differ=() if attempt == _TRIES - 1 else ("the store",))
        if not agreed.differs:
            break
    query_counts, row_counts, grad_enabled, needs_grad, queries_need_grad, hashes = zip(*agreed.sizes, strict=True)
    if any(needs_grad) and not all(grad_enabled):
        off = ", ".join(str(rank) for rank, on in enumerate(grad_enabled) if not on)
        raise DistributedError(
            f"{ranks.who}: some ranks need gradients, and they are switched off on rank {off}, which would not take "
            f"part in the backward pass. Leave torch.no_grad() there, or detach the inputs on all ranks."
        )
    if not any(row_counts):
        raise ArgumentError(
            f"{ranks.who}: the memories of all {ranks.count} ranks are empty, so there is nothing to average."
        )
    first = tuple(range(ranks.count)) if any(queries_need_grad) else tuple(hashes.index(one) for one in hashes)
    return request, QueryExchange(ranks, query_counts, row_counts, any(needs_grad), first)


class _RankResult(NamedTuple):
    """The result of reading one rank's rows, and with `top` the weights of the rows that were chosen."""

    output: Tensor
    lse: Tensor
    entropy: Tensor
    max_logit: Tensor
    weights: Tensor

    def packed(self) -> Tensor:
        """Everything in one tensor (n, value_dim + 3 + k), in the dtype of the arithmetic."""
        statistics = torch.stack((self.lse, self.entropy, self.max_logit.detach()), -1)
        return torch.cat((self.output.to(statistics.dtype), statistics, self.weights.to(statistics.dtype)), -1)

    @classmethod
    def unpack(cls, x: Tensor, value_dim: int) -> _RankResult:
        """The inverse of `packed`."""
        lse, entropy, max_logit = x[..., value_dim : value_dim + 3].unbind(-1)
        return cls(x[..., :value_dim], lse, entropy, max_logit, x[..., value_dim + 3 :])


def _read_all(exchange: QueryExchange, request: ReadRequest) -> Reading:
    queries, rows = len(request.batch.queries), request.snapshot.count
    if not (queries and rows):
        result = _empty_result(request, 0)
    else:
        in_graph = request.rows_require_grad
        with Progress(request.progress, queries if in_graph else rows) as progress:
            reading = (
                read_observed(request.snapshot, request.batch, request.chunk_rows, progress)
                if in_graph
                else streaming.read(request.snapshot, request.batch, request.chunk_rows, request.observe, progress)
            )
        no_weights = reading.lse.new_empty(queries, 0)
        result = _RankResult(reading.output, reading.lse, reading.entropy, reading.max_logit, no_weights)
    received = _RankResult.unpack(exchange.return_results(result.packed()), request.value_dim)
    reading, _ = _merge(received, request.batch.queries.dtype)
    return reading


def _read_top_k(exchange: QueryExchange, request: ReadRequest, k: int) -> Reading:
    """Merge the top k of every rank into the top k of all, then let each rank average those of its rows."""
    offered = [min(k, rows) for rows in exchange.row_counts]
    snapshot, batch = request.snapshot, request.batch
    with torch.no_grad(), Progress(request.progress, snapshot.count) as progress:
        own = streaming.top_k(snapshot, batch, min(k, snapshot.count), request.chunk_rows, progress)
        candidates = _concatenate_ranks(exchange.return_results(_pad_columns(own.logits, k)), offered)  # (n, all)
        order = candidates.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        holder = torch.cat([order.new_full((count,), rank) for rank, count in enumerate(offered)])[order]  # (n, k)
        chosen = torch.cat([(holder == rank).sum(-1) for rank in range(len(offered))])
        chosen = exchange.ranks.all_to_all(chosen, exchange.own_counts, exchange.query_counts)
        chosen = exchange.select_distinct(chosen)  # how many of this rank's candidates, per query
    result, ids = _read_first(request, own.positions[:, : int(chosen.max()) if len(chosen) else 0], chosen, k)
    received = _RankResult.unpack(exchange.return_results(result.packed()), request.value_dim)
    reading, share = _merge(received, batch.queries.dtype)
    weights = _concatenate_ranks(share[..., None] * received.weights, offered).gather(-1, order)
    ids = _concatenate_ranks(exchange.return_results(_pad_columns(ids, k)), offered).gather(-1, order)
    return reading._replace(ids=ids, weights=weights.to(batch.queries.dtype), ranks=holder)


def _read_first(request: ReadRequest, positions: Tensor, counts: Tensor, k: int) -> tuple[_RankResult, Tensor]:
    """Average, for each query, the first `counts` of the rows at `positions`; also return the ids of these rows."""
    if not positions.numel():
        return _empty_result(request, k), positions
    batch = request.batch
    keys, values, ids = (x.unflatten(0, positions.shape) for x in request.snapshot.take(positions.flatten()))
    seen = observe(batch.queries[:, None], keys, values, mask=padding(counts), **batch.options)
    weights = _pad_columns(seen.weights(), k)
    parts = (x[:, 0] for x in (seen.output, seen.lse, seen.entropy, seen.max_logit, weights))
    return _RankResult(*parts), ids


def _empty_result(request: ReadRequest, k: int) -> _RankResult:
    """The result of a rank without rows; it stays in the graph, so that the rank takes part in the backward pass."""
    queries = request.batch.queries
    zero = queries[:, :0].sum(-1, dtype=arithmetic_dtype(queries.dtype))  # (n)
    output, weights = (zero[:, None].expand(-1, width) for width in (request.value_dim, k))
    return _RankResult(output, zero - torch.inf, zero, zero - torch.inf, weights)


def _merge(received: _RankResult, dtype: torch.dtype) -> tuple[Reading, Tensor]:
    """Merge the results of all ranks, (ranks, n, …), into one reading; also return each rank's share, (ranks, n)."""
    lse = received.lse.logsumexp(0)
    log_share = received.lse - lse
    share = log_share.exp()  # (ranks, n)
    entropy = received.entropy - torch.where(received.lse == -torch.inf, 0.0, log_share)
    output = (share[..., None] * received.output).sum(0).to(dtype)
    return Reading(output, lse, (share * entropy).sum(0), received.max_logit.amax(0)), share


def _concatenate_ranks(x: Tensor, counts: list[int]) -> Tensor:
    """Concatenate the first counts[r] columns from each rank r, (ranks, n, k), to (n, sum of counts)."""
    return torch.cat([part[:, :count] for part, count in zip(x, counts, strict=True)], -1)


def _pad_columns(x: Tensor, k: int) -> Tensor:
    """Pad to k columns; the new ones are never read."""
    return pad(x, (0, k - x.shape[-1]))


def _content_hash(x: Tensor) -> int:
    """Hash the dtype, the shape and the contents of a tensor."""
    x = x.detach().cpu().contiguous()
    content = sha256(x.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
    return checksum(f"{x.dtype} {tuple(x.shape)} {content}")
