"""Derivatives of every order in linear memory: a function of strips whose derivatives are functions of strips.

Attention is a map over rows: a strip of output needs its own queries, the keys it may see, and nothing else. So its
vector-Jacobian product, its tangent and its batched form are maps over the same strips, with the same kinds of
arguments; and so are theirs. `MapStrips` applies such a map; `vjp`, `jvp` and `vmap` of a `StripMap` make the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import cached_signature, call_function, outside_transforms, without_autocast
from ..core.folded import FoldedProblem
from ..core.formula import attend
from ..core.gathered import (
    GATHERED_BIAS,
    GATHERED_KEY,
    GATHERED_QUERY,
    GATHERED_ROW,
    GatheredTile,
    gathered_tiles,
    lists_of,
)
from ..core.tiling import BIAS, KEY, QUERY, ROW, SHARED, PartOfTile, Tile, TileSizes, strips
from ..masks.lists import Lists

__all__ = ["MapStrips", "StripMap", "Tensors", "attention_strips", "jvp_of", "vjp_of"]

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class StripMap:
    """A function of one tile's parts, and which parts it takes and gives. Parts given are added up."""

    tiles: tuple[Any, ...]  # a Tile, or whatever `takes` and `gives` can read
    body: Callable[..., Tensors]  # (tile, *parts) -> parts
    takes: tuple[PartOfTile, ...]
    gives: tuple[PartOfTile, ...]
    like: tuple[int | tuple[int, ...], ...]  # each result has the shape of an argument, or a shape of its own

    @without_autocast
    def __call__(self, *args: Tensor) -> Tensors:
        shapes = [s if isinstance(s, tuple) else tuple(args[s].shape) for s in self.like]
        results: list[Tensor] = []
        for tile in self.tiles:
            parts = self.body(tile, *(kind.part(x, tile) for kind, x in zip(self.takes, args, strict=True)))
            if not results:
                results = [p.new_zeros(shape) for p, shape in zip(parts, shapes, strict=True)]
            for kind, whole, part in zip(self.gives, results, parts, strict=True):
                kind.add(whole, tile, part)
        return tuple(results) or tuple(args[0].new_zeros(shape) for shape in shapes)

    def vjp(self) -> StripMap:
        """The map (arguments, cotangents of the results) -> cotangents of the arguments."""
        count = len(self.takes)

        def body(tile: Any, *parts: Tensor) -> Tensors:
            _, pull = vjp_of(lambda *x: self.body(tile, *x), *parts[:count])
            return tuple(pull(tuple(parts[count:])))

        return StripMap(self.tiles, body, self.takes + self.gives, self.takes, tuple(range(count)))

    def jvp(self) -> StripMap:
        """The map (arguments, their tangents) -> tangents of the results."""
        count = len(self.takes)

        def body(tile: Any, *parts: Tensor) -> Tensors:
            return jvp_of(lambda *x: self.body(tile, *x), parts[:count], parts[count:])[1]

        return StripMap(self.tiles, body, self.takes * 2, self.gives, self.like)

    def vmap(self, in_dims: tuple[int | None, ...], size: int, shapes: list[tuple[int, ...]]) -> StripMap:
        """The map over arguments with one more dimension in front (0) or without it (None)."""

        def body(tile: Any, *parts: Tensor) -> Tensors:
            results: Any = torch.vmap(lambda *x: self.body(tile, *x), in_dims=in_dims)(*parts)
            return tuple(results)

        like = tuple((size, *shape) for shape in shapes)
        return StripMap(self.tiles, body, self.takes, self.gives, like)

    def shapes(self, args: Tensors, in_dims: tuple[int | None, ...]) -> list[tuple[int, ...]]:
        """The shapes of the results for one item of a batch."""
        one = [x.shape[1:] if dim == 0 else x.shape for x, dim in zip(args, in_dims, strict=True)]
        return [s if isinstance(s, tuple) else tuple(one[s]) for s in self.like]


