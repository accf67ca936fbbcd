"""The three answers of a memory: the average of all, what it looked at, and the strongest rows alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..functional import attention, observe
from . import streaming as stream
from .disk_store import Mapped
from .in_memory_store import Whole
from .progress import Progress
from .reading import Asked, Reading

__all__ = ["averaged", "observed", "of_strongest", "steps"]

_QUERIES = 256  # answered together where progress is told


def averaged(source: Whole | Mapped, asked: Asked, size: int, progress: Progress) -> Tensor:
    """Average the values of all rows: (n, value_dim)."""
    if isinstance(source, Mapped):
        return stream.read(source, asked, size, False, progress).output
    keys, values, _ = source.rows
    return torch.cat([attention(q, keys, values, **asked.options) for q in _parts(asked, progress)])


def observed(source: Whole | Mapped, asked: Asked, size: int, progress: Progress) -> Reading:
    """The same, with what the weights say."""
    if isinstance(source, Mapped):
        return stream.read(source, asked, size, True, progress)
    keys, values, _ = source.rows
    seen = [observe(q, keys, values, **asked.options) for q in _parts(asked, progress)]
    parts = ([getattr(x, name) for x in seen] for name in ("output", "lse", "entropy", "max_logit"))
    output, lse, entropy, peak = (torch.cat(x) for x in parts)
    return Reading(output, lse, entropy, peak)


def of_strongest(source: Whole | Mapped, asked: Asked, k: int, size: int, progress: Progress) -> Reading:
    """Find the k strongest rows of each query, and read these: small attentions, with all that one can tell."""
    _, places = stream.strongest(source, asked, k, size, progress)
    keys, values, ids = (x.unflatten(0, places.shape) for x in source.at(places.flatten()))
    seen = observe(asked.queries[:, None], keys, values, **asked.options)
    output, lse, entropy, peak = (x[:, 0] for x in (seen.output, seen.lse, seen.entropy, seen.max_logit))
    return Reading(output, lse, entropy, peak, ids, seen.weights()[:, 0])


def steps(source: Whole | Mapped, asked: Asked, top: int | None) -> int:
    """What progress counts to: rows, or queries where each is answered at once."""
    return source.count if top is not None or isinstance(source, Mapped) else len(asked.queries)


def _parts(asked: Asked, progress: Progress) -> Iterator[Tensor]:
    """The queries, together, or some at a time where somebody wants to know how far it is."""
    for part in asked.queries.split(_QUERIES if progress.told else max(len(asked.queries), 1)):
        yield part
        progress.add(len(part))
