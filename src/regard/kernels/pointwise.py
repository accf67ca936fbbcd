"""A function of the scores as kernels take it: generated functions, and the tables that they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..scores.expression import FLOAT, SCORE, Expression, entries
from ..scores.tracing import Bound
from .pointwise_source import Tables, function_of

__all__ = ["DIAGONALS", "KEYS", "ROWS", "PointwiseArgs", "PointwiseKernel", "TableLoad", "flat_tables", "split_tables"]

ROWS, KEYS, DIAGONALS = "rows", "keys", "diagonals"


class PointwiseArgs(NamedTuple):
    """What generated functions read."""

    floats: Tensor | None = None  # all floating tables, flattened, one after the other
    whole: tuple[Tensor, ...] | None = None  # tables of whole numbers
    sizes: Tensor | None = None  # int32, as `pointwise_source.Tables` has it


class TableLoad(NamedTuple):
    """A load of a floating table, and what its gradient is summed along; None if by nothing that kernels sum along."""

    place: int
    along: str | None


@dataclass(frozen=True, eq=False)
class PointwiseKernel:
    """A function of scaled scores, with its derivatives."""

    bound: Bound
    floats: Tensor | None
    copies: int  # consecutive flattened items with the same batch index
    device: torch.device

    @property
    def expression(self) -> Expression:
        return self.bound.traced.expression

    @cached_property
    def tables(self) -> Tables:
        return Tables.of(self.bound, self.device.type == "cuda" and torch.version.hip is None)

    def function(self, place: int) -> Any:
        """The generated function for a node."""
        return function_of(self.expression, place, self.tables)

    @cached_property
    def _slope(self) -> int:
        return self.expression.derivative(self.bound.traced.value, self.expression.score)

    @cached_property
    def kinds(self) -> dict[str, Any]:
        """What a kernel is compiled for."""
        sloped = self.expression.number(self._slope) != 1.0
        slope = self.function(self._slope) if sloped else None
        value, bounded = self.function(self.bound.traced.value), self.expression.is_bounded(self._slope)
        return {"POINTWISE": True, "VALUE": value, "SLOPED": sloped, "SLOPE": slope, "BOUNDED": bounded}

    @cached_property
    def second_kinds(self) -> dict[str, Any]:
        """What a kernel for second derivatives is compiled for, too."""
        curve = self.expression.derivative(self._slope, self.expression.score)
        curved = self.expression.number(curve) != 0.0
        return {"CURVED": curved, "CURVE": self.function(curve) if curved else None}

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What is here twice starts the same launches: the names of functions, and the kinds of tables."""
        given = self.args
        floats = given.floats is not None and given.floats.data_ptr() & 15
        whole = tuple((t.dtype, t.data_ptr() & 15) for t in given.whole or ())
        return self.kinds["VALUE"].__name__, getattr(self.kinds["SLOPE"], "__name__", None), floats, whole

    @cached_property
    def args(self) -> PointwiseArgs:
        whole = tuple(_readable(t) for _, t in sorted(self.bound.whole.items()))
        numbers, begin = [self.copies], 0
        for at, shape in enumerate(self.bound.shapes):
            numbers += [begin, *shape]
            begin += 0 if at in self.bound.whole else math.prod(shape)
        return PointwiseArgs(self.floats, whole or None, _sizes(tuple(numbers), self.device))

    @cached_property
    def loads(self) -> list[TableLoad]:
        """Every load of a floating table."""
        e = self.expression
        places = [place for place in e.loads(self.bound.traced.value) if e.nodes[place].kind == FLOAT]
        return [TableLoad(place, self._along(place)) for place in places]

    def _along(self, place: int) -> str | None:
        e, indices = self.expression, self.expression.nodes[place].args
        leaves = frozenset[str]().union(*(e.leaves(x) for x in indices))
        if "key" not in leaves:
            return ROWS
        if "row" not in leaves:
            return KEYS
        return DIAGONALS if all(map(e.on_diagonal, indices)) else None

    def partial(self, place: int) -> Any:
        """The generated derivative of the value by a load."""
        return self.function(self.expression.derivative(self.bound.traced.value, place))

    def scattered(self, load: TableLoad, sums: Tensor, shape: tuple[int, int]) -> Tensor:
        """The gradient of all floating tables, flattened, from sums (L, H, …) along rows, keys or diagonals.

        `shape` is (rows, keys). Diagonal d has the pairs with row − key = d − (keys − 1). Sums over what no index
        depends on come first; then each entry is added up in a fixed order.
        """
        e, node = self.expression, self.expression.nodes[load.place]
        leaves = frozenset[str]().union(*(e.leaves(x) for x in node.args))
        last = {ROWS: "row", KEYS: "key", DIAGONALS: "row"}[load.along or ROWS]
        for dim, name in enumerate(("batch", "head", last)):
            if name not in leaves:
                sums = sums.sum(dim, keepdim=True)
        batch, head, line = (torch.arange(size, device=sums.device) for size in sums.shape)
        if load.along == DIAGONALS:
            line = line - (shape[1] - 1)
        zero = torch.zeros_like(line[:1])
        given = {"batch": (batch // self.copies)[:, None, None], "head": head[:, None], "row": zero, "key": zero}
        given |= {last: line, SCORE: zero}
        found: dict[int, Tensor] = {}
        for place in e.loads(load.place)[:-1]:  # tables of whole numbers that indices are read from
            inner = e.nodes[place]
            at = entries(self.bound.shapes[inner.value], e.evaluate(inner.args, given, found), sums.device)
            found[place] = self.bound.whole[inner.value].reshape(-1)[at]
        at = entries(self.bound.shapes[node.value], e.evaluate(node.args, given, found), sums.device)
        return self._added(node.value, at.expand(sums.shape).reshape(-1), sums.reshape(-1))

    def _added(self, table: int, at: Tensor, values: Tensor) -> Tensor:
        floating = [n for n in range(len(self.bound.shapes)) if n not in self.bound.whole]
        begin = sum(math.prod(self.bound.shapes[n]) for n in floating if n < table)
        total = values.new_zeros(sum(math.prod(self.bound.shapes[n]) for n in floating))
        if values.device.type == "cpu":
            return total.index_add_(0, at + begin, values)
        return total.index_put_((at + begin,), values, accumulate=True)  # sorted first, so in a fixed order


def flat_tables(tables: Sequence[Tensor]) -> Tensor | None:
    """Floating tables as one tensor: a view of a single one."""
    if not tables:
        return None
    return tables[0].reshape(-1) if len(tables) == 1 else torch.cat([t.reshape(-1) for t in tables])


def split_tables(bound: Bound, flat: Tensor | None) -> tuple[Tensor, ...]:
    """The floating tables again."""
    shapes = [shape for at, shape in enumerate(bound.shapes) if at not in bound.whole]
    if flat is None:
        return ()
    parts = flat.split([math.prod(shape) for shape in shapes])
    return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))


def _readable(x: Tensor) -> Tensor:
    """A table of whole numbers as kernels read it."""
    kind = {torch.bool: torch.int8, torch.int64: torch.int64}.get(x.dtype, torch.int32)
    return x.to(kind).contiguous()


@lru_cache(maxsize=256)
def _sizes(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
