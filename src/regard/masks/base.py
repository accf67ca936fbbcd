"""Mask: which row may attend which key; and the algebra of masks, `&`, `|` and `~`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, NoReturn, final

import torch
from torch import Tensor

from regard.errors import MaskError
from regard.masks.index import Index
from regard.masks.picture import draw
from regard.masks.span import Span, interval
from regard.masks.tiles import FULL, HIDDEN, PARTIAL, members, tiles, whole_cover

from ..compat.torch import version_of

__all__ = ["FULL", "HIDDEN", "PARTIAL", "And", "Mask", "Not", "Or", "Span"]

BLOCK = 1 << 20
"""How many pairs are looked at together where a mask is counted."""


@dataclass(frozen=True, eq=False, repr=False)
class Mask(ABC):
    """Which of `m` keys each of `n` rows may attend: `allows` is the meaning, `span` and `cover` only make it fast."""

    factory: ClassVar[str] = "mask"
    """The name of the function that makes it."""
    items: ClassVar[Mapping[str, int]] = {}
    """Parameters that may have one entry a batch item, and how many dimensions an entry has."""
    rising: ClassVar[bool] = False
    """Whether both ends of the span never fall as i grows, whatever the parameters (`exact` alike for all rows)."""
    trivial: ClassVar[bool] = False
    """Whether it allows everything."""
    binds: ClassVar[int] = 3
    """How tightly its repr holds together: `~` 3, `&` 2, `|` 1."""

    @abstractmethod
    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        """Say for each pair whether row i sees key j: the shape of i and j, or (B, H, that) for a mask with a batch."""

    def span(self, i: Tensor, n: int, m: int) -> Span:
        """Give the interval of keys outside of which the rows `i` (1-D) see nothing, and whether it says all."""
        return interval(i, m, 0, m, exact=False)

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        """Say of each tile between the edges `rows` and `cols` whether it is HIDDEN, PARTIAL or FULL: int8 (R, C)."""
        if 0 in self.lead:
            return whole_cover(rows, cols, HIDDEN)
        first, last, common, until, exact = self._reach(rows, n, m)  # (R, 1) each
        left, right = cols[:-1], cols[1:]
        seen = (left < last) & (right > first)
        return tiles(seen, (left >= common) & (right <= until)) if exact else seen.view(torch.int8)

    def _reach(self, rows: Tensor, n: int, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        """Give the interval that some row of a block reaches into, the one that all do, and whether they say all."""
        if self.monotone:  # the first and the last row of a block say all
            size = len(rows) - 1
            lo, hi, exact = self.span(torch.cat((rows[:-1], rows[1:] - 1)), n, m)
            bounds = lo[..., :size], hi[..., size:], lo[..., size:], hi[..., :size]
        else:
            every = members(rows)  # (R, K)
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
        """Whether both ends of the span never fall as i grows."""
        return self.rising

    @property
    def lead(self) -> tuple[int, int]:
        """How many batch items and heads the mask tells apart; (1, 1) if none."""
        batch = 1
        if not self.items:
            return 1, 1
        for value in self._batched().values():
            batch = _broadcast(batch, value.shape[0], "batch items", self.factory)
        return batch, 1

    def misfit(self, n: int, m: int) -> str | None:
        """Give the reason why the mask cannot serve `n` rows and `m` keys, if there is one."""
        return None

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        """Tell the mask the sizes of the problem; with `headless`, three dimensions mean (batch, n, m)."""
        return self

    def shared(self, device: torch.device) -> Mask:
        """Give the mask with one item, or one head, where it says the same of all: a function is asked to find out."""
        return self._with_parts(lambda part: part.shared(device))

    def restrict(self, batch: slice, heads: slice) -> Mask:
        """Give the mask of some batch items and heads only."""
        if self.lead == (1, 1):
            return self
        fewer = {name: value[batch] for name, value in self._batched().items() if value.shape[0] != 1}
        return replace(self, **fewer) if fewer else self._with_parts(lambda part: part.restrict(batch, heads))

    def dense(self, n: int, m: int, device: torch.device | str | None = None) -> Tensor:
        """Write the mask out as a bool tensor, (n, m), or (B, H, n, m) for a mask with a batch."""
        self.check(n, m)
        i, j = self._positions(n, m, device)
        return self.allows(i[:, None], j[None, :], n, m).contiguous()

    def visible(self, i: Tensor, n: int, m: int) -> Tensor:
        """Count the keys that each of the rows `i` sees, in memory linear in the sequence."""
        self.check(n, m)
        lo, hi, exact = self.span(i, n, m)
        if exact:
            return (hi - lo).clamp(min=0)
        count = torch.zeros(lo.shape, dtype=torch.int64, device=i.device)
        j = torch.arange(m, device=i.device)
        pairs = max(1, BLOCK // max(1, self.lead[0] * self.lead[1]))
        height = max(1, pairs // max(1, m))
        for top in range(0, len(i), height):
            block = slice(top, top + height)
            for left in range(0, m, pairs):
                keys = j[left : left + pairs]
                count[..., block] += self.allows(i[block, None], keys[None, :], n, m).sum(-1)
        return count

    def density(self, n: int, m: int) -> float:
        """Give the share of pairs that are allowed; 0 where there is no pair."""
        i, _ = self._positions(n, 0)
        count = self.visible(i, n, m)
        return float(count.sum()) / (count.numel() * m) if count.numel() * m else 0.0

    def picture(self, n: int, m: int, width: int = 64, batch: int = 0, head: int = 0) -> str:
        """Draw the mask in text: a character a pair, or shades of how much is seen where that would be too wide."""
        self.check(n, m)
        return draw(self, n, m, width, batch, head)

    def to(self, device: torch.device | str) -> Mask:
        """Move the tensors that the mask holds."""
        if torch.compiler.is_compiling():
            return self.changed(lambda x: x.to(device))
        moved: Mask = self.remembered(("to", str(device)), lambda: self.changed(lambda x: x.to(device)))
        return moved

    def remembered(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Give what `make` made last time, if the tensors that the mask holds are still what they were."""
        tensors = self.tensors
        if any(map(torch.Tensor.is_inference, tensors)):
            return make()  # such tensors do not count their changes
        versions = tuple(version_of(t) for t in tensors)
        memory: dict[Hashable, tuple[object, Any]] = self.__dict__.setdefault("_memory", {})
        then, thing = memory.get(key, (None, None))
        if then != versions:
            thing = make()
            memory[key] = (versions, thing)
        return thing

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_memory"}

    def changed(self, change: Callable[[Tensor], Tensor]) -> Mask:
        """Give the mask with every tensor that it holds changed."""
        own = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name, None)
            if isinstance(value, Tensor):
                own[name] = change(value)
        return replace(self, **own) if own else self._with_parts(lambda part: part.changed(change))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the mask holds."""
        found: list[Tensor] = []
        for name in self.__dataclass_fields__:  # what every torch's compiler can trace
            value = getattr(self, name, None)
            if value is None or type(value) is int:
                continue
            found += [value] if isinstance(value, Tensor) else value.tensors if isinstance(value, Mask) else ()
        return tuple(found)

    @property
    def constant(self) -> bool:
        """Whether the mask is the same at every call: it holds no tensor and asks no function of the user's."""
        return not self.tensors

    def check(self, n: int, m: int) -> None:
        """Raise if the mask cannot serve `n` rows and `m` keys."""
        if n < 0 or m < 0:
            raise MaskError(f"{self.factory}: there cannot be fewer than 0 rows or keys; got n={n}, m={m}.")
        if reason := self.misfit(n, m):
            raise MaskError(reason)

    def _batched(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in self.items}
        return {k: v for k, v in found.items() if isinstance(v, Tensor) and v.dim() == self.items[k] + 1}

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
            _same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    def __hash__(self) -> int:
        return hash((type(self).__name__, *(_digest(getattr(self, field.name)) for field in fields(self))))

    def __repr__(self) -> str:
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is MISSING or isinstance(value, Tensor) or value != field.default:
                named = field.kw_only or field.default is not MISSING
                words.append(f"{field.name}={_show(value)}" if named else _show(value))
        return f"{self.factory}({', '.join(words)})"


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    left: Mask
    right: Mask
    sign: ClassVar[str]

    def __post_init__(self) -> None:
        self.lead  # noqa: B018  (raises if the two do not go together)

    @property
    def lead(self) -> tuple[int, int]:
        (a, b), (c, d) = self.left.lead, self.right.lead
        return _broadcast(a, c, "batch items", self.sign), _broadcast(b, d, "heads", self.sign)

    def misfit(self, n: int, m: int) -> str | None:
        return self.left.misfit(n, m) or self.right.misfit(n, m)

    @property
    def constant(self) -> bool:
        return self.left.constant and self.right.constant

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        return self._with_parts(lambda part: part.bind(batch, heads, headless))

    def __repr__(self) -> str:
        left = f"({self.left!r})" if self.left.binds < self.binds else f"{self.left!r}"
        right = f"({self.right!r})" if self.right.binds <= self.binds else f"{self.right!r}"
        return f"{left} {self.sign} {right}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class And(_Pair):
    """The pairs that both masks allow."""

    sign: ClassVar[str] = "&"
    binds: ClassVar[int] = 2

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


