"""Which tokens of a sequence each rank holds, and how to shard and gather them.

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
from .collectives import Splits, all_to_all
from .ranks import Group, RankInfo, Ranks

__all__ = [
    "CONTIGUOUS",
    "ZIGZAG",
    "Sharding",
    "TokenRange",
    "check_layout",
    "gather",
    "positions",
    "shard",
    "shard_sizes",
    "sharding_of",
    "split_sequence",
    "tokens_per_rank",
]

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"


class TokenRange(NamedTuple):
    """Tokens start:stop of the whole sequence; their owner holds them at local_start:local_start + size."""

    owner: int
    start: int
    stop: int
    local_start: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Sharding = tuple[tuple[TokenRange, ...], ...]
"""The token ranges of every rank."""


def tokens_per_rank(sharding: Sequence[Sequence[TokenRange]]) -> list[int]:
    """How many tokens each rank holds."""
    return [sum(tokens.size for tokens in ranges) for ranges in sharding]


def check_layout(who: str, layout: str) -> None:
    """Raise if there is no layout of this name."""
    if layout not in (CONTIGUOUS, ZIGZAG):
        raise ArgumentError(f"{who}: layout must be {CONTIGUOUS!r} or {ZIGZAG!r}. Got {layout!r}.")


def shard_sizes(length: int, count: int, layout: str = CONTIGUOUS) -> list[int]:
    """How many of `length` tokens `shard` gives to each of `count` ranks; the last parts may be shorter.

    >>> shard_sizes(10, 4), shard_sizes(10, 2, "zigzag")
    ([3, 3, 3, 1], [4, 6])
    """
    return tokens_per_rank(split_sequence(length, count, layout))


def sharding_of(who: str, what: str, sizes: Sequence[int], layout: str) -> Sharding:
    """The token ranges of ranks that hold `sizes` tokens each; empty ranges are left out."""
    if layout == ZIGZAG:
        ranges = split_sequence(sum(sizes), len(sizes), layout)
        expected = tokens_per_rank(ranges)
        if list(sizes) != expected:
            raise ShapeError(
                f"{who}: in the zigzag layout of {sum(sizes)} {what}, the ranks hold {expected} of them. "
                f"Got {list(sizes)}; regard.distributed.shard(x, layout='zigzag') cuts this way."
            )
    else:
        starts = [0, *accumulate(sizes)]
        ranges = [[TokenRange(r, starts[r], starts[r + 1], 0)] for r in range(len(sizes))]
    return tuple(tuple(tokens for tokens in of_rank if tokens.size) for of_rank in ranges)


def split_sequence(length: int, count: int, layout: str) -> list[list[TokenRange]]:
    """The token ranges of every rank, as `shard` cuts them."""
    parts = 2 * count if layout == ZIGZAG else count
    step = max(1, -(-length // parts))
    edges = [min(at * step, length) for at in range(parts + 1)]
    if layout == CONTIGUOUS:
        return [[TokenRange(r, edges[r], edges[r + 1], 0)] for r in range(count)]
    front = [TokenRange(r, edges[r], edges[r + 1], 0) for r in range(count)]
    return [[first, TokenRange(r, edges[-2 - r], edges[-1 - r], first.size)] for r, first in enumerate(front)]


def positions(
    length: int,
    group: Group | None = None,
    *,
    layout: str = CONTIGUOUS,
    device: torch.device | str | None = None,
) -> Tensor:
    """Give the positions in a sequence of `length` tokens that this rank holds: int64, in local order."""
    who = "positions"
    ranks = Ranks.of(who, group)
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise ArgumentError(f"{who}: length must be a whole number of tokens, at least 0. Got {length!r}.")
    check_layout(who, layout)
    mine = split_sequence(length, ranks.count, layout)[ranks.rank]
    return torch.cat([torch.arange(tokens.start, tokens.stop, device=device) for tokens in mine])


def shard(x: Tensor, group: Group | None = None, *, layout: str = CONTIGUOUS, dim: int = -2) -> Tensor:
    """Take this rank's part of a tensor that every rank holds whole; nothing is sent.

    Its gradient is that of this rank's part only, as for every weight that all ranks hold.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> x = torch.arange(6.0).view(6, 1)
    >>> torch.equal(gather(shard(x)), x), positions(6)
    (True, tensor([0, 1, 2, 3, 4, 5]))
    >>> torch.distributed.destroy_process_group()
    """
    who = "shard"
    ranks = Ranks.of(who, group)
    dim = _check_dim(who, x, dim)
    check_layout(who, layout)
    mine = split_sequence(x.shape[dim], ranks.count, layout)[ranks.rank]
    parts = [x.narrow(dim, tokens.start, tokens.size) for tokens in mine]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gather(x: Tensor, group: Group | None = None, *, layout: str = CONTIGUOUS, dim: int = -2) -> Tensor:
    """Join the parts of all ranks, on every rank; a part's gradient is that of the sum of all ranks' losses."""
    who = "gather"
    ranks = Ranks.of(who, group)

    def prepare() -> tuple[RankInfo, int]:
        at = _check_dim(who, x, dim)
        check_layout(who, layout)
        shape = [str(size) if d != at else "…" for d, size in enumerate(x.shape)]
        facts = {
            "x": f"{str(x.dtype).removeprefix('torch.')} ({', '.join(shape)})",
            "layout": layout,
            "requires_grad": str(x.requires_grad and torch.is_grad_enabled()),
        }
        return RankInfo((x.shape[at],), facts), at

    info, at = ranks.agree(prepare)
    sharding = sharding_of(who, "tokens", [size for (size,) in info.sizes], layout)
    whole: Tensor = call_function(_Gather, ranks, sharding, x.movedim(at, 0))
    return whole.movedim(0, at)


class _Gather(torch.autograd.Function):
    """(n, …) on each rank -> (N, …) on all."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sharding: Sharding, x: Tensor) -> Tensor:
        ctx.ranks, ctx.sharding = ranks, sharding
        counts = tokens_per_rank(sharding)
        received = ranks.all_to_all(x.expand(ranks.count, *x.shape).flatten(0, 1), [len(x)] * ranks.count, counts)
        ranges = [tokens for of_rank in sharding for tokens in of_rank]
        parts = zip(ranges, received.split([tokens.size for tokens in ranges]), strict=True)
        ordered = [part for _, part in sorted(parts, key=lambda pair: pair[0].start)]
        return torch.cat(ordered) if ordered else received

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor]:
        counts = tokens_per_rank(ctx.sharding)
        mine = counts[ctx.ranks.rank]
        parts = torch.cat([g[tokens.start : tokens.stop] for of_rank in ctx.sharding for tokens in of_rank] or [g])
        (back,) = all_to_all(ctx.ranks, [parts], [Splits(counts, [mine] * ctx.ranks.count)])
        return None, None, back.view(ctx.ranks.count, mine, *g.shape[1:]).sum(0)


def _check_dim(who: str, x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise DtypeError(f"{who}: x must be a tensor. Got {type(x).__name__}.")
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"{who}: dim must be a dimension of x. Got dim={dim} for x of shape {tuple(x.shape)}.")
    return dim % x.dim()
