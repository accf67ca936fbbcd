"""Predicate: a mask defined by a Python function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import ClassVar, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from regard.errors import DtypeError, MaskError
from regard.masks.base import PARTIAL, Mask, Span
from regard.masks.index import Index, broadcast_shapes, indices
from regard.masks.span import interval
from regard.masks.tiles import uniform_cover

__all__ = ["Predicate", "predicate"]

_MOST = 4096  # entries of a list or a dict that are looked at
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""f(batch, head, i, j) on index tensors, as the `mask_mod` of FlexAttention."""


class IndexRange(NamedTuple):
    """Batch items or heads from `start` to before `stop`; torch.compile cannot trace the length of a symbolic range."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def part(self, of: slice) -> IndexRange:
        """Give those that the slice, which counts from `start`, selects; one alone serves every item."""
        if self.size == 1:
            return self
        return IndexRange(
            self.start + (of.start or 0), self.stop if of.stop is None else min(self.start + of.stop, self.stop)
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class Predicate(Mask):
    """Row i sees key j if f(batch, head, i, j); batch and head are 0 until `bind` sets the sizes of a problem."""

    f: MaskMod
    batch: IndexRange | None = None
    head: IndexRange | None = None

    factory: ClassVar[str] = "predicate"

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        shape = broadcast_shapes(i.shape, j.shape)
        batch = _index_tensor(self.batch, i).reshape(-1, 1, *(1,) * i.dim())
        head = _index_tensor(self.head, i).reshape(1, -1, *(1,) * i.dim())
        found = _checked(_called(self.f, batch, head, i, j), (batch.shape[0], head.shape[1], *shape))
        return found[0, 0] if self.batch is None else found

    @property
    def constant(self) -> bool:
        return False

    @property
    def sources(self) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return ()
        if isinstance(self.f, FunctionType | MethodType | partial):
            return tuple(_tensors_in(self.f))
        called = getattr(type(self.f), "forward" if isinstance(self.f, torch.nn.Module) else "__call__")
        return tuple(_tensors_in(MethodType(called, self.f)))

    def span(self, i: Tensor, n: int, m: int) -> Span:
        lo, hi, _ = interval(i, m, 0, m)
        shape = i.shape if self.batch is None else (*self.lead, *i.shape)
        return Span(lo.expand(shape), hi.expand(shape), False)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        return uniform_cover(rows, cols, PARTIAL)

    @property
    def lead(self) -> tuple[int, int]:
        return 1 if self.batch is None else self.batch.size, 1 if self.head is None else self.head.size

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        return replace(self, batch=IndexRange(0, batch), head=IndexRange(0, heads)) if self.batch is None else self

    def shared(self, device: torch.device) -> Mask:
        if self.batch is None or self.head is None:
            return self
        first = torch.zeros(1, 1, dtype=torch.int64, device=device)
        batch = _index_tensor(self.batch, first).reshape(-1, 1, 1, 1)
        head = _index_tensor(self.head, first).reshape(-1, 1, 1)
        shape = getattr(_called(self.f, batch, head, first, first), "shape", ())
        size = (1, 1, 1, 1, *shape)[-4:]  # 1 where f ignores the index
        return replace(self, batch=self.batch.part(slice(0, size[0])), head=self.head.part(slice(0, size[1])))

    def restrict(self, batch: slice, heads: slice) -> Mask:
        if self.batch is None or self.head is None or self.lead == (1, 1):
            return self
        return replace(self, batch=self.batch.part(batch), head=self.head.part(heads))

    def __repr__(self) -> str:
        return f"predicate({_name_of(self.f)})"


def _called(f: MaskMod, *at: Tensor) -> Tensor:
    try:
        return f(*at)
    except RuntimeError as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        raise MaskError(
            f"predicate: {_name_of(f)} uses `if`, `and`, `or`, `not` or a chain such as a < b < c, but its arguments "
            "hold all pairs at once. Combine conditions by &, | and ~, or choose by torch.where(condition, a, b)."
        ) from error


def _tensors_in(
    x: object, names: tuple[str, ...] = (), left: int = 9, seen: dict[Hashable, int] | None = None
) -> Iterator[Tensor]:
    """Every tensor that a function reads, as far as Python shows it: captured, by default, global, or of an object.

    Of an object, only the attributes in `names` count: those that occur in the code of the function. `left` is how many
    more steps it goes, from one object to what that holds; a function counts twice.
    """
    seen = {} if seen is None else seen  # with how many steps left
    key = (id(x.__func__), id(x.__self__)) if isinstance(x, MethodType) else (id(x), names)
    if left <= seen.get(key, 0):
        return
    seen[key] = left
    inside: list[object] = []
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, FunctionType):
        names, left = tuple(_names_in(x.__code__)), left - 1
        for cell in x.__closure__ or ():
            with suppress(ValueError):  # a cell may be empty
                inside.append(cell.cell_contents)
        inside += [x.__globals__[name] for name in names if name in x.__globals__]
        inside += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    elif isinstance(x, MethodType):
        inside, names = [x.__func__, x.__self__], tuple(_names_in(getattr(x, "__code__", None)))
    elif isinstance(x, partial):
        inside = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, list | tuple):
        inside = list(x[:_MOST])
    elif isinstance(x, dict):
        inside = list(islice(x.values(), _MOST))
    elif not isinstance(x, type | ModuleType):
        inside = list(_members(x, names))
    for part in inside:
        yield from _tensors_in(part, names, left - 1, seen)


def _names_in(code: object) -> Iterator[str]:
    """The names that a code object uses, and those of functions that are made in it."""
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names_in(constant)


def _members(x: object, names: tuple[str, ...]) -> Iterator[object]:
    """What an object has under some names: attributes, slots, and its own methods and properties."""
    own = getattr(x, "__dict__", {})
    for apart in ("_buffers", "_parameters", "_modules"):  # where a module of torch keeps them
        own = {**own, **own.get(apart, {})}
    for name in names:
        if name in own:
            yield own[name]
            continue
        member = inspect.getattr_static(type(x), name, None)
        if isinstance(member, property):
            member = member.fget
        if isinstance(member, FunctionType):
            yield MethodType(member, x)
        elif isinstance(member, MemberDescriptorType) and hasattr(x, name):
            yield getattr(x, name)


def _name_of(f: object) -> str:
    """A name without an address, so that equal functions of two processes have the same."""
    if isinstance(f, partial):
        return f"partial({_name_of(f.func)})"
    return str(getattr(f, "__name__", type(f).__name__))


def _index_tensor(of: IndexRange | None, like: Tensor) -> Tensor:
    start, stop = (0, 1) if of is None else of
    return torch.arange(start, stop, dtype=torch.int64, device=like.device)


def _checked(found: object, shape: tuple[int, ...]) -> Tensor:
    rule = f"predicate: f must return a bool tensor that broadcasts to (batch, heads, rows, keys), here {shape}"
    if not isinstance(found, Tensor):
        raise MaskError(f"{rule}; got {type(found).__name__}. Use torch operations on its four index tensors.")
    if found.dtype != torch.bool:
        raise MaskError(f"{rule}; got {found.dtype}. End it with a comparison.")
    try:
        return found.expand(shape)
    except RuntimeError:
        raise MaskError(f"{rule}; got shape {tuple(found.shape)}. Combine the indices by broadcasting.") from None


def predicate(f: MaskMod) -> Mask:
    """Let row i see key j where `f(batch, head, i, j)` is True; `f` works on index tensors that broadcast together.

    >>> print(predicate(lambda batch, head, i, j: (i + j) % 3 == 0).picture(3, 6))
    █··█··
    ··█··█
    ·█··█·

    `picture` takes `batch` and `head`; `dense`, `density` and `allows` ask for batch item 0 and head 0.
    """
    if not callable(f):
        raise DtypeError(
            f"predicate: f must be a function f(batch, head, i, j); got {type(f).__name__}. dense() takes a tensor."
        )
    if torch.compiler.is_compiling():  # which cannot read the signature of a function made inside of what it traces
        return Predicate(f)
    try:
        inspect.signature(f).bind(0, 0, 0, 0)
    except ValueError:  # some built-in functions have no signature
        pass
    except TypeError:
        raise MaskError(
            f"predicate: f must take four arguments, f(batch, head, i, j), and may ignore any of them; "
            f"got f{inspect.signature(f)}."
        ) from None
    return Predicate(f)
