"""DTensor in, DTensor out: queries, keys and values that say themselves how they are spread over a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..autograd.engine import attend
from ..backends import KNOWN, Backend
from ..backends.dispatch import choose, run
from ..chunked.engine import ChunkedEngine
from ..core.contexts import ShardedContext
from ..core.folded import fold, unfold
from ..core.problem import Problem
from ..core.rows import Rows
from ..core.tiling import TileSizes
from ..core.validation import pose
from ..observation import Observation
from .context import Over
from .observation import GroupObservation
from .placement import Where, where

__all__ = ["DTENSORS", "DTensors", "SpreadObservation"]


class DTensors(ShardedContext):
    """Calls with DTensors: over the ranks that share the sequence, or on each rank if none do."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        at = where("attention", query, key, value)
        parts = _parts(query, key, value)
        tail = query.shape[-2], value.shape[-1]
        if at.sequence is not None:
            output = Over(at.place(given["dropout"])).attention(*parts, **at.given(given))
            return at.dressed(output, *tail)
        backend, p = _posed(at, parts, given, observed=False)
        return at.dressed(_run(at, p, backend)[1].output, *tail)

    def observe(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> SpreadObservation:
        at = where("observe", query, key, value)
        parts = _parts(query, key, value)
        sizes = (query.shape[-2], key.shape[-2], value.shape[-1])
        if at.sequence is not None:
            return SpreadObservation(at, Over(at.place(given["dropout"])).observe(*parts, **at.given(given)), *sizes)
        backend, p = _posed(at, parts, given, observed=True)
        return SpreadObservation(at, Observation(p, *_run(at, p, backend)), *sizes)

    def token_positions(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device)  # a DTensor's length is that of the whole


DTENSORS = DTensors()


def _parts(*tensors: Tensor) -> list[Tensor]:
    return [x.to_local() for x in tensors if isinstance(x, DTensor)]


def _posed(at: Where, parts: list[Tensor], given: dict[str, Any], observed: bool) -> tuple[str | Backend, Problem]:
    mine = at.given(given)
    backend = mine.pop("backend")
    query, key, value = parts
    return backend, pose(query, key, value, **mine, observed=observed, who=at.who)


def _run(at: Where, p: Problem, backend: str | Backend) -> tuple[Backend, Rows]:
    """Attend on this rank alone; what dropout drops is decided by places in the whole."""
    if not p.dropout:
        chosen = choose(p, backend)
        return chosen, run(p, chosen)
    chosen = choose(p, "chunked" if backend == "auto" else backend)
    x = fold(p, seed=at.seed())
    engine = ChunkedEngine(replace(x.spec, origin=at.origin), TileSizes(), p.observed)
    return KNOWN["chunked"], unfold(p, attend(engine, (x.query, x.key, x.value, x.bias, *x.shared)))


class SpreadObservation:
    """What an Observation tells, in DTensors that are spread as the query is."""

    def __init__(self, at: Where, seen: Observation | GroupObservation, rows: int, keys: int, dim: int) -> None:
        self._at, self._seen, self._rows, self._keys, self._dim = at, seen, rows, keys, dim

    def __repr__(self) -> str:
        return f"SpreadObservation({self._seen!r} on {self._at.mesh})"

    @property
    def output(self) -> Tensor:
        """As `attention`; differentiable, (…, Hq, N, Dv)."""
        return self._at.dressed(self._seen.output, self._rows, self._dim)

    @property
    def lse(self) -> Tensor:
        """The log of the softmax denominator, (…, Hq, N)."""
        return self._row(self._seen.lse)

    @property
    def entropy(self) -> Tensor:
        """−Σ p ln p, (…, Hq, N)."""
        return self._row(self._seen.entropy)

    @property
    def max_logit(self) -> Tensor:
        """The largest visible logit, (…, Hq, N)."""
        return self._row(self._seen.max_logit)

    @property
    def perplexity(self) -> Tensor:
        """exp(entropy), (…, Hq, N)."""
        return self._row(self._seen.perplexity)

    @property
    def visible(self) -> Tensor:
        """How many keys each row may attend, (…, Hq, N)."""
        return self._row(self._seen.visible)

    @property
    def gradient_health(self) -> Tensor:
        """Σ p(1 − p), (…, Hq, N)."""
        return self._row(self._seen.gradient_health)

    @property
    def distance(self) -> Tensor:
        """How far from its own place each row looks, (…, Hq, N)."""
        return self._row(self._seen.distance)

    @property
    def received(self) -> Tensor:
        """Σ over queries of the weight each key receives, (…, Hq, M)."""
        return self._at.dressed(self._seen.received, self._keys)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their keys, each (…, Hq, N, k)."""
        values, places = self._seen.top(k)
        return self._at.dressed(values, self._rows, k), self._at.dressed(places, self._rows, k)

    def map(self, height: int, width: int) -> Tensor:
        """The mean weight in each cell of a grid over N × M, (…, Hq, height, width); whole along the sequence."""
        return self._at.dressed(self._seen.map(height, width), height, width, gathered=True)

    def _row(self, x: Tensor) -> Tensor:
        return self._at.dressed(x, self._rows)
