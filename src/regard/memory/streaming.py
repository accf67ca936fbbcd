"""Reads that hold one chunk of rows at a time: online softmax, its gradient, and top-k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..chunked.statistics import strongest
from ..compat.torch import call_function, without_autocast
from ..softmax import arithmetic_dtype, lowest
from .disk_store import Snapshot
from .progress import Progress
from .query_batch import QueryBatch
from .reading import Reading

__all__ = ["TopK", "chunk_rows_for", "read", "top_k"]

_CHUNK_BYTES = 8 << 20  # of keys and values that are mapped together
_TILE_PAIRS = 1 << 20  # logits that are held at once
_MIN_TILE_KEYS = 2048  # narrower tiles make slow matrix products


@dataclass(frozen=True)
class _StreamedRead:
    """Everything that a read needs, so that its backward can read the rows again."""

    snapshot: Snapshot
    batch: QueryBatch
    chunk_rows: int
    with_entropy: bool = True
    progress: Progress | None = None


class TopK(NamedTuple):
    """The rows with the largest logits for each query, largest first."""

    logits: Tensor  # (n, k)
    positions: Tensor  # (n, k)


class _Tile(NamedTuple):
    """Some queries and some keys with their values, in the dtype of the arithmetic."""

    rows: slice  # of the queries
    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor  # of the keys


class _Accumulators(NamedTuple):
    """The running sums of the online softmax, one row per query."""

    numerator: Tensor
    row_sum: Tensor
    weighted_logits: Tensor  # Σ exp(s − row_max)·(s − row_max)
    row_max: Tensor


def chunk_rows_for(row_bytes: int) -> int:
    """Choose how many rows are mapped together."""
    return max(_CHUNK_BYTES // row_bytes, 1)


def read(snapshot: Snapshot, batch: QueryBatch, chunk_rows: int, with_entropy: bool, progress: Progress) -> Reading:
    """Average all values with softmax weights, in memory that does not depend on the number of rows."""
    call = _StreamedRead(snapshot, batch, chunk_rows, with_entropy, progress)
    output, lse, entropy, max_logit, _ = call_function(_Read, call, batch.queries, *batch.parameters)
    return Reading(output, lse, entropy, max_logit)


@without_autocast
def top_k(snapshot: Snapshot, batch: QueryBatch, k: int, chunk_rows: int, progress: Progress) -> TopK:
    """Find the k largest logits of each query and the positions of their rows; ties go to the row written first."""
    call = _StreamedRead(snapshot, batch, chunk_rows, progress=progress)
    n = len(batch.queries)
    dtype = arithmetic_dtype(batch.queries.dtype)
    best = torch.full((n, k), -torch.inf, dtype=dtype, device=batch.queries.device)
    best_positions = torch.full((n, k), -1, dtype=torch.int64, device=batch.queries.device)
    with torch.no_grad():
        for rows, queries, keys, _, positions in _tiles(call):
            S = batch.logits(queries, keys)  # (r, c)
            improved = (S.amax(-1) > best[rows, -1]).nonzero().squeeze(-1)  # the other rows keep what they have
            if not len(improved):
                continue
            S = S if len(improved) == len(S) else S[improved]
            found, index = strongest(S, min(k, S.shape[-1]))
            improved = improved + rows.start
            found = torch.cat((best[improved], found), -1)
            index = torch.cat((best_positions[improved], positions[index]), -1)
            order = found.sort(dim=-1, descending=True, stable=True).indices[:, :k]
            best[improved], best_positions[improved] = found.gather(-1, order), index.gather(-1, order)
    return TopK(best, best_positions)


class _Read(torch.autograd.Function):
    """(queries, *parameters) -> (output, lse, entropy, max logit, log of the row sum)."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, call: _StreamedRead, queries: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        O, l, e, m = _online_softmax(call)  # noqa: E741
        log_row_sum = l.log()
        found = (O / l[:, None]).to(queries.dtype), m + log_row_sum, log_row_sum - e / l, m, log_row_sum
        ctx.call = replace(call, progress=None)
        ctx.save_for_backward(queries, *parameters, *found)
        ctx.mark_non_differentiable(*found[3:])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Read again: dS = P ∘ (dP − δ + g_lse − g_H·(S − E[S])), passed from each tile to queries and parameters."""
        queries, *_, output, _, entropy, m, log_row_sum = ctx.saved_tensors
        parameters = ctx.call.batch.parameters
        dO, g_lse, g_H, *_ = cotangents
        dtype = m.dtype
        dO = None if dO is None else dO.to(dtype)
        delta = torch.zeros_like(m) if g_lse is None else g_lse
        delta = delta if dO is None else delta - (dO * output).sum(-1)  # (n)
        leaves = [p for p in parameters if p.requires_grad]
        dQ, d_leaves = torch.zeros_like(queries, dtype=dtype), [torch.zeros_like(p) for p in leaves]
        for rows, q, keys, values, _ in _tiles(ctx.call):
            with torch.enable_grad():
                q = q.detach().requires_grad_()
                S = ctx.call.batch.logits(q, keys)  # (r, c)
            X = S.detach() - m[rows, None]
            P = (X - log_row_sum[rows, None]).exp_()
            dS = delta[rows, None] + (0.0 if dO is None else dO[rows] @ values.mT)
            if g_H is not None:
                mean = (log_row_sum - entropy)[rows, None]  # E[S] minus the largest logit
                dS = dS - g_H[rows, None] * (X - mean)
            parts = torch.autograd.grad(S, [q, *leaves], dS * P, allow_unused=True)
            for whole, part in zip((dQ[rows], *d_leaves), parts, strict=True):
                if part is not None:
                    whole.add_(part)
        grads = iter(d_leaves)
        return None, dQ.to(queries.dtype), *(next(grads) if p.requires_grad else None for p in parameters)


def _online_softmax(call: _StreamedRead) -> _Accumulators:
    """Accumulate numerator, denominator and entropy term over all tiles."""
    queries = call.batch.queries
    dtype = arithmetic_dtype(queries.dtype)
    l = torch.zeros(len(queries), dtype=dtype, device=queries.device)  # noqa: E741
    e, m = torch.zeros_like(l), torch.full_like(l, lowest(dtype))
    O: Tensor | None = None  # noqa: E741
    for rows, q, keys, values, _ in _tiles(call):
        if O is None:
            O = values.new_zeros(len(queries), values.shape[-1])  # noqa: E741
        S = call.batch.logits(q, keys)  # (r, c)
        m_new = torch.maximum(m[rows], S.amax(-1))
        shift = (m[rows] - m_new).clamp_(min=-1e4)  # finite, and low enough that exp gives 0
        a = shift.exp()
        X = S.sub_(m_new[:, None])
        P = X.exp() if call.with_entropy else X.exp_()
        if call.with_entropy:
            e[rows] = a * (e[rows] + shift * l[rows]) + torch.linalg.vecdot(X, P)
        l[rows].mul_(a).add_(P.sum(-1))
        O[rows].mul_(a[:, None]).addmm_(P, values)
        m[rows] = m_new
    if O is None:
        raise RuntimeError("a memory without rows has nothing to average")
    return _Accumulators(O, l, e, m)


def _tiles(call: _StreamedRead) -> Iterator[_Tile]:
    """Yield every tile of queries and keys, chunk by chunk."""
    queries = call.batch.queries.detach()
    queries = queries.to(arithmetic_dtype(queries.dtype))
    pairs = max(_TILE_PAIRS // call.batch.cost, 1)
    height = max(min(pairs // _MIN_TILE_KEYS, len(queries)), 1)
    width = max(pairs // height, 1)
    for chunk, positions in call.snapshot.chunks(call.chunk_rows):
        for start in range(0, len(positions), width):
            part = slice(start, start + width)
            keys, values = (x[part].detach().to(queries.dtype) for x in (chunk.keys, chunk.values))
            for first in range(0, len(queries), height):
                rows = slice(first, min(first + height, len(queries)))
                yield _Tile(rows, queries[rows], keys, values, positions[part])
        if call.progress is not None:
            call.progress.advance(len(positions))
