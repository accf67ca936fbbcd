"""The three kinds of reads: the output alone, the output with statistics, and the top-k rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..functional import attention, observe
from . import streaming
from .disk_store import DiskSnapshot, Snapshot
from .progress import Progress
from .query_batch import QueryBatch
from .reading import Reading

__all__ = ["progress_total", "read_observed", "read_output", "read_top_k"]

_QUERIES_AT_ONCE = 256  # if progress is requested


def read_output(snapshot: Snapshot, batch: QueryBatch, chunk_rows: int, progress: Progress) -> Tensor:
    """Average the values of all rows: (n, value_dim)."""
    if isinstance(snapshot, DiskSnapshot):
        return streaming.read(snapshot, batch, chunk_rows, False, progress).output
    keys, values, _ = snapshot.rows
    return torch.cat([attention(q, keys, values, **batch.options) for q in _query_chunks(batch, progress)])


def read_observed(snapshot: Snapshot, batch: QueryBatch, chunk_rows: int, progress: Progress) -> Reading:
    """Average the values of all rows, and return the statistics of the weights too."""
    if isinstance(snapshot, DiskSnapshot):
        return streaming.read(snapshot, batch, chunk_rows, True, progress)
    keys, values, _ = snapshot.rows
    seen = [observe(q, keys, values, **batch.options) for q in _query_chunks(batch, progress)]
    fields = ([getattr(x, name) for x in seen] for name in ("output", "lse", "entropy", "max_logit"))
    output, lse, entropy, max_logit = (torch.cat(x) for x in fields)
    return Reading(output, lse, entropy, max_logit)


def read_top_k(snapshot: Snapshot, batch: QueryBatch, k: int, chunk_rows: int, progress: Progress) -> Reading:
    """Find the k rows with the largest logits for each query, and attend to these alone."""
    positions = streaming.top_k(snapshot, batch, k, chunk_rows, progress).positions
    keys, values, ids = (x.unflatten(0, positions.shape) for x in snapshot.take(positions.flatten()))
    seen = observe(batch.queries[:, None], keys, values, **batch.options)
    output, lse, entropy, max_logit = (x[:, 0] for x in (seen.output, seen.lse, seen.entropy, seen.max_logit))
    return Reading(output, lse, entropy, max_logit, ids, seen.weights()[:, 0])


def progress_total(snapshot: Snapshot, batch: QueryBatch, top: int | None) -> int:
    """What progress counts up to: rows if they are read in chunks, otherwise queries."""
    return snapshot.count if top is not None or isinstance(snapshot, DiskSnapshot) else len(batch.queries)


def _query_chunks(batch: QueryBatch, progress: Progress) -> Iterator[Tensor]:
    """Yield all queries at once, or a few at a time if progress is requested."""
    for queries in batch.queries.split(_QUERIES_AT_ONCE if progress.requested else max(len(batch.queries), 1)):
        yield queries
        progress.advance(len(queries))
