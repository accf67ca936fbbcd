"""Which tokens of a sequence each rank holds, and the way there and back.

Contiguous: rank r holds the r-th part. Zigzag: the sequence is cut into twice as many parts as there are ranks, and
rank r holds the r-th from the front and the r-th from the back, so that under a causal mask all have the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.torch import call_function
from ..errors import ArgumentError, DtypeError, ShapeError
from .collectives import Swap, swapped
from .ranks import Group, Ranks, Told

__all__ = [
    "CONTIGUOUS",
    "ZIGZAG",
    "Held",
    "Piece",
    "check",
    "counted",
    "cut",
    "gather",
    "pieces",
    "positions",
    "shard",
    "sizes",
]

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"


class Piece(NamedTuple):
    """Tokens start:stop of the whole sequence, which their owner holds at here:here + size."""

    owner: int
    start: int
    stop: int
    here: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Held = tuple[tuple[Piece, ...], ...]
"""The pieces of every rank."""


def counted(held: Sequence[Sequence[Piece]]) -> list[int]:
    """How many tokens each rank holds."""
    return [sum(piece.size for piece in some) for some in held]


def check(who: str, layout: str) -> str:
    """Give a layout's name, or raise if there is none of that name."""
    if layout not in (CONTIGUOUS, ZIGZAG):
        raise ArgumentError(f"{who}: layout must be {CONTIGUOUS!r} or {ZIGZAG!r}. Got {layout!r}.")
    return layout


def sizes(length: int, count: int, layout: str = CONTIGUOUS) -> list[int]:
    """How many of `length` tokens each of `count` ranks is given by `shard`; the last parts may be shorter.

    >>> sizes(10, 4), sizes(10, 2, "zigzag")
    ([3, 3, 3, 1], [4, 6])
    """
    return counted(cut(length, count, layout))


def pieces(who: str, what: str, held: Sequence[int], layout: str) -> Held:
    """The pieces of every rank, of ranks that hold so many tokens each; pieces without a token are left out."""
    if layout == ZIGZAG:
        found = cut(sum(held), len(held), layout)
        due = counted(found)
        if list(held) != due:
            raise ShapeError(
                f"{who}: in the zigzag layout of {sum(held)} {what}, the ranks hold {due} of them. Got {list(held)}; "
                f"regard.distributed.shard(x, layout='zigzag') cuts so."
            )
    else:
        starts = [0, *accumulate(held)]
        found = [[Piece(r, starts[r], starts[r + 1], 0)] for r in range(len(held))]
    return tuple(tuple(p for p in some if p.size) for some in found)


def cut(length: int, count: int, layout: str) -> list[list[Piece]]:
    """The pieces of every rank as `shard` cuts them."""
    parts = 2 * count if layout == ZIGZAG else count
    step = max(1, -(-length // parts))
    edges = [min(at * step, length) for at in range(parts + 1)]
    if layout == CONTIGUOUS:
        return [[Piece(r, edges[r], edges[r + 1], 0)] for r in range(count)]
    both = [(Piece(r, edges[r], edges[r + 1], 0), edges[-2 - r], edges[-1 - r]) for r in range(count)]
    return [[first, Piece(first.owner, start, stop, first.size)] for first, start, stop in both]


def positions(
    length: int,
    group: Group | None = None,
    *,
    layout: str = CONTIGUOUS,
    device: torch.device | str | None = None,
) -> Tensor:
    """Give the places in a sequence of `length` tokens that this rank holds: int64, in the order in which it does."""
    who = "positions"
    ranks = Ranks.of(who, group)
    _length(who, length)
    held = cut(length, ranks.count, check(who, layout))[ranks.rank]
    return torch.cat([torch.arange(p.start, p.stop, device=device) for p in held])


def shard(x: Tensor, group: Group | None = None, *, layout: str = CONTIGUOUS, dim: int = -2) -> Tensor:
    """Take this rank's part of a tensor that every rank has whole; nothing is sent.

    Its gradient is that of this rank's part alone, as that of every weight that all ranks have.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> x = torch.arange(6.0).view(6, 1)
    >>> torch.equal(gather(shard(x)), x), positions(6)
    (True, tensor([0, 1, 2, 3, 4, 5]))
    >>> torch.distributed.destroy_process_group()
    """
    who = "shard"
    ranks = Ranks.of(who, group)
    dim = _dim(who, x, dim)
    held = cut(x.shape[dim], ranks.count, check(who, layout))[ranks.rank]
    parts = [x.narrow(dim, p.start, p.size) for p in held]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gather(x: Tensor, group: Group | None = None, *, layout: str = CONTIGUOUS, dim: int = -2) -> Tensor:
    """Put the parts of all ranks together, on every rank; a part's gradient is that of the sum of all ranks' losses."""
    who = "gather"
    ranks = Ranks.of(who, group)

    def told() -> tuple[Told, int]:
        at = _dim(who, x, dim)
        check(who, layout)
        shape = [str(size) if d != at else "…" for d, size in enumerate(x.shape)]
        facts = {
            "x": f"{str(x.dtype).removeprefix('torch.')} ({', '.join(shape)})",
            "layout": layout,
            "requires_grad": str(x.requires_grad and torch.is_grad_enabled()),
        }
        return Told((x.shape[at],), facts), at

    agreed, at = ranks.agree(told)
    held = pieces(who, "tokens", [size for (size,) in agreed.sizes], layout)
    whole: Tensor = call_function(_Gathered, ranks, held, x.movedim(at, 0))
    return whole.movedim(0, at)


class _Gathered(torch.autograd.Function):
    """(n, …) of each rank -> (N, …) on all."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, held: Held, x: Tensor) -> Tensor:
        ctx.ranks, ctx.held = ranks, held
        counts = counted(held)
        there = ranks.swap(x.expand(ranks.count, *x.shape).flatten(0, 1), [len(x)] * ranks.count, counts)
        every = [p for some in held for p in some]
        parts = sorted(zip(every, there.split([p.size for p in every]), strict=True), key=lambda pair: pair[0].start)
        return torch.cat([part for _, part in parts]) if parts else there

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor]:
        counts = counted(ctx.held)
        mine = counts[ctx.ranks.rank]
        parts = torch.cat([g[p.start : p.stop] for some in ctx.held for p in some] or [g])
        (back,) = swapped(ctx.ranks, [parts], [Swap(counts, [mine] * ctx.ranks.count)])
        return None, None, back.view(ctx.ranks.count, mine, *g.shape[1:]).sum(0)


def _dim(who: str, x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise DtypeError(f"{who}: x must be a tensor. Got {type(x).__name__}.")
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"{who}: dim must name a dimension of x. Got dim={dim} for x of shape {tuple(x.shape)}.")
    return dim % x.dim()


def _length(who: str, length: int) -> None:
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise ArgumentError(f"{who}: length must be a whole number of tokens, at least 0. Got {length!r}.")
