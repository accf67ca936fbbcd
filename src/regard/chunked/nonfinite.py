"""The passes of `ChunkedEngine` where NaN or inf may hide: `core.nonfinite.attend_apart` for folded inputs.

Under torch.compile the score and the scale are folded in by the graph, and what is left for an operator is the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import MaybeTensors, Needs, required
from ..core.nonfinite import all_finite, of_rows, rows_that_see_nonfinite_keys, visible_rows_and_keys
from ..core.rows import Rows
from . import cpu_flash
from .engine import ChunkedEngine

__all__ = ["forward", "vjp"]


class Part(NamedTuple):
    """Rows that are computed together: all, or those that see a NaN or inf, or the others."""

    engine: ChunkedEngine
    x: MaybeTensors
    own: Tensor | None = None  # bool (L, K, G, N), the rows of this part; None for all
    rows: Tensor | None = None  # the rows and keys that take part, if the others were zeroed
    keys: Tensor | None = None
    small: bool = False  # whether torch's CPU kernel takes it

    def forward(self) -> Rows:
        return cpu_flash.forward(self.engine, self.x) if self.small else self.engine.forward(self.x)

    def vjp(self, rows: Rows, g: MaybeTensors, needs: Needs) -> MaybeTensors:
        if self.small:
            return tuple(cpu_flash.vjp(self.engine, self.x, rows, g))
        return self.zeroed(self.engine.vjp(self.x, rows, g, needs))

    def zeroed(self, x: Sequence[Tensor | None]) -> MaybeTensors:
        """Inputs, or their gradients, without those of rows and keys that take no part."""
        query, key, value, *others = x
        return _where(self.rows, query), _where(self.keys, key), _where(self.keys, value), *others


def forward(engine: ChunkedEngine, x: MaybeTensors) -> Rows:
    """The forward pass; a NaN or inf stays with the rows that see it."""
    first, *others = _parts(engine, x)
    found = first.forward()
    for part in others:
        rows = part.forward()
        found = Rows(*(_where(part.own, new, old) for new, old in zip(rows, found, strict=True)))
    return found


def vjp(engine: ChunkedEngine, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs) -> Sequence[Tensor | None]:
    """The backward pass of `forward`; `rows` is what it returned."""
    total: MaybeTensors = (None,) * len(needs)
    for part in _parts(engine, x):
        if part.own is None:
            return part.vjp(rows, g, needs)
        cotangents = tuple(_where(part.own, t) for t in g)
        found = part.vjp(part.forward(), cotangents, needs)
        total = tuple(b if a is None else a if b is None else a + b for a, b in zip(total, found, strict=True))
    return total


def _parts(engine: ChunkedEngine, x: MaybeTensors) -> list[Part]:
    (query, key, value), bias = map(required, x[:3]), x[3]
    spec = engine.spec
    if spec.mask is None and bias is None and spec.bias is None:
        return [Part(engine, x)]
    if all_finite(query, key, value):
        return [Part(engine, x, small=cpu_flash.takes(engine, x))]
    flat, groups = query.flatten(1, 2), query.shape[1:3]

    def part(engine: ChunkedEngine, own: Tensor | None) -> Part:
        rows, keys = visible_rows_and_keys(engine.spec, flat, key, bias)
        made = Part(engine, x, own, rows.unflatten(1, groups), keys)
        return made._replace(x=made.zeroed(x))

    apart = None if spec.inner > 1 else rows_that_see_nonfinite_keys(spec, flat, key, value, bias)
    if apart is None:
        return [part(engine, None)]
    return [
        part(replace(engine, spec=replace(spec, mask=of_rows(spec.mask, own))), own.unflatten(1, groups))
        for own in (~apart, apart)
    ]


def _where(there: Tensor | None, new: Tensor | None, old: Tensor | float = 0.0) -> Any:
    """`new` where it belongs, and `old` elsewhere; `there` is without the last dimension of some."""
    if there is None or new is None:
        return new
    return torch.where(there if new.dim() == there.dim() else there[..., None], new, old)
