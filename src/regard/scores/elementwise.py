"""A traced function on tensors that broadcast, with derivatives of every order; hidden pairs leave no trace in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.compat.torch import cached_signature, call_function, outside_transforms
from regard.scores.expression import FLOAT, SCORE, look_up
from regard.scores.tracing import Bound, Traced

__all__ = ["Pairs", "apply", "evaluate"]


class Pairs(NamedTuple):
    """The indices of pairs: int64 tensors that broadcast to the scores."""

    batch: Tensor
    head: Tensor
    row: Tensor
    key: Tensor


def evaluate(f: Bound, pairs: Pairs, tables: Sequence[Tensor], score: Tensor) -> Tensor:
    """The new scores, without a graph: a contiguous tensor of its own memory."""
    traced = f.traced
    loads = _loads(traced, pairs, f.tables(tables))
    (found,) = traced.expression.evaluate([traced.value], {SCORE: score, **pairs._asdict()}, loads)
    return _owned(found, score)


def apply(f: Bound, pairs: Pairs, tables: Sequence[Tensor], score: Tensor, hide: Tensor | None) -> Tensor:
    """The new scores, 0 where hidden, as a differentiable function of scores and tables."""
    traced = f.traced
    loads = _loads(traced, pairs, f.tables(tables))
    nodes = traced.expression.nodes
    places = tuple(place for place in loads if nodes[place].kind == FLOAT)
    fixed = {place: x for place, x in loads.items() if nodes[place].kind != FLOAT}
    around = _Around(traced, pairs, places, fixed, hide)
    found: Tensor = call_function(Elementwise, around, traced.value, score, *(loads[place] for place in places))
    return found


def _loads(traced: Traced, pairs: Pairs, tables: Sequence[Tensor]) -> dict[int, Tensor]:
    """What each load of the result reads, by its place."""
    e, found = traced.expression, dict[int, Tensor]()
    leaves = {**pairs._asdict(), SCORE: pairs.row}  # no index depends on the score
    with outside_transforms():  # nor on anything that is transformed
        for place in e.loads(traced.value):
            node = e.nodes[place]
            if node.kind != FLOAT:
                found[place] = look_up(tables[node.value], e.evaluate(node.args, leaves, found))
        floating = [place for place in e.loads(traced.value) if e.nodes[place].kind == FLOAT]
        indices = [e.evaluate(e.nodes[place].args, leaves, found) for place in floating]
    for place, at in zip(floating, indices, strict=True):
        found[place] = look_up(tables[e.nodes[place].value], at)
    return found


def _owned(x: Any, score: Tensor) -> Tensor:
    made = x if isinstance(x, Tensor) else torch.full_like(score, x)
    fits = made.shape == score.shape and made.is_contiguous() and made is not score
    return made if fits else made.expand(score.shape).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class _Around:
    """What a value depends on besides the tensors that have derivatives."""

    traced: Traced
    pairs: Pairs
    places: tuple[int, ...]  # of the loads among the tensors
    fixed: dict[int, Tensor]  # loads of whole numbers
    hide: Tensor | None

    def value(self, place: int, score: Tensor, loads: Sequence[Tensor]) -> Tensor:
        given = {**self.fixed, **dict(zip(self.places, loads, strict=True))}
        (found,) = self.traced.expression.evaluate([place], {SCORE: score, **self.pairs._asdict()}, given)
        found = _owned(found, score)
        return found if self.hide is None else torch.where(self.hide, 0.0, found)

    def partials(self, place: int) -> list[int]:
        """The derivatives of a node by the score and by the loads."""
        e = self.traced.expression
        return [e.derivative(place, by) for by in (e.score, *self.places)]


@cached_signature
class Elementwise(torch.autograd.Function):
    """A node of an expression as a function of the score and of loads; each partial derivative is another node."""

    @staticmethod
    def forward(around: _Around, place: int, score: Tensor, *loads: Tensor) -> Tensor:
        return around.value(place, score, loads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.around, ctx.place = inputs[:2]
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        found: list[Tensor | None] = [None, None]
        for x, need, partial in zip(given, ctx.needs_input_grad[2:], ctx.around.partials(ctx.place), strict=True):
            slope = _slope(ctx.around, partial, given) if need else None
            found.append(None if slope is None else (g * slope).sum_to_size(x.shape))
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        given = ctx.saved_tensors
        total = torch.zeros_like(given[0])
        for t, partial in zip(tangents[2:], ctx.around.partials(ctx.place), strict=True):
            slope = None if t is None else _slope(ctx.around, partial, given)
            total = total if t is None or slope is None else total + slope * t
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], around: _Around, place: int, *given: Tensor) -> tuple[Tensor, int]:
        rank = max(x.dim() - (d is not None) for x, d in zip(given, in_dims[2:], strict=True))
        wide = []
        for x, d in zip(given, in_dims[2:], strict=True):
            x = x.unsqueeze(0) if d is None else x.movedim(d, 0)
            wide.append(x.reshape(x.shape[0], *(1,) * (rank + 1 - x.dim()), *x.shape[1:]))
        wide[0] = wide[0].expand(info.batch_size, *wide[0].shape[1:])
        return call_function(Elementwise, around, place, *wide), 0


def _slope(around: _Around, partial: int, given: Sequence[Tensor]) -> Tensor | None:
    """A partial derivative, as a differentiable function; None if it is 0 everywhere."""
    if around.traced.expression.number(partial) == 0.0:
        return None
    found: Tensor = call_function(Elementwise, around, partial, *given)
    return found
