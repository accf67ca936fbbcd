"""The passes of `ChunkedEngine` where NaN or inf may hide: `core.nonfinite.attend_apart` for folded inputs.

Under torch.compile the score and the scale are folded in by the graph, and what is left for an operator is the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import MaybeTensors, Needs
from ..core.nonfinite import all_finite, of_rows, rows_that_see_nonfinite_keys, zero_unseen
from ..core.rows import Rows
from .engine import ChunkedEngine

__all__ = ["forward", "vjp"]


class Part(NamedTuple):
    """Rows that are computed together: either those that see a NaN or inf, or the others."""

    engine: ChunkedEngine
    x: MaybeTensors
    rows: Tensor | None = None  # bool (L, K, G, N); None for all


def forward(engine: ChunkedEngine, x: MaybeTensors) -> Rows:
    """The forward pass; a NaN or inf stays with the rows that see it."""
    found: Rows | None = None
    for part in _parts(engine, x):
        rows = part.engine.forward(part.x)
        found = (
            rows
            if found is None
            else Rows(*(_where(part.rows, new, old) for new, old in zip(rows, found, strict=True)))
        )
    if found is None:
        raise RuntimeError("a problem has at least one part")
    return found


def vjp(engine: ChunkedEngine, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs) -> Sequence[Tensor | None]:
    """The backward pass of `forward`."""
    total: list[Tensor | None] = [None] * len(needs)
    for part in _parts(engine, x):
        if part.rows is None:
            return part.engine.vjp(part.x, rows, g, needs)
        own = tuple(None if t is None else _where(part.rows, t, torch.zeros_like(t)) for t in g)
        found = part.engine.vjp(part.x, part.engine.forward(part.x), own, needs)
        total = [
            new if old is None else old if new is None else old + new for old, new in zip(total, found, strict=True)
        ]
    return total


def _parts(engine: ChunkedEngine, x: MaybeTensors) -> list[Part]:
    query, key, value, bias, *shared = x
    if query is None or key is None or value is None:
        raise RuntimeError("a problem has queries, keys and values")
    spec = engine.spec
    if (spec.mask is None and bias is None and spec.bias is None) or all_finite(query, key, value):
        return [Part(engine, x)]
    flat, groups = query.flatten(1, 2), query.shape[1:3]

    def part(engine: ChunkedEngine, rows: Tensor | None) -> Part:
        q, k, v = zero_unseen(engine.spec, flat, key, value, bias)
        return Part(engine, (q.unflatten(1, groups), k, v, bias, *shared), rows)

    rows = None if spec.inner > 1 else rows_that_see_nonfinite_keys(spec, flat, key, value, bias)
    if rows is None:
        return [part(engine, None)]
    return [
        part(replace(engine, spec=replace(spec, mask=of_rows(spec.mask, some))), some.unflatten(1, groups))
        for some in (~rows, rows)
    ]


def _where(rows: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    if rows is None:
        return new
    return torch.where(rows if new.dim() == rows.dim() else rows[..., None], new, old)
