"""Trace a function of single numbers: which elementwise operations it does, and which tensors it captures.

The function is called once with tensors of no dimension, whose values are never read. A function mode sees each call of
torch before anything else does: it puts stand-ins in the place of captured tensors, so that no device and no transform
of torch.func takes part, and it reads indices. A dispatch mode below it sees the operations that calls are made of.
Operations on captured tensors alone are kept as they are; torch runs them before every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.compat.compiled import EagerOperatorMode, operator_arguments
from regard.compat.torch import is_wrapped, no_autocast, outside_transforms
from regard.errors import ArgumentError, DtypeError
from regard.scores.expression import BOOL, FLOAT, INDICES, INT, Expression
from regard.scores.lowering import LOWERED, At, Lowering, NoRuleError

__all__ = ["Bound", "Step", "Traced", "trace"]

_VALUES = frozenset(("__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy"))
_READS = frozenset(("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"))
_BRANCH = (
    "Pointwise: f asks for the value of a tensor, by if, while, float() or .item(), and it is called for all pairs at "
    "once. Choose by torch.where(condition, a, b)."
)


class Step(NamedTuple):
    """An operation on captured tensors alone: `args` and `kwargs` hold a `Kept` for each tensor."""

    call: Callable[..., Any]
    args: Any
    kwargs: Any


class Kept(NamedTuple):
    """The number of a captured tensor, or of the result of a step."""

    number: int


class Row(NamedTuple):
    """A table of which some dimensions are indexed, None for those that are not."""

    table: int
    indices: tuple[int | None, ...]


class Traced(NamedTuple):
    """What a function does."""

    expression: Expression
    value: int  # the place of the result
    tables: tuple[int, ...]  # what loads read, by the numbers of `kept`
    captured: tuple[Tensor | str, ...]  # tensors, and names of parameters; numbers 0, 1, …
    steps: tuple[Step, ...]  # their results have the numbers that follow

    def read(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Bound, tuple[Tensor, ...]]:
        """The function with its tables of whole numbers, and the others: differentiable, in `dtype`."""
        kept: list[Any] = [parameters[x] if isinstance(x, str) else x for x in self.captured]
        for step in self.steps:
            kept.append(step.call(*_replaced(step.args, kept), **_replaced(step.kwargs, kept)))
        tables = [kept[n] for n in self.tables]
        whole = {at: t for at, t in enumerate(tables) if not t.is_floating_point()}
        if any(map(is_wrapped, whole.values())):
            raise ArgumentError(
                "Pointwise: f captures a tensor of whole numbers inside a transform of torch.func. Make it outside."
            )
        shapes = tuple(tuple(t.shape) for t in tables)
        return Bound(self, whole, shapes), tuple(t.to(dtype) for t in tables if t.is_floating_point())


class Bound(NamedTuple):
    """A traced function with its tables of whole numbers, which have no derivative."""

    traced: Traced
    whole: dict[int, Tensor]  # by the number of the table
    shapes: tuple[tuple[int, ...], ...]  # of all tables

    @property
    def differentiable(self) -> int:
        """How many tables have derivatives."""
        return len(self.traced.tables) - len(self.whole)

    @property
    def may_hide(self) -> bool:
        return self.traced.expression.may_hide(self.traced.value)

    def tables(self, floating: Sequence[Tensor]) -> list[Tensor]:
        """All tables in order, given those that have derivatives."""
        rest = iter(floating)
        return [self.whole[at] if at in self.whole else next(rest) for at in range(len(self.traced.tables))]


def _replaced(x: Any, kept: Sequence[Any]) -> Any:
    if isinstance(x, Kept):
        return kept[x.number]
    if isinstance(x, list | tuple):
        return type(x)(_replaced(y, kept) for y in x)
    return {k: _replaced(y, kept) for k, y in x.items()} if isinstance(x, dict) else x


def trace(f: Callable[..., Any], parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Traced:
    """Trace f(score, batch, head, i, j, **parameters) for scores of this dtype."""
    tracer = _Tracer(dtype)
    with ExitStack() as stack:
        stack.enter_context(outside_transforms())
        stack.enter_context(torch.inference_mode(False))  # `torch.tensor` works in place there
        stack.enter_context(torch.no_grad())
        stack.enter_context(no_autocast(torch.device("cpu")))
        stack.enter_context(torch.device("cpu"))
        score = tracer.stand_in(At(tracer.expression.score))
        indices = [tracer.stand_in(At(tracer.expression.add(name, INT))) for name in INDICES]
        given = {name: tracer.captured(x, name) for name, x in parameters.items()}
        stack.enter_context(_Operations(tracer))
        stack.enter_context(_Calls(tracer))
        try:
            found = f(score, *indices, **given)
        except (ArgumentError, DtypeError):
            raise
        except Exception as error:
            raise ArgumentError(
                f"Pointwise: f must be made of elementwise torch operations on single numbers. Calling "
                f"f(score, batch, head, i, j) raised {type(error).__name__}: {error}"
            ) from error
    return tracer.traced(found)


class _Tracer:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.expression = Expression()
        self.lowering = Lowering(self.expression)
        self.known: dict[int, At | Row | Kept] = {}  # what tensors stand for, by their ids
        self.alive: list[Tensor] = []  # so that no id is used twice
        self.sources: list[Tensor | str] = []
        self.shapes: list[Tensor] = []  # stand-ins of everything kept
        self.steps: list[tuple[int, Step]] = []
        self.tables: list[int] = []

    def stand_in(self, what: At | Row | Kept, like: Tensor | None = None) -> Tensor:
        """A tensor whose values are never read."""
        if isinstance(what, At):
            kind = self.lowering.kind(what.place)
            made = torch.empty((), dtype={FLOAT: self.dtype, INT: torch.int64, BOOL: torch.bool}[kind], device="cpu")
        elif isinstance(what, Row):
            table = self.shapes[what.table]
            left = [size for size, index in zip(table.shape, what.indices, strict=True) if index is None]
            made = torch.empty(left, dtype=table.dtype, device="cpu")
        else:
            if like is None:
                raise RuntimeError("a captured tensor has a shape")
            made = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        self.known[id(made)] = what
        self.alive.append(made)
        return made

    def captured(self, x: Tensor, name: str | None = None) -> Tensor:
        """The stand-in of a captured tensor, the same every time."""
        what = self.known.get(id(x))
        if isinstance(what, Kept) and x is not self.shapes[what.number] and name is None:
            return self.shapes[what.number]
        if what is not None and name is None:
            return x
        number = len(self.shapes)
        made = self.stand_in(Kept(number), x)
        self.shapes.append(made)
        self.sources.append(x if name is None else name)
        if name is None:
            self.known[id(x)] = Kept(number)
            self.alive.append(x)
        return made

    def value(self, x: Any) -> Any:
        """What an argument of an operation stands for; a captured tensor of one number is loaded."""
        if not isinstance(x, Tensor):
            return x
        what = self.known[id(x)]
        if isinstance(what, At):
            return what
        shape = tuple(x.shape)
        if shape:
            raise ArgumentError(
                f"Pointwise: f is called for single numbers and reads a tensor of shape {shape} as a whole. "
                "Index it, such as table[head] or table[i - j]."
            )
        return self.load(Row(what.number, ()) if isinstance(what, Kept) else what)

    def load(self, row: Row) -> At:
        if row.table not in self.tables:
            self.tables.append(row.table)
        table = self.shapes[row.table]
        kind = FLOAT if table.is_floating_point() else BOOL if table.dtype == torch.bool else INT
        places = [place for place in row.indices if place is not None]
        return At(self.expression.add("load", kind, *places, value=self.tables.index(row.table)))

    def index(self, x: Tensor, index: Any) -> Tensor | None:
        """x[index] where one of both depends on the arguments of f; None if none does."""
        items = list(index) if isinstance(index, tuple) else [index]
        what = self.known[id(x)]
        if isinstance(what, Kept) and not any(isinstance(y, Tensor) and self._varies(y) for y in items):
            return None
        if isinstance(what, At):
            raise ArgumentError("Pointwise: f is called for single numbers; its arguments have no dimensions to index.")
        row = Row(what.number, (None,) * x.dim()) if isinstance(what, Kept) else what
        if ... in items:
            at = items.index(...)
            items[at : at + 1] = [slice(None)] * (x.dim() - len(items) + 1)
        free = [d for d, taken in enumerate(row.indices) if taken is None]
        indices = list(row.indices)
        if len(items) > len(free):
            raise ArgumentError(f"Pointwise: f reads a tensor of shape {tuple(x.shape)} with {len(items)} indices.")
        for d, item in zip(free, items, strict=False):
            if item != slice(None) if not isinstance(item, Tensor) else True:
                indices[d] = self._index(item)
        found = Row(row.table, tuple(indices))
        return self.stand_in(found if None in indices else self.load(found))

    def _varies(self, x: Tensor) -> bool:
        return not isinstance(self.known.get(id(x), Kept(0)), Kept)

    def _index(self, item: Any) -> int:
        if isinstance(item, Tensor):
            place = self.lowering.at(self.value(self.captured(item)))
        elif type(item) is int:
            place = self.expression.constant(item)
        else:
            raise ArgumentError(
                f"Pointwise: f indexes a tensor by {item!r} beside an index that depends on its arguments. "
                "Use whole numbers, indices and full slices."
            )
        e = self.expression
        if self.lowering.kind(place) != INT:
            raise DtypeError(
                "Pointwise: f indexes a tensor by something else than whole numbers. Convert with .long()."
            )
        if "score" in e.leaves(place) or any(e.nodes[load].kind == FLOAT for load in e.loads(place)):
            raise ArgumentError(
                "Pointwise: f indexes a tensor by something that depends on the score or on a floating tensor. An "
                "index may depend on batch, head, i, j and tensors of whole numbers."
            )
        return place

    def operation(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note an operation, and give stand-ins of its results."""
        name = call.name()
        tensors = [x for x in _flat((args, kwargs)) if isinstance(x, Tensor)]
        if name in _READS:
            raise ArgumentError(_BRANCH)
        if torch.Tag.nondeterministic_seeded in call.tags:
            raise ArgumentError("Pointwise: f draws random numbers; attention has dropout= for that. Draw them before.")
        for x in tensors:
            if id(x) not in self.known:  # it was made by f itself
                self.known[id(x)] = self._made(x)
                self.alive.append(x)
        if any(map(self._varies, tensors)):
            return self._elementwise(call, args, kwargs)
        if not tensors:
            return call(*args, **kwargs)
        return self._kept(call, args, kwargs)

    def _made(self, x: Tensor) -> At | Kept:
        if x.dim() == 0:
            return At(self.expression.constant(x.item()))
        number = len(self.shapes)
        self.shapes.append(x)
        self.sources.append(x)
        return Kept(number)

    def _elementwise(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = call.name().removeprefix("aten::").partition(".")[0]
        inplace = name.endswith("_") and not name.endswith("__")
        if name in ("index", "embedding"):
            given = operator_arguments(call, args, kwargs)
            table, at = (
                (given["self"], tuple(given["indices"])) if name == "index" else (given["weight"], given["indices"])
            )
            at = tuple(slice(None) if x is None else x for x in at) if isinstance(at, tuple) else at
            return self.index(table, at)
        rule = LOWERED.get(name.removesuffix("_") if inplace else name)
        if rule is None:
            _refuse(name)
        given = {k: self.value(x) for k, x in operator_arguments(call, args, kwargs).items()}
        try:
            found = rule(self.lowering, **given)
        except (NoRuleError, TypeError) as error:
            _refuse(name, str(error) if isinstance(error, NoRuleError) else "")
        if not inplace:
            return self.stand_in(found)
        self.known[id(args[0])] = found
        return args[0]

    def _kept(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.name().partition(".")[0].endswith("_"):
            raise ArgumentError("Pointwise: f changes a captured tensor in place. Make a new one.")
        found = call(*args, **kwargs)  # of stand-ins: for shape and dtype alone
        if not isinstance(found, Tensor):
            _refuse(call.name().removeprefix("aten::"))
        number = len(self.shapes)
        self.shapes.append(found)
        self.sources.append("")
        self.steps.append((number, Step(call, *(self._numbered(x) for x in (args, kwargs)))))
        self.known[id(found)] = Kept(number)
        self.alive.append(found)
        return found

    def _numbered(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            what = self.known[id(x)]
            return what if isinstance(what, Kept) else self.expression.number(what[0])
        if isinstance(x, list | tuple):
            return type(x)(map(self._numbered, x))
        return {k: self._numbered(y) for k, y in x.items()} if isinstance(x, dict) else x

    def traced(self, found: Any) -> Traced:
        if isinstance(found, Tensor):
            found = self.value(self.captured(found))
        if not isinstance(found, At | float | int) or isinstance(found, bool):
            raise DtypeError(f"Pointwise: f must return a tensor, the new score. Got {type(found).__name__}.")
        place = self.lowering.at(found)
        if self.lowering.kind(place) == BOOL:
            raise DtypeError(
                "Pointwise: f must return the new score, and returns a truth value. A condition is a mask: "
                "regard.predicate(lambda batch, head, i, j: …)."
            )
        value = self.expression.cast(place, FLOAT)
        used = {self.expression.nodes[p].value for p in self.expression.loads(value)}
        order = self._order([table for at, table in enumerate(self.tables) if at in used])
        tables = tuple(order[t] if at in used else -1 for at, t in enumerate(self.tables))
        return self._renumbered(value, tables, order)

    def _order(self, tables: list[int]) -> dict[int, int]:
        """New numbers of what tables need: captured tensors first, then results of steps."""
        steps = dict(self.steps)
        wanted, rest = set[int](), list(tables)
        while rest:
            number = rest.pop()
            if number not in wanted:
                wanted.add(number)
                if number in steps:
                    rest += [x.number for x in _flat(steps[number][1:]) if isinstance(x, Kept)]
        inputs = sorted(n for n in wanted if n not in steps)
        return {n: at for at, n in enumerate([*inputs, *sorted(n for n in wanted if n in steps)])}

    def _renumbered(self, value: int, tables: tuple[int, ...], order: dict[int, int]) -> Traced:
        steps = dict(self.steps)
        wanted = [steps[n] for n in order if n in steps]
        captured = tuple(self.sources[n] for n in order if n not in steps)
        moved = [Kept(order.get(n, -1)) for n in range(len(self.shapes))]
        made = tuple(Step(s.call, _replaced(s.args, moved), _replaced(s.kwargs, moved)) for s in wanted)
        kept = [at for at, table in enumerate(tables) if table >= 0]
        e = self.expression
        for place, node in enumerate(e.nodes):  # tables that no load of the result reads are gone
            if node.op == "load" and node.value in kept:
                e.nodes[place] = node._replace(value=kept.index(node.value))
        return Traced(e, value, tuple(tables[at] for at in kept), captured, made)


def _refuse(name: str, why: str = "") -> NoReturn:
    raise ArgumentError(
        f"Pointwise: f calls {name}{why or ', which it may not use'}. f is computed for each pair by itself, from the "
        "operations that the guide to scores lists: arithmetic, comparisons, torch.where, and functions such as exp, "
        "log, tanh, clamp."
    )


def _flat(x: Any) -> list[Any]:
    if isinstance(x, Kept | At) or not isinstance(x, list | tuple | dict):
        return [x]
    return [z for y in (x.values() if isinstance(x, dict) else x) for z in _flat(y)]


class _Calls(TorchFunctionMode):
    """Puts stand-ins in the place of captured tensors, and reads indices."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "device":
            return func(*args)
        if name in _VALUES and args and isinstance(args[0], Tensor):
            raise ArgumentError(_BRANCH)
        args, kwargs = self._stood_in(args), self._stood_in(kwargs or {})
        if name == "__getitem__":
            found = self.tracer.index(args[0], args[1])
            if found is not None:
                return found
        if name == "__setitem__":
            raise ArgumentError(
                "Pointwise: f changes a tensor in place. Make a new one, by torch.where(condition, a, b)."
            )
        return func(*args, **kwargs)

    def _stood_in(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.tracer.captured(x)
        if isinstance(x, list | tuple) and type(x) in (list, tuple):
            return type(x)(map(self._stood_in, x))
        return {k: self._stood_in(y) for k, y in x.items()} if type(x) is dict else x


class _Operations(EagerOperatorMode):
    """Notes the operations that calls are made of."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.operation(func, args, kwargs or {})
