"""A digest of a function: its code, and the values that the code reads from outside.

Two ranks that defined a function in the same way, and captured equal values, get the same digest, whatever their
addresses. Values are read and never called or unpickled; what cannot be read is named.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..biases import Bias
from ..masks import Mask

__all__ = ["Digest", "digest"]

_PLAIN = (int, float, complex, str, bytes, range, slice, Enum, np.generic, torch.dtype, torch.device, type(...))
_NOT_STATE = {"__init__", "__new__", "__repr__", "__str__", "__init_subclass__", "__post_init__", "__del__"}


class Digest(NamedTuple):
    """A digest, and the types of the captured values that it could not read."""

    content: str
    unread: tuple[str, ...]


def digest(x: object) -> Digest:
    """Give the digest of a function or a value.

    >>> digest(partial(max, 3)) == digest(partial(max, 3)), digest(partial(max, 3)) == digest(partial(max, 4))
    (True, False)
    """
    walk = _Walk()
    walk.add(x, frozenset())
    return Digest(walk.content.hexdigest(), tuple(sorted(set(walk.unread))))


class _Reads(NamedTuple):
    """The names of globals and attributes that code reads, the code inside it included."""

    globals: frozenset[str]
    attributes: frozenset[str]


@lru_cache(maxsize=256)
def _reads(code: CodeType) -> _Reads:
    inner = [_reads(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    found = [(step.opname, step.argval) for step in dis.get_instructions(code) if isinstance(step.argval, str)]
    outer = frozenset(name for kind, name in found if kind in ("LOAD_GLOBAL", "LOAD_NAME"))
    attributes = frozenset(name for kind, name in found if kind in ("LOAD_ATTR", "LOAD_METHOD"))
    return _Reads(outer.union(*(r.globals for r in inner)), attributes.union(*(r.attributes for r in inner)))


def _named_globals(f: FunctionType) -> dict[str, Any]:
    return {name: f.__globals__[name] for name in sorted(_reads(f.__code__).globals) if name in f.__globals__}


def _attributes(functions: Iterable[FunctionType]) -> frozenset[str]:
    """The names of attributes that functions read, and those they call by a global name."""
    waiting, seen, names = list(functions), set[int](), frozenset[str]()
    while waiting:
        f = waiting.pop()
        if id(f) in seen or _is_library(f):
            continue
        seen.add(id(f))
        names |= _reads(f.__code__).attributes
        waiting += [g for g in _named_globals(f).values() if isinstance(g, FunctionType)]
    return names


def _is_library(x: Any) -> bool:
    """Whether something is part of torch or Python: its name says what it is."""
    root = str(getattr(x, "__module__", None)).partition(".")[0]
    return root == "torch" or (root in sys.stdlib_module_names and root != "__main__")


def _name(x: Any) -> str:
    return f"{getattr(x, '__module__', '')}.{getattr(x, '__qualname__', type(x).__qualname__)}"


class _Walk:
    def __init__(self) -> None:
        self.content = hashlib.sha256()
        self.unread: list[str] = []
        self.seen: dict[int, int] = {}
        self.alive: list[object] = []  # an id is unique only while its object lives

    def write(self, *words: object) -> None:
        for word in words:
            text = word if isinstance(word, bytes) else str(word).encode()
            self.content.update(f"{len(text)}:".encode() + text)

    def add(self, x: Any, names: frozenset[str]) -> None:
        """Add a value; `names` are the attributes that the code which captured it reads."""
        if x is None or isinstance(x, _PLAIN):
            self.write(type(x).__qualname__, repr(x))
        elif isinstance(x, ModuleType):
            self.write("module", x.__name__)
        elif isinstance(x, type):
            self.write("class", _name(x))
        elif id(x) in self.seen:
            self.write("seen", self.seen[id(x)])
        else:
            self.seen[id(x)] = len(self.seen)
            self.alive.append(x)
            self._add_composed(x, names)

    def _add_composed(self, x: Any, names: frozenset[str]) -> None:
        if isinstance(x, Tensor):
            self.write("tensor", x.dtype, tuple(x.shape))
            self.write(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, np.ndarray):
            self.write("array", x.dtype, x.shape)
            self.add(x.tolist(), names) if x.dtype.hasobject else self.write(x.tobytes())
        elif isinstance(x, list | tuple):
            self._add_all(type(x).__qualname__, x, names)
        elif isinstance(x, dict):
            order = sorted(x.items(), key=lambda item: digest(item[0]).content)
            self._add_all("dict", [part for item in order for part in item], names)
        elif isinstance(x, set | frozenset):
            self._add_all("set", sorted(x, key=lambda item: digest(item).content), names)
        elif isinstance(x, Mask | Bias):
            parts: Any = x
            self._add_all(_name(type(x)), [getattr(x, field.name) for field in fields(parts)], names)
        elif isinstance(x, partial):
            self._add_all("partial", (x.func, x.args, x.keywords), names)
        elif isinstance(x, MethodType):
            own = [x.__func__] if isinstance(x.__func__, FunctionType) else []
            self._add_all("method", (x.__func__,), names)
            self.add(x.__self__, names | _attributes(own))
        elif isinstance(x, FunctionType):
            self._add_function(x)
        elif isinstance(x, BuiltinFunctionType):
            self._add_all("built-in", (_name(x), x.__self__), names)
        else:
            self._add_object(x, names)

    def _add_all(self, kind: str, parts: Iterable[object], names: frozenset[str]) -> None:
        every = list(parts)
        self.write(kind, len(every))
        for part in every:
            self.add(part, names)

    def _add_function(self, f: FunctionType) -> None:
        self.write("function", _name(f))
        if _is_library(f):
            return
        self._add_code(f.__code__)
        names = _attributes([f])
        self._add_all("defaults", (f.__defaults__, f.__kwdefaults__), names)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            self.write(name)
            try:
                self.add(cell.cell_contents, names)
            except ValueError:  # it was never assigned
                self.write("empty")
        for name, value in _named_globals(f).items():
            self.write(name)
            self.add(value, names)

    def _add_code(self, code: CodeType) -> None:
        self.write(code.co_code, code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._add_code(constant)
            else:
                self.add(constant, frozenset())

    def _add_object(self, x: Any, names: frozenset[str]) -> None:
        """Add the attributes that are read by name, and what methods and operators of the object read of it."""
        self.write("object", _name(type(x)))
        if not hasattr(x, "__dict__") and not any("__slots__" in vars(c) for c in type(x).__mro__):
            self.unread.append(_name(type(x)))
            return
        methods = dict(_operators(type(x)))
        waiting, done = {*names, *_attributes(methods.values())}, set[str]()
        values: dict[str, Any] = {}
        while waiting - done:
            name = min(waiting - done)
            done.add(name)
            kind, value = _attribute(x, name)
            if kind is FunctionType:
                methods[name] = value
                waiting |= _attributes([value])
            elif kind is not None:
                values[name] = value
        for name in sorted(methods):
            self.write(name)
            self._add_function(methods[name])
        for name in sorted(values):
            self.write(name)
            self.add(values[name], frozenset(done))


def _operators(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The special methods that a class defines in Python: an expression may call them without naming them."""
    for base in reversed(kind.__mro__):
        if not _is_library(base):
            special = ((n, f) for n, f in vars(base).items() if n.startswith("__") and n not in _NOT_STATE)
            yield from ((name, f) for name, f in special if isinstance(f, FunctionType))


def _attribute(x: object, name: str) -> tuple[type | None, Any]:
    """An attribute without calling code of the user: a function of its class, a value, or (None, None)."""
    if isinstance(x, nn.Module):
        for own in (x._parameters, x._buffers, x._modules):
            if name in own:
                return object, own[name]
    missing = object()
    found: Any = inspect.getattr_static(x, name, missing)
    if found is missing:
        return None, None
    if isinstance(found, property | staticmethod | classmethod):
        inner: Callable[..., Any] | None = found.fget if isinstance(found, property) else found.__func__
        found = inner
    if isinstance(found, FunctionType) and name not in getattr(x, "__dict__", {}):
        return FunctionType, found
    if isinstance(found, MemberDescriptorType):  # a slot
        return (object, getattr(x, name)) if hasattr(x, name) else (None, None)
    return object, found