@final
@dataclass(frozen=True, eq=False, repr=False)
class Or(_Pair):
    """The pairs that one mask allows at least."""

    sign: ClassVar[str] = "|"
    binds: ClassVar[int] = 1

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        return self.left.allows(i, j, n, m) | self.right.allows(i, j, n, m)

    def span(self, i: Tensor, n: int, m: int) -> Span:
        a, b = self.left.span(i, n, m), self.right.span(i, n, m)
        no_a, no_b = a.hi <= a.lo, b.hi <= b.lo
        lo = torch.where(no_a, b.lo, torch.where(no_b, a.lo, torch.minimum(a.lo, b.lo)))
        hi = torch.where(no_a, b.hi, torch.where(no_b, a.hi, torch.maximum(a.hi, b.hi)))
        if not (a.exact or b.exact):
            return Span(lo, hi, False)
        known = torch.zeros_like(lo, dtype=torch.bool)  # rows whose hull has no hole
        if a.exact:
            known = known | (a.lo <= lo) & (a.hi >= hi)
        if b.exact:
            known = known | (b.lo <= lo) & (b.hi >= hi)
        if a.exact and b.exact:
            known = known | no_a | no_b | (a.lo <= b.hi) & (b.lo <= a.hi)
        return Span(lo, hi, bool(known.all()))

    def cover(self, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
        return torch.maximum(self.left.cover(rows, cols, n, m), self.right.cover(rows, cols, n, m))


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

    @property
    def constant(self) -> bool:
        return self.part.constant

    def bind(self, batch: int, heads: int, headless: bool = False) -> Mask:
        return self._with_parts(lambda part: part.bind(batch, heads, headless))

    def __invert__(self) -> Mask:
        return self.part

    def __repr__(self) -> str:
        return f"~({self.part!r})" if self.part.binds < self.binds else f"~{self.part!r}"


def _as_mask(other: object) -> Mask | None:
    if isinstance(other, Tensor):
        from regard.masks.dense import dense  # a mask itself, so it stands on this file

        return dense(other)
    return other if isinstance(other, Mask) else None


def _broadcast(a: int, b: int, what: str, sign: str) -> int:
    if a != b and 1 not in (a, b):
        raise MaskError(
            f"{sign}: masks go together if they have the same number of {what}, or one; got {a} and {b}. "
            f"Make them for the same batch and the same heads."
        )
    return b if a == 1 else a


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and torch.equal(a.cpu(), b.cpu()))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def _digest(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        flat = value.detach().flatten()
        return tuple(value.shape), int(flat.sum()), tuple(flat[:64].tolist())
    return hash(value)


def _show(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_meta or (value.dim() > 1 and not 0 < value.numel() <= 16):
        return f"<{str(value.dtype).removeprefix('torch.')} {'×'.join(map(str, value.shape))}>"
    if value.numel() > 16:
        return f"[{', '.join(map(str, value[:3].tolist()))}, ..., {value[-1].item()}]"
    return repr(value.tolist())