def vjp_of(function: Callable[..., Any], *args: Tensor) -> tuple[Any, Callable[..., Any]]:
    """The value of a function, and its vector-Jacobian product."""
    value, pull = torch.func.vjp(function, *args)[:2]
    return value, pull


def jvp_of(function: Callable[..., Any], args: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors]:
    """The values of a function and their tangents.

    The pull-back is linear in its cotangents, and its transpose is the push-forward: so forward mode needs no forward
    mode inside, which torch could not nest.
    """
    results, pull = vjp_of(function, *args)
    zeros = tuple(torch.zeros_like(r) for r in results)
    _, push = vjp_of(lambda *u: pull(u), *zeros)
    return results, tuple(push(tuple(tangents)))


def filled(like: Sequence[Tensor], given: Sequence[Tensor | None]) -> Tensors:
    """Tangents or cotangents of some tensors, zeros where there is none."""
    return tuple(torch.zeros_like(x) if t is None else t for x, t in zip(like, given, strict=True))


@cached_signature
class MapStrips(torch.autograd.Function):
    """Apply a Map; every derivative is again a Map."""

    @staticmethod
    def forward(plan: StripMap, *args: Tensor) -> Tensors:
        return plan(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.plan = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *call_function(MapStrips, ctx.plan.vjp(), *ctx.saved_tensors, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensors:
        args = ctx.saved_tensors
        result: Tensors = call_function(MapStrips, ctx.plan.jvp(), *args, *filled(args, tangents[1:]))
        return result

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: StripMap, *args: Tensor
    ) -> tuple[Tensors, tuple[int, ...]]:
        moved = tuple(x if d is None else x.movedim(d, 0) for x, d in zip(args, in_dims[1:], strict=True))
        front = tuple(None if d is None else 0 for d in in_dims[1:])
        over = plan.vmap(front, info.batch_size, plan.shapes(moved, front))
        return call_function(MapStrips, over, *moved), (0,) * len(plan.gives)


def attention_strips(x: FoldedProblem, tile_sizes: TileSizes) -> StripMap:
    """Attention as a map of (query, key, value, [bias], *shared) to (output, lse, entropy)."""
    spec = x.spec
    biased = x.bias is not None
    lists = lists_of(spec)
    if lists is not None:
        return _gathered_strips(x, lists, tile_sizes)
    takes = (QUERY, KEY, KEY, *((BIAS,) if biased else ()), *(SHARED,) * len(x.shared))
    tiles = tuple(s.hull(spec.m) for s in strips(x.spec, x.query.shape, tile_sizes, whole=True))

    def body(tile: Tile, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensors:
        bias, shared = (rest[0], rest[1:]) if biased else (None, rest)
        return attend(spec, tile, query, key, value, bias, *shared)[:3]

    shape = tuple(x.query.shape[:-1])
    return StripMap(tiles, body, takes, (QUERY, ROW, ROW), ((*shape, x.value.shape[-1]), shape, shape))


def _gathered_strips(x: FoldedProblem, lists: Lists, tile_sizes: TileSizes) -> StripMap:
    """The same for rows with lists of keys: each part has its keys gathered."""
    biased = x.bias is not None
    kinds = (GATHERED_QUERY, GATHERED_KEY, GATHERED_KEY, *((GATHERED_BIAS,) if biased else ()))
    dims = x.key.shape[-1] + x.value.shape[-1]
    with outside_transforms():  # derivatives of every order use the same tiles
        tiles = tuple(gathered_tiles(x.spec, lists, x.query.shape, dims, tile_sizes))

    def body(at: GatheredTile, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensors:
        bias, shared = (rest[0], rest[1:]) if biased else (None, rest)
        return attend(at.spec(x.spec), at.tile, query, key, value, bias, *shared)[:3]

    shape = tuple(x.query.shape[:-1])
    gives = (GATHERED_QUERY, GATHERED_ROW, GATHERED_ROW)
    like = ((*shape, x.value.shape[-1]), shape, shape)
    return StripMap(tiles, body, (*kinds, *(SHARED,) * len(x.shared)), gives, like)
