"""Differentiable collectives: every gradient is that of the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.torch import call_function
from .ranks import Ranks

__all__ = ["Splits", "all_to_all", "replicate"]


class Splits(NamedTuple):
    """How many rows of a tensor go to each rank, and how many come from each rank."""

    sends: list[int]
    receives: list[int]


def all_to_all(ranks: Ranks, tensors: Sequence[Tensor], splits: Sequence[Splits]) -> tuple[Tensor, ...]:
    """Send rows of tensors to every rank, and return those that arrive, in rank order.

    All tensors go through one function, so that every rank exchanges all of them in the backward pass, whichever of
    them its own loss uses.
    """
    received: tuple[Tensor, ...] = call_function(_AllToAll, ranks, tuple(splits), *tensors)
    return received


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, splits: tuple[Splits, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.splits = ranks, splits
        ctx.needs = ctx.needs_input_grad[2:]  # the same on all ranks, because requires_grad is
        return tuple(ranks.all_to_all(x, *split) for x, split in zip(tensors, splits, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = [
            (g, Splits(split.receives, split.sends))
            for g, split, need in zip(grads, ctx.splits, ctx.needs, strict=True)
            if need
        ]
        back = iter(all_to_all(ctx.ranks, [g for g, _ in needed], [split for _, split in needed]))
        return None, None, *(next(back) if need else None for need in ctx.needs)


def replicate(ranks: Ranks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors that are the same on all ranks; in the backward pass their gradients are summed over the ranks.

    All tensors go through one function, so that the ranks communicate once, at the same point of the backward pass.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return tuple(tensors)
    replicated: tuple[Tensor, ...] = call_function(_Replicate, ranks, *tensors)
    return replicated


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.needs = ranks, [t.requires_grad for t in tensors]
        ctx.like = [(t.shape, t.dtype) for t in tensors]
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = [g for g, need in zip(grads, ctx.needs, strict=True) if need]
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in needed) else torch.float32
        total: Tensor = call_function(_AllReduce, ctx.ranks, torch.cat([g.flatten().to(dtype) for g in needed]))
        rest = iter(total.split([g.numel() for g in needed]))
        return None, *(
            next(rest).view(shape).to(dtype) if need else None
            for need, (shape, dtype) in zip(ctx.needs, ctx.like, strict=True)
        )


class _AllReduce(torch.autograd.Function):
    """The sum over the ranks, on each of them; its gradient is the same sum."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, x: Tensor) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        total: Tensor = call_function(_AllReduce, ctx.ranks, g)
        return None, total
