"""The passes for rows with lists of keys: some lists at a time are gathered and computed as a problem of their own.

The work is that of the listed pairs. Gradients of keys that several lists share are added in the order of the lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import MaybeTensors, Needs
from ..core.folded import FoldedProblem
from ..core.gathered import (
    GATHERED_BIAS,
    GATHERED_KEY,
    GATHERED_QUERY,
    GATHERED_ROW,
    GatheredTile,
    gathered_tiles,
    lists_of,
)
from ..core.rows import Rows
from ..core.tiling import PartOfTile, TileSizes
from .jvp import LogitTangents
from .vjp import cast_sums, zero_sums

__all__ = ["Part", "gathered", "tangents", "tangents_of_vjp", "values", "vjp"]

INPUTS = (GATHERED_QUERY, GATHERED_KEY, GATHERED_KEY, GATHERED_BIAS)
ROWS = (GATHERED_QUERY, GATHERED_ROW, GATHERED_ROW, GATHERED_ROW, GATHERED_ROW)  # as in `Rows`


class Part(NamedTuple):
    """Some lists of a problem as a problem of its own."""

    at: GatheredTile
    problem: FoldedProblem

    def inputs(self, x: MaybeTensors) -> MaybeTensors:
        """The part of (query, key, value, bias, *shared), or of derivatives of these."""
        return *self._take(INPUTS, x[:4]), *x[4:]

    def rows(self, rows: MaybeTensors) -> MaybeTensors:
        """The part of the fields of `Rows`, or of derivatives of these."""
        return self._take(ROWS, rows)

    def _take(self, kinds: tuple[PartOfTile, ...], given: MaybeTensors) -> MaybeTensors:
        return tuple(None if x is None else kind.part(x, self.at) for kind, x in zip(kinds, given, strict=False))


def gathered(x: FoldedProblem, tile_sizes: TileSizes) -> Iterator[Part] | None:
    """The parts of a problem whose rows have lists of keys; None if they have none."""
    lists = lists_of(x.spec)
    if lists is None:
        return None
    dims = x.key.shape[-1] + x.value.shape[-1]
    tiles = gathered_tiles(x.spec, lists, x.query.shape, dims, tile_sizes)
    return (_part(x, at) for at in tiles)


def _part(x: FoldedProblem, at: GatheredTile) -> Part:
    query, key, value = (kind.part(t, at) for kind, t in zip(INPUTS, x[:3], strict=False))
    bias = None if x.bias is None else GATHERED_BIAS.part(x.bias, at)
    return Part(at, FoldedProblem(query, key, value, bias, x.shared, at.spec(x.spec)))


def values(x: FoldedProblem, parts: Iterator[Part], forward: Callable[[FoldedProblem], Rows]) -> Rows:
    """The rows of all parts."""
    shape = x.query.shape[:-1]
    found = Rows(x.query.new_zeros(*shape, x.value.shape[-1]), *(x.query.new_zeros(shape) for _ in range(4)))
    for part in parts:
        _put(part.at, found, forward(part.problem))
    return found


def tangents(
    x: FoldedProblem,
    parts: Iterator[Part],
    w: MaybeTensors,
    jvp: Callable[[FoldedProblem, LogitTangents], tuple[Rows, tuple[Tensor, Tensor, Tensor]]],
) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    """The rows of all parts, and the tangents of their output, lse and entropy."""
    w = _visible(x, w)
    shape = x.query.shape[:-1]
    found = Rows(x.query.new_zeros(*shape, x.value.shape[-1]), *(x.query.new_zeros(shape) for _ in range(4)))
    moved = torch.zeros_like(found.output), torch.zeros_like(found.lse), torch.zeros_like(found.lse)
    for part in parts:
        rows, own = jvp(part.problem, LogitTangents(part.problem, part.inputs(w)))
        _put(part.at, found, rows)
        _put(part.at, moved, own)
    return found, moved


def vjp(
    x: FoldedProblem,
    parts: Iterator[Part],
    needs: Needs,
    rows: Rows,
    g: MaybeTensors,
    vjp_of: Callable[[FoldedProblem, Rows, MaybeTensors], MaybeTensors],
) -> tuple[Tensor | None, ...]:
    """The cotangents of all parts, added up."""
    sums = zero_sums(x, needs)
    for part in parts:
        _add(sums, part.at, vjp_of(part.problem, _rows(part, rows), part.rows(g)))
    return cast_sums(x, sums)


def tangents_of_vjp(
    x: FoldedProblem,
    parts: Iterator[Part],
    needs: Needs,
    rows: tuple[Rows, MaybeTensors, MaybeTensors, MaybeTensors],
    w: MaybeTensors,
    double_backward: Callable[..., MaybeTensors],
) -> tuple[Tensor | None, ...]:
    """The tangents of these cotangents; `rows` are the rows and their tangents, cotangents and tangents of these."""
    w = _visible(x, w)
    sums = zero_sums(x, needs)
    found, *others = rows
    for part in parts:
        moving = LogitTangents(part.problem, part.inputs(w))
        _add(sums, part.at, double_backward(part.problem, moving, _rows(part, found), *map(part.rows, others)))
    return cast_sums(x, sums)


def _visible(x: FoldedProblem, w: MaybeTensors) -> MaybeTensors:
    """The tangents with zeros in hidden rows and keys, as `LogitTangents` takes them."""
    moving = LogitTangents(x, w)
    return moving.query, moving.key, moving.value, *w[3:]


def _rows(part: Part, rows: Rows) -> Rows:
    return Rows(*part.rows(rows))  # type: ignore[arg-type]


def _put(at: GatheredTile, whole: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> None:
    """Put results of rows into place: each row is in one part, and was zero."""
    for kind, total, own in zip(ROWS, whole, part, strict=False):
        kind.add(total, at, own)


def _add(sums: list[Tensor | None], at: GatheredTile, grads: MaybeTensors) -> None:
    """Add the gradients of a part's inputs to those of all inputs."""
    for place, (total, g) in enumerate(zip(sums, grads, strict=True)):
        if total is None or g is None:
            continue
        if place < len(INPUTS):
            INPUTS[place].add(total, at, g.to(total.dtype))
        else:
            total.add_(g)
