"""An engine as the arguments of an operator: a constant string, numbers and tensors; and the engine again from them.

torch.compile traces `encode` and calls an operator with what it gives; the operator calls `decode` when it runs. The
string has the form of Python: `ChunkedEngine(Spec(integer, …, Window(integer, integer, None), …), …)`. Numbers and
tensors are apart, so that lengths may be symbols and tensors are inputs of the graph.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import count
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Mask

__all__ = ["Encoded", "decode", "encode"]

_MOST = 64  # constants that are kept, and masks whose block masks are
_NAMES: dict[str, Any] = {}  # the classes and functions that occur in strings
_CONSTANTS: dict[Hashable, Any] = {}
_MEMORIES: dict[Hashable, tuple[list[weakref.ref[Tensor]], dict[Hashable, Any]]] = {}


class Encoded(NamedTuple):
    """The arguments of an operator after its tensors that have derivatives."""

    code: str
    integers: list[int]
    floats: list[float]
    tensors: list[Tensor]


def encode(x: object) -> Encoded | None:
    """Encode dataclasses of tensors, numbers, functions and one another; None if something else is among them.

    >>> from regard.masks import causal, window
    >>> encode(causal() & window(4)).code, encode(causal() & window(4)).integers
    ('And(Causal(None, None), Window(integer, integer, None))', [4, 0])
    """
    integers: list[int] = []
    floats: list[float] = []
    tensors: list[Tensor] = []
    code = _encoded(x, integers, floats, tensors)
    return None if code is None else Encoded(code, integers, floats, tensors)


def decode(code: str, integers: Sequence[int], floats: Sequence[float], tensors: Sequence[Tensor]) -> Any:
    """Give the object again; what holds no tensor and calls no function is the same object each time."""
    return _parsed(code).build(_Values(iter(integers), iter(floats), iter(tensors)))


def _encoded(x: Any, integers: list[int], floats: list[float], tensors: list[Tensor]) -> str | None:
    """The string of an object. Its statements are those that the compiler of every torch release can trace."""
    if x is None or isinstance(x, bool | str):
        return repr(x)
    if isinstance(x, Tensor):
        tensors.append(x)
        return "tensor"
    if isinstance(x, int):
        integers.append(x)
        return "integer"
    if isinstance(x, float):
        floats.append(x)
        return "floating"
    if isinstance(x, FunctionType):
        return _encoded_function(x, integers, floats, tensors)
    if isinstance(x, tuple):
        name, parts = _name(type(x)), [y for y in x]  # noqa: C416
    elif hasattr(type(x), "__dataclass_fields__"):
        name, parts = _name(type(x)), []
        for field in _fields(type(x)):
            parts.append(getattr(x, field))
    else:
        return None
    codes = []
    for part in parts:
        code = _encoded(part, integers, floats, tensors)
        if code is None:
            return None
        codes.append(code)
    return name + "(" + ", ".join(codes) + ")"


def _encoded_function(f: Any, integers: list[int], floats: list[float], tensors: list[Tensor]) -> str | None:
    """The name of a function, called with what it captures; None if the compiler cannot read what it captures."""
    codes: list[str] = []
    if f.__defaults__ or f.__code__.co_kwonlyargcount:
        return None
    if f.__code__.co_freevars:
        if not hasattr(f, "__closure__"):  # it was made inside of the function that is compiled, by torch 2.11
            return None
        try:
            cells = f.__closure__
        except AttributeError:  # the same by later releases
            return None
        for cell in cells:
            code = _encoded(cell.cell_contents, integers, floats, tensors)
            if code is None:
                return None
            codes.append(code)
    return _name(f) + "(" + ", ".join(codes) + ")"


def _name_of(x: Any) -> str:
    """A name for a class, or for the code of a function: the compiler guards both, but not what a function captures."""
    wanted = "".join(c if c.isalnum() else "_" for c in x.__name__)
    for number in count():
        name = f"{wanted}_{number}" if number else wanted
        known = _NAMES.setdefault(name, x)
        if known is x or getattr(known, "__code__", known) is getattr(x, "__code__", x):
            return name
    raise AssertionError


def _fields_of(kind: Any) -> tuple[str, ...]:
    """The names of the arguments of a dataclass."""
    return tuple(field.name for field in fields(kind) if field.init)


_name: Callable[[Any], str] = torch.compiler.assume_constant_result(_name_of)
_fields: Callable[[Any], tuple[str, ...]] = torch.compiler.assume_constant_result(_fields_of)


class _Values(NamedTuple):
    integers: Iterator[int]
    floats: Iterator[float]
    tensors: Iterator[Tensor]


class _Node(NamedTuple):
    """A part of a parsed string."""

    name: str  # of a class or a function; "integer", "floating", "tensor"; or "" for a constant
    constant: object = None
    parts: tuple[_Node, ...] = ()
    code: str = ""
    integers: int = 0  # how many values of each kind it takes
    floats: int = 0
    tensors: int = 0
    pure: bool = True  # whether it takes no tensor and names no function

    def build(self, values: _Values) -> Any:
        if not self.name:
            return self.constant
        if not self.parts and self.name in _LEAVES:
            return next(getattr(values, _LEAVES[self.name]))
        if self.pure:
            return self._constant(values)
        thing = _NAMES[self.name]
        if isinstance(thing, FunctionType):
            return _with_closure(thing, tuple(part.build(values) for part in self.parts))
        if not (self.tensors and issubclass(thing, Mask)):
            return _made(thing, [part.build(values) for part in self.parts])
        tensors = tuple(next(values.tensors) for _ in range(self.tensors))
        integers = tuple(int(next(values.integers)) for _ in range(self.integers))
        floats = tuple(next(values.floats) for _ in range(self.floats))
        inside = _Values(iter(integers), iter(floats), iter(tensors))
        mask = _made(thing, [part.build(inside) for part in self.parts])
        mask.__dict__["_memory"] = _memory((self.code, integers, floats), tensors)
        return mask

    def _constant(self, values: _Values) -> Any:
        """The same object for the same numbers, so that what it remembers is found again."""
        integers = tuple(int(next(values.integers)) for _ in range(self.integers))
        floats = tuple(next(values.floats) for _ in range(self.floats))
        key = (self.code, integers, floats)
        found = _CONSTANTS.pop(key, None)
        if found is None:
            inside = _Values(iter(integers), iter(floats), iter(()))
            found = _made(_NAMES[self.name], [part.build(inside) for part in self.parts])
        _keep(_CONSTANTS, key, found)
        return found


_LEAVES = {"integer": "integers", "floating": "floats", "tensor": "tensors"}


@lru_cache(maxsize=1024)
def _parsed(code: str) -> _Node:
    return _node(ast.parse(code, mode="eval").body)


def _node(tree: ast.expr) -> _Node:
    if isinstance(tree, ast.Constant):
        return _Node("", tree.value)
    if isinstance(tree, ast.Name):
        kind = tree.id
        return _Node(
            kind,
            integers=int(kind == "integer"),
            floats=int(kind == "floating"),
            tensors=int(kind == "tensor"),
            pure=kind != "tensor",
        )
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
        raise RuntimeError(f"no engine has the code {ast.unparse(tree)}")
    parts = tuple(map(_node, tree.args))
    integers, floats, tensors = (sum(getattr(part, kind) for part in parts) for kind in _LEAVES.values())
    pure = all(part.pure for part in parts) and not isinstance(_NAMES[tree.func.id], FunctionType)
    return _Node(tree.func.id, None, parts, ast.unparse(tree), integers, floats, tensors, pure)


def _made(kind: Callable[..., Any], parts: list[Any]) -> Any:
    if kind is tuple:
        return tuple(parts)
    return kind(**dict(zip(_fields(kind), parts, strict=True))) if is_dataclass(kind) else kind(*parts)


def _with_closure(f: FunctionType, captured: tuple[object, ...]) -> FunctionType:
    """The code of a function with these objects captured."""
    if not captured:
        return f
    return FunctionType(f.__code__, f.__globals__, f.__name__, None, tuple(map(CellType, captured)))


def _memory(key: tuple[Hashable, ...], tensors: tuple[Tensor, ...]) -> dict[Hashable, Any]:
    """What a mask of these very tensors remembered at its last call; it does not keep them alive."""
    where = (*key, *map(id, tensors))
    found = _MEMORIES.pop(where, None)
    if found is None or any(then() is not t for then, t in zip(found[0], tensors, strict=True)):
        memories = _MEMORIES  # when the interpreter exits, tensors may outlive the names of this module
        found = [weakref.ref(t, lambda _: memories.pop(where, None)) for t in tensors], {}
    _keep(_MEMORIES, where, found)
    return found[1]


def _keep(cache: dict[Hashable, Any], key: Hashable, value: object) -> None:
    """Store a value as the most recently used one."""
    cache[key] = value
    if len(cache) > _MOST:
        cache.pop(next(iter(cache)), None)
