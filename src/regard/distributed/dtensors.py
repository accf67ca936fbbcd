"""DTensor in, DTensor out: queries, keys and values that carry their own placement on a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

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
from .context import GroupContext
from .observation import GroupObservation
from .placement import QueryPlacement, read_placement

__all__ = ["DTENSORS", "DTensorContext", "DTensorObservation"]


class DTensorContext(ShardedContext):
    """Runs calls with DTensors: over the ranks that share the sequence, or on each rank alone if none do."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        placement = read_placement("attention", query, key, value)
        tensors, arguments = _to_local(query, key, value), placement.local_arguments(given)
        if placement.sequence is not None:
            output = GroupContext(placement.config(given["dropout"])).attention(*tensors, **arguments)
        else:
            output = _run_locally(placement, tensors, arguments, observed=False).rows.output
        return placement.to_dtensor(output, query.shape[-2], value.shape[-1])

    def observe(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> DTensorObservation:
        placement = read_placement("observe", query, key, value)
        tensors, arguments = _to_local(query, key, value), placement.local_arguments(given)
        observation: Observation | GroupObservation
        if placement.sequence is not None:
            observation = GroupContext(placement.config(given["dropout"])).observe(*tensors, **arguments)
        else:
            observation = Observation(*_run_locally(placement, tensors, arguments, observed=True))
        return DTensorObservation(placement, observation, query.shape[-2], key.shape[-2], value.shape[-1])

    def token_positions(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(count, device=device)  # the length of a DTensor is that of the whole sequence


DTENSORS = DTensorContext()


def _to_local(*tensors: Tensor) -> list[Tensor]:
    return [x.to_local() for x in tensors if isinstance(x, DTensor)]


class _Result(NamedTuple):
    problem: Problem
    backend: Backend
    rows: Rows


def _run_locally(
    placement: QueryPlacement, tensors: list[Tensor], arguments: dict[str, Any], observed: bool
) -> _Result:
    """Attend on this rank alone; dropout depends on positions in the whole problem."""
    backend: str | Backend = arguments.pop("backend")
    query, key, value = tensors
    p = pose(query, key, value, **arguments, observed=observed, who=placement.who)
    if not p.dropout:
        chosen = choose(p, backend)
        return _Result(p, chosen, run(p, chosen))
    choose(p, "chunked" if backend == "auto" else backend)  # raises if the backend refuses
    x = fold(p, seed=placement.draw_seed())
    engine = ChunkedEngine(replace(x.spec, origin=placement.origin), TileSizes(), p.observed)
    return _Result(p, KNOWN["chunked"], unfold(p, attend(engine, x.inputs)))


def _per_row(member: str) -> Any:
    """A member of an Observation with one number per row, (…, Hq, N), as a DTensor."""
    return property(lambda self: self._placement.to_dtensor(getattr(self._seen, member), self._rows))


class DTensorObservation:
    """The members of an Observation, as DTensors that are placed as the query is."""

    lse: Tensor = _per_row("lse")
    entropy: Tensor = _per_row("entropy")
    max_logit: Tensor = _per_row("max_logit")
    perplexity: Tensor = _per_row("perplexity")
    visible: Tensor = _per_row("visible")
    gradient_health: Tensor = _per_row("gradient_health")
    distance: Tensor = _per_row("distance")

    def __init__(
        self, placement: QueryPlacement, seen: Observation | GroupObservation, rows: int, keys: int, value_dim: int
    ) -> None:
        self._placement, self._seen = placement, seen
        self._rows, self._keys, self._value_dim = rows, keys, value_dim

    def __repr__(self) -> str:
        return f"DTensorObservation({self._seen!r} on {self._placement.mesh})"

    @property
    def output(self) -> Tensor:
        """As `attention`; differentiable, (…, Hq, N, Dv)."""
        return self._placement.to_dtensor(self._seen.output, self._rows, self._value_dim)

    @property
    def received(self) -> Tensor:
        """Σ over queries of the weight each key receives, (…, Hq, M)."""
        return self._placement.to_dtensor(self._seen.received, self._keys)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their keys, each (…, Hq, N, k)."""
        values, positions = self._seen.top(k)
        return self._placement.to_dtensor(values, self._rows, k), self._placement.to_dtensor(positions, self._rows, k)

    def map(self, height: int, width: int) -> Tensor:
        """The mean weight in each cell of a grid over N × M, (…, Hq, height, width); whole along the sequence."""
        return self._placement.to_dtensor(self._seen.map(height, width), height, width, gathered=True)
