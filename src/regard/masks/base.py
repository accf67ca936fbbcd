"""Mask: which row may attend to which key; and the algebra of masks, `&`, `|` and `~`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, NoReturn, TypeVar, final

import torch
from torch import Tensor

from regard.compat.torch import is_wrapped, lacks_values, outside_transforms, versions_of
from regard.errors import ArgumentError, MaskError
from regard.masks.index import Index, broadcast_sizes
from regard.masks.lists import Lists, joined, narrower
from regard.masks.picture import cell_edges, draw_pairs, draw_shades, html_picture
from regard.masks.span import Span, interval
from regard.masks.tiles import FULL, HIDDEN, PARTIAL, block_indices, tile_states, uniform_cover
from regard.masks.transfer import Arrival, copy_by_value, copy_to
from regard.masks.values import digest, same_value, shown_value

__all__ = ["CONVERTERS", "FULL", "HIDDEN", "PARTIAL", "And", "Mask", "Not", "Or", "Span"]

Made = TypeVar("Made")
_FOUND = ("_memory", "_tensors", "_constant")  # attributes that are found anew in a copy
PAIRS_AT_ONCE = 1 << 20
"""How many pairs are evaluated together when visible pairs are counted."""


@dataclass(frozen=True, eq=False, repr=False)
class Mask(ABC):
    """Which of `m` keys each of `n` rows may attend to: `allows` defines it, `span` and `cover` only make it fast."""

    factory: ClassVar[str] = "mask"
    """The name of the function that creates it."""
    items: ClassVar[Mapping[str, int]] = {}
    """Parameters that may have one entry per batch item, and how many dimensions an entry has."""
    rising: ClassVar[bool] = False
    """Whether for all parameters the ends of the span never decrease as i grows, and `exact` is the same everywhere."""
    trivial: ClassVar[bool] = False
    """Whether it allows every pair."""
    precedence: ClassVar[int] = 3
    """The precedence of the operator in its repr: `~` 3, `&` 2, `|` 1."""

    @abstractmethod
    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        """Say for each pair whether row i sees key j: the shape of i and j, after (B, H) for a mask with a batch."""

    def span(self, i: Tensor, n: int, m: int) -> Span:
        """Give the interval that holds every key that the rows `i` (1-D) see, and whether they see all of it."""
        return interval(i, m, 0, m, exact=False)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        """Classify each tile between the edges `rows` and `cols` as HIDDEN, PARTIAL or FULL: int8 (R, C)."""
        if 0 in self.lead:
            return uniform_cover(rows, cols, HIDDEN)
        first, last, common, until, exact = self._block_spans(rows, n, m)  # (R, 1) each
        left, right = cols[:-1], cols[1:]
        seen = (left < last) & (right > first)
        return tile_states(seen, (left >= common) & (right <= until)) if exact else seen.view(torch.int8)

    def listed(self, n: int, m: int) -> Lists | None:
        """Give for each row a list that holds every key that it sees; None if the mask has no lists."""
        return None

    def _block_spans(self, rows: Tensor, n: int, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        """Give the hull and the intersection of the spans in each block of rows, and whether the spans are exact."""
        if self.monotone:  # the first and the last row of a block suffice
            size = len(rows) - 1
            lo, hi, exact = self.span(torch.cat((rows[:-1], rows[1:] - 1)), n, m)
            bounds = lo[..., :size], hi[..., size:], lo[..., size:], hi[..., :size]
        else:
            every = block_indices(rows)  # (R, K)
            lo, hi, exact = self.span(every.flatten(), n, m)
            lo, hi = lo.reshape(*lo.shape[:-1], *every.shape), hi.reshape(*hi.shape[:-1], *every.shape)
            empty = hi <= lo
            bounds = lo.masked_fill(empty, m).amin(-1), hi.masked_fill(empty, 0).amax(-1), lo.amax(-1), hi.amin(-1)
        first, last, common, until = bounds
        if first.dim() == 3:
            first, last, common, until = first.amin((0, 1)), last.amax((0, 1)), common.amax((0, 1)), until.amin((0, 1))
        return first[:, None], last[:, None], common[:, None], until[:, None], exact

    @property
    def monotone(self) -> bool:
        """Whether the ends of the span never decrease as i grows."""
        return self.rising

    @property
    def lead(self) -> tuple[int, int]:
        """How many batch items and heads have a mask of their own; (1, 1) if all share one."""
        batch = 1
        for name, dims in self.items.items():
            value = getattr(self, name)
            if value is not None and type(value) is not int and isinstance(value, Tensor) and value.dim() == dims + 1:
                batch = broadcast_sizes(batch, value.shape[0], "batch items", self.factory)
        return batch, 1

    def misfit(self, n: int, m: int) -> str | None:
        """Say why the mask does not fit `n` rows and `m` keys, or None if it does."""
        return None

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        """Give the mask for these sizes of a problem; with `headless`, three dimensions mean (batch, n, m)."""
        return self

    def shared(self, device: torch.device) -> Mask:
        """Give the mask with one item, or one head, where all are alike; a predicate is called once to find out."""
        return self._with_parts(lambda part: part.shared(device))

    def restrict(self, batch: slice, heads: slice) -> Mask:
        """Give the mask of these batch items and heads only."""
        if self.lead == (1, 1):
            return self
        fewer: dict[str, Tensor] = {}
        for name, dims in self.items.items():
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.dim() == dims + 1 and len(value) != 1:
                fewer[name] = value[batch]
        return replace(self, **fewer) if fewer else self._with_parts(lambda part: part.restrict(batch, heads))

    def dense(self, n: int, m: int, device: torch.device | str | None = None) -> Tensor:
        """Write the mask out as a bool tensor: (n, m), or (B, H, n, m) for a mask with a batch."""
        self.check(n, m)
        i, j = self._positions(n, m, device)
        return self.allows(i[:, None], j[None, :], n, m).contiguous()

    def visible(self, i: Tensor, n: int, m: int) -> Tensor:
        """Count the keys that each of the rows `i` sees, in memory linear in the sequence length."""
        self.check(n, m)
        lo, hi, exact = self.span(i, n, m)
        if exact:
            return (hi - lo).clamp(min=0)
        count = torch.zeros(lo.shape, dtype=torch.int64, device=i.device)
        j = torch.arange(m, device=i.device)
        pairs = max(1, PAIRS_AT_ONCE // max(1, self.lead[0] * self.lead[1]))
        height = max(1, pairs // max(1, m))
        for top in range(0, len(i), height):
            block = slice(top, top + height)
            for left in range(0, m, pairs):
                keys = j[left : left + pairs]
                count[..., block] += self.allows(i[block, None], keys[None, :], n, m).sum(-1)
        return count

    def density(self, n: int, m: int) -> float:
        """Give the share of pairs that are allowed; 0 if there is no pair."""
        self.check(n, m)
        count = self.visible(self._positions(n, 0, None if self.tensors else "cpu")[0], n, m)
        return float(count.sum()) / (count.numel() * m) if count.numel() * m else 0.0

    def picture(self, n: int, m: int, width: int = 64, batch: int = 0, head: int = 0) -> str:
        """Draw the mask in text: one character per pair, or shades of the visible share if `width` is too small."""
        self.check(n, m)
        if width < 1:
            raise ArgumentError(f"picture: width must be at least 1; got {width}.")
        for name, at, size in (("batch", batch, self.lead[0]), ("head", head, self.lead[1])):
            if at < 0 or (size != 1 and at >= size):
                raise ArgumentError(f"picture: {name} must be from 0 to {size - 1}; got {at}.")
        if n == 0 or m == 0:
            return ""
        bound = self.bind(max(self.lead[0], batch + 1), max(self.lead[1], head + 1))  # sizes for a predicate
        one = bound.restrict(slice(batch, batch + 1), slice(head, head + 1))
        if max(n, m) <= width:
            return draw_pairs(one.dense(n, m, None if one.tensors else "cpu").reshape(n, m))
        return draw_shades(one._tile_densities(*cell_edges(n, m, width), n, m))

    _repr_html_ = html_picture

    def _tile_densities(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        """Give the share of allowed pairs in each tile; only rows of tiles that `cover` leaves open are evaluated."""
        states = self.cover(rows, cols, n, m)
        densities = states.double() / FULL
        keys = torch.arange(m, device="cpu")[None, :]
        height = max(1, PAIRS_AT_ONCE // m)
        for r in (states == PARTIAL).any(1).nonzero().flatten().tolist():
            seen = torch.zeros(m + 1, dtype=torch.int64, device="cpu")
            block = torch.arange(int(rows[r]), int(rows[r + 1]), device="cpu")[:, None]
            for top in range(0, len(block), height):
                seen[1:] += self.allows(block[top : top + height], keys, n, m).reshape(-1, m).sum(0)
            densities[r] = seen.cumsum(0)[cols].diff() / (cols.diff() * len(block))
        return densities

    def to(self, device: torch.device | str) -> Mask:
        """Move the tensors that the mask holds; the host does not wait for copies to a GPU."""
        if torch.compiler.is_compiling():
            return self.changed(lambda x: x.to(device))
        return self._copied("to", torch.device(device), copy_to)

    def placed(self, device: torch.device) -> Mask:
        """Give the mask on a device for passes that change no tensor: the same few numbers have one copy there."""
        return self._copied("placed", device, copy_by_value)

    def _copied(self, how: str, device: torch.device, copy: Callable[[Tensor, torch.device], Tensor]) -> Mask:
        moved = self.remembered((how, str(device)), lambda: self._moved(device, copy))
        arrival: Arrival = moved.latest("arrival", None, lambda: Arrival.of(moved.tensors))
        arrival.wait(moved.tensors)
        return moved

    def _moved(self, device: torch.device, copy: Callable[[Tensor, torch.device], Tensor] = copy_to) -> Mask:
        """Give the mask with its tensors copied to a device."""
        own = {name: copy(value, device) for name, value in self._own_tensors()}
        return replace(self, **own) if own else self._with_parts(lambda part: part._moved(device, copy))

    def remembered(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Give the cached result of `make`, computed again if a tensor of the mask has changed."""
        tensors = self.tensors
        versions = versions_of(tensors)
        if -1 in versions or lacks_values(*tensors):
            return make()  # inference tensors have no version counter, and what is made of fake ones is fake
        memory: dict[Hashable, tuple[object, Made]] = self.__dict__.setdefault("_memory", {})
        if key not in memory or memory[key][0] != versions:
            plain = not any(map(is_wrapped, tensors))
            with outside_transforms() if plain else nullcontext():  # what is made in a transform ends with it
                memory[key] = (versions, make())
        return memory[key][1]

    def latest(self, name: str, argument: object, make: Callable[[], Any]) -> Any:
        """Give the last result of this name if its argument is the same, whatever happened to the tensors since."""
        memory: dict[Hashable, tuple[object, Any]] = self.__dict__.setdefault("_memory", {})
        if name not in memory or memory[name][0] != argument:
            memory[name] = (argument, make())
        return memory[name][1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _FOUND}

    def changed(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """Give the mask with `change` applied to every tensor that it holds."""
        own = {name: change(value) for name, value in self._own_tensors()}
        return replace(self, **own) if own else self._with_parts(lambda part: part.changed(change))

    def _own_tensors(self) -> list[tuple[str, Tensor]]:
        found = [(name, getattr(self, name, None)) for name in self.__dataclass_fields__]
        return [(name, value) for name, value in found if isinstance(value, Tensor)]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the mask holds."""
        if torch.compiler.is_compiling():
            return self._find_tensors()
        found: tuple[Tensor, ...] | None = self.__dict__.get("_tensors")
        if found is None:
            found = self.__dict__["_tensors"] = self._find_tensors()
        return found

    def _find_tensors(self, of_sources: bool = False) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        # The compiler of every torch release can trace the first.
        for name in self.__dataclass_fields__ if torch.compiler.is_compiling() else _names(type(self)):
            value = getattr(self, name, None)
            if value is None or type(value) is int:
                continue
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, Mask):
                found += value.sources if of_sources else value.tensors
        return tuple(found)

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """All tensors that decide the mask: those that it holds, and those that the function of a predicate reads."""
        return () if self.constant else self._find_tensors(of_sources=True)

    @property
    def constant(self) -> bool:
        """Whether the mask is the same at every call: it holds no tensor and calls no function of the user."""
        found: bool | None = None if torch.compiler.is_compiling() else self.__dict__.get("_constant")
        if found is None:
            found = len(self.tensors) == 0
            if found:
                parts = [getattr(self, name, None) for name in self.__dataclass_fields__]
                found = all(part.constant for part in parts if isinstance(part, Mask))
            if not torch.compiler.is_compiling():
                self.__dict__["_constant"] = found
        return found

    def check(self, n: int, m: int) -> None:
        """Raise if the mask does not fit `n` rows and `m` keys."""
        if not (hasattr(n, "__index__") and hasattr(m, "__index__") and n >= 0 and m >= 0):
            raise MaskError(f"{self.factory}: n and m must be whole numbers of at least 0; got n={n!r}, m={m!r}.")
        if reason := self.misfit(n, m):
            raise MaskError(reason)

    def _with_parts(self, change: Callable[[Mask], Mask]) -> Mask:
        changed: dict[str, Mask] = {}
        for name in self.__dataclass_fields__:
            part = getattr(self, name, None)
            if isinstance(part, Mask):
                new = change(part)
                if new is not part:
                    changed[name] = new
        return replace(self, **changed) if changed else self

    def _positions(self, n: int, m: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        if device is None and self.tensors:
            device = self.tensors[0].device
        return torch.arange(n, device=device), torch.arange(m, device=device)

    def __and__(self, other: Mask | Tensor) -> Mask:
        that = _as_mask(other)
        if that is None:
            return NotImplemented
        return that if self.trivial else self if that.trivial else And(self, that)

    def __or__(self, other: Mask | Tensor) -> Mask:
        that = _as_mask(other)
        if that is None:
            return NotImplemented
        return self if self.trivial else that if that.trivial else Or(self, that)

    def __rand__(self, other: Tensor) -> Mask:
        that = _as_mask(other)
        return NotImplemented if that is None else that & self

    def __ror__(self, other: Tensor) -> Mask:
        that = _as_mask(other)
        return NotImplemented if that is None else that | self

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> NoReturn:
        raise MaskError("mask: a mask is neither true nor false; compose masks with & | ~, not with and, or, not.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        if self is other:
            return True
        return type(self) is type(other) and all(
            same_value(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    def __hash__(self) -> int:
        return hash((type(self).__name__, *(digest(getattr(self, field.name)) for field in fields(self))))

    def __repr__(self) -> str:
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if not field.repr:
                continue
            if field.default is MISSING or isinstance(value, Tensor) or value != field.default:
                named = field.kw_only or field.default is not MISSING
                words.append(f"{field.name}={shown_value(value)}" if named else shown_value(value))
        return f"{self.factory}({', '.join(words)})"


@dataclass(frozen=True, eq=False, repr=False)
class _Binary(Mask):
    left: Mask
    right: Mask
    sign: ClassVar[str]

    def __post_init__(self) -> None:
        self.lead  # noqa: B018  (raises if the two cannot be combined)

    @property
    def lead(self) -> tuple[int, int]:
        (a, b), (c, d) = self.left.lead, self.right.lead
        return broadcast_sizes(a, c, "batch items", self.sign), broadcast_sizes(b, d, "heads", self.sign)

    def _find_tensors(self, of_sources: bool = False) -> tuple[Tensor, ...]:
        return self.sources if of_sources else self.left.tensors + self.right.tensors

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return self.left.sources + self.right.sources

    def misfit(self, n: int, m: int) -> str | None:
        return self.left.misfit(n, m) or self.right.misfit(n, m)

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        left, right = self.left.bind(batch, heads, headless), self.right.bind(batch, heads, headless)
        return self if left is self.left and right is self.right else replace(self, left=left, right=right)

    def __repr__(self) -> str:
        left = f"({self.left!r})" if self.left.precedence < self.precedence else f"{self.left!r}"
        right = f"({self.right!r})" if self.right.precedence <= self.precedence else f"{self.right!r}"
        return f"{left} {self.sign} {right}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class And(_Binary):
    """The pairs that both of two masks allow."""

    sign: ClassVar[str] = "&"
    precedence: ClassVar[int] = 2

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        return self.left.allows(i, j, n, m) & self.right.allows(i, j, n, m)

    @property
    def monotone(self) -> bool:
        return self.left.monotone and self.right.monotone

    def span(self, i: Tensor, n: int, m: int) -> Span:
        a, b = self.left.span(i, n, m), self.right.span(i, n, m)
        return Span(torch.maximum(a.lo, b.lo), torch.minimum(a.hi, b.hi), a.exact and b.exact)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        return torch.minimum(self.left.cover(rows, cols, n, m), self.right.cover(rows, cols, n, m))

    def listed(self, n: int, m: int) -> Lists | None:
        return narrower(self.left.listed(n, m), self.right.listed(n, m), self.left, self.right)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Or(_Binary):
    """The pairs that at least one of two masks allows."""

    sign: ClassVar[str] = "|"
    precedence: ClassVar[int] = 1

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        return self.left.allows(i, j, n, m) | self.right.allows(i, j, n, m)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        a, b = self.left.span(i, n, m), self.right.span(i, n, m)
        no_a, no_b = a.hi <= a.lo, b.hi <= b.lo
        lo = torch.where(no_a, b.lo, torch.where(no_b, a.lo, torch.minimum(a.lo, b.lo)))
        hi = torch.where(no_a, b.hi, torch.where(no_b, a.hi, torch.maximum(a.hi, b.hi)))
        if not (a.exact or b.exact):
            return Span(lo, hi, False)
        known = torch.zeros_like(lo, dtype=torch.bool)  # rows whose hull has no gap
        if a.exact:
            known = known | (a.lo <= lo) & (a.hi >= hi)
        if b.exact:
            known = known | (b.lo <= lo) & (b.hi >= hi)
        if a.exact and b.exact:
            known = known | no_a | no_b | (a.lo <= b.hi) & (b.lo <= a.hi)
        return Span(lo, hi, bool(known.all()))

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        return torch.maximum(self.left.cover(rows, cols, n, m), self.right.cover(rows, cols, n, m))

    def listed(self, n: int, m: int) -> Lists | None:
        a = self.left.listed(n, m)
        return None if a is None else joined(a, self.right.listed(n, m), self)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """The pairs that a mask does not allow."""

    part: Mask

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        return ~self.part.allows(i, j, n, m)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        lo, hi, exact = self.part.span(i, n, m)
        if not exact:
            return Span(torch.zeros_like(lo), torch.full_like(hi, m), False)
        empty, start, stop = hi <= lo, lo <= 0, hi >= m
        first = torch.where(~empty & start, hi, 0)
        last = torch.where(~empty & stop & ~start, lo, m)
        return Span(first, last, bool((empty | start | stop).all()))

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        return FULL - self.part.cover(rows, cols, n, m)

    @property
    def lead(self) -> tuple[int, int]:
        return self.part.lead

    def misfit(self, n: int, m: int) -> str | None:
        return self.part.misfit(n, m)

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        return self._with_parts(lambda part: part.bind(batch, heads, headless))

    def __invert__(self) -> Mask:
        return self.part

    def __repr__(self) -> str:
        return f"~({self.part!r})" if self.part.precedence < self.precedence else f"~{self.part!r}"


CONVERTERS: dict[type, Callable[[Any], Mask]] = {}
"""Other operands that `&` and `|` accept, by type, and how each becomes a mask; `masks.dense` registers tensors."""


@cache
def _names(kind: type[Mask]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _as_mask(other: object) -> Mask | None:
    if isinstance(other, Mask):
        return other
    for kind, convert in CONVERTERS.items():
        if isinstance(other, kind):
            return convert(other)
    return None
