"""Triton's interpreter without work that it does again and again; what kernels compute stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

__all__ = ["quick"]


@contextmanager
def quick() -> Iterator[None]:
    """Let the interpreter keep what it looks up and builds; its kernels take a third of the time."""
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", searched_once(interpreter))
        patch.setattr(interpreter, "_get_np_dtype", by_name(interpreter._get_np_dtype, interpreter.tl))
        core, builder = interpreter.tl.core, interpreter.interpreter_builder
        patch.setattr(core.block_type, "__init__", types_made_once(core))
        patch.setattr(core.tensor, "__init__", shapes_made_once(core))
        patch.setattr(core.tuple, "__eq__", equal_to_list(core))
        semantic = type(interpreter.interpreter_semantic)
        patch.setattr(semantic, "broadcast_impl_value", of_equal_shapes(semantic))
        patch.setattr(semantic, "binary_op_type_checking_impl", of_equal_types(semantic))
        # A check of integers for overflow, whose answer nobody reads without `debug`.
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug))
        yield


def searched_once(interpreter: Any) -> Callable[[Any], Any]:
    """Look through Triton's language once a launch, and not at every call within a kernel: it is patched by then."""
    search: Callable[[Any], Any] = interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    used: dict[Any, frozenset[int]] = {}
    found: set[frozenset[int]] = set()

    def once(fn: Any) -> Any:
        seen = used.get(fn)
        if seen is None:
            seen = frozenset(at for x in fn.__globals__.values() for at, tl in enumerate(languages) if x is tl)
            used[fn] = seen
        if seen in found:
            return None  # asked for within a kernel, where nobody takes the answer
        scope = search(fn)
        restore = scope.restore

        def ended() -> None:
            found.clear()
            restore()

        scope.restore = ended
        found.add(seen)
        return scope

    return once


def by_name(convert: Callable[[Any], Any], tl: Any) -> Callable[[Any], Any]:
    """The dtype of numpy for one of Triton's, from a table that is written once."""
    known: dict[str, Any] = {}

    def converted(dtype: Any) -> Any:
        if type(dtype) is not tl.dtype:  # pointers and blocks
            return convert(dtype)
        if dtype.name not in known:
            known[dtype.name] = convert(dtype)
        return known[dtype.name]

    return converted


def types_made_once(core: Any) -> Callable[..., None]:
    """The type of a block, from an earlier one of that shape."""
    make, constexpr = core.block_type.__init__, core.constexpr
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[s.value if isinstance(s, constexpr) else s for s in shape])
        if (fields := known.get(key)) is None:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))
        else:
            vars(self).update(fields)
            self.element_ty = element_ty  # pointers of one name may differ

    return made


def shapes_made_once(core: Any) -> Callable[..., None]:
    """A tensor, with the shape and size of an earlier one of that shape."""
    make = core.tensor.__init__
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if (fields := known.get(key)) is None:
            make(self, handle, type)
            known[key] = {name: x for name, x in vars(self).items() if name not in ("handle", "type", "dtype")}
        else:
            vars(self).update(fields)
            self.handle, self.type, self.dtype = handle, type, type.scalar

    return made


def equal_to_list(core: Any) -> Callable[[Any, Any], Any]:
    """Compare a shape with a list of numbers without making a tuple of it first."""
    compare = core.tuple.__eq__

    def equal(self: Any, other: Any) -> Any:
        return core.constexpr(self.values == other) if type(other) is list else compare(self, other)

    return equal


def of_equal_shapes(semantic: Any) -> Callable[..., Any]:
    """Broadcast two tensors unless they have the same shape."""
    broadcast = semantic.broadcast_impl_value

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcasted


KEPT = ("fp32", "int32")  # types that arithmetic of two such tensors, or of one and a number, leaves as they are


def of_equal_types(semantic: Any) -> Callable[..., Any]:
    """Skip type promotion where the type is known: operands of one type, or a tensor and a number of its kind."""
    check = semantic.binary_op_type_checking_impl

    def fits(number: Any, dtype: Any) -> bool:
        return type(number) is float if dtype.name == "fp32" else type(number) is int and abs(number) < 2**31

    def checked(self: Any, lhs: Any, rhs: Any, *options: bool, **named: bool) -> Any:
        a, b = getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)
        kept = next((x for x in (a, b) if x is not None and x.name in KEPT), None)
        if kept is not None and named.get("arithmetic_check", True) and len(options) < 3:
            if a is not None and b is not None and a.name == b.name:
                return self.broadcast_impl_value(lhs, rhs)
            if b is None and fits(rhs, kept):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=kept))
            if a is None and fits(lhs, kept):
                return self.broadcast_impl_value(self.scalar_constant(lhs, dtype=kept), rhs)
        return check(self, lhs, rhs, *options, **named)

    return checked
