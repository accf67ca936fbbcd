"""Exchanges between ranks as functions with derivatives: every gradient is that of the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.torch import call_function
from .ranks import Ranks

__all__ = ["Swap", "replicated", "swapped"]


class Swap(NamedTuple):
    """How many rows of a tensor go to each rank, and how many come from each."""

    sends: list[int]
    receives: list[int]


def swapped(ranks: Ranks, tensors: Sequence[Tensor], swaps: Sequence[Swap]) -> tuple[Tensor, ...]:
    """Send rows of tensors to every rank, and give those that came, in rank order.

    All tensors together, so that on the way back every rank exchanges all of them, whatever its own loss reads.
    """
    there: tuple[Tensor, ...] = call_function(_Swapped, ranks, tuple(swaps), *tensors)
    return there


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, swaps: tuple[Swap, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.swaps = ranks, swaps
        ctx.wanted = ctx.needs_input_grad[2:]  # alike on all ranks, as the tensors are
        return tuple(ranks.swap(x, *swap) for x, swap in zip(tensors, swaps, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        some = [
            (g, Swap(swap.receives, swap.sends)) for g, swap, w in zip(grads, ctx.swaps, ctx.wanted, strict=True) if w
        ]
        back = iter(swapped(ctx.ranks, [g for g, _ in some], [swap for _, swap in some]))
        return None, None, *(next(back) if w else None for w in ctx.wanted)


def replicated(ranks: Ranks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors that every rank has alike, as they are; on the way back their gradients are added up over the ranks.

    All of them together, so that the ranks meet once, and at the same point of their backward passes.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return tuple(tensors)
    found: tuple[Tensor, ...] = call_function(_Replicated, ranks, *tensors)
    return found


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.wanted = ranks, [t.requires_grad for t in tensors]
        ctx.like = [(t.shape, t.dtype) for t in tensors]
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = [g for g, want in zip(grads, ctx.wanted, strict=True) if want]
        wide = torch.float64 if any(g.dtype == torch.float64 for g in given) else torch.float32
        total: Tensor = call_function(_Summed, ctx.ranks, torch.cat([g.flatten().to(wide) for g in given]))
        rest = iter(total.split([g.numel() for g in given]))
        return None, *(
            next(rest).view(shape).to(dtype) if want else None
            for want, (shape, dtype) in zip(ctx.wanted, ctx.like, strict=True)
        )


class _Summed(torch.autograd.Function):
    """The sum over the ranks, on each of them; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, x: Tensor) -> Tensor:
        ctx.ranks = ranks
        return ranks.total(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        found: Tensor = call_function(_Summed, ctx.ranks, g)
        return None, found
