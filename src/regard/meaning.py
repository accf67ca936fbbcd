"""What a call means, for the derivatives that kernels of others do not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from .canonical import Canonical
from .derivatives import Mapped, applied, attention_map
from .masks import Mask
from .rule import Rule
from .tiling import Cut

__all__ = ["Foreign", "Meaning"]


@dataclass(frozen=True, eq=False)
class Meaning:
    """softmax(scale · q·k + bias | mask) v, with derivatives by the formula, strip by strip."""

    mask: Mask | None
    bias: Tensor | None
    scale: float

    def vjp(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """Cotangents of q, k, v by the formula, differentiable in turn."""
        x = self._canonical(q, k, v)
        args = (x.query, k, v, *(() if x.bias is None else (x.bias,)))
        stat = x.query.new_zeros(x.query.shape[:-1])
        dO = grad.unflatten(1, x.query.shape[1:3])
        dq, dk, dv, *_ = applied(Mapped, attention_map(x, Cut()).vjp(), *args, dO, stat, stat)
        return (dq * self.scale).flatten(1, 2), dk, dv

    def jvp(self, q: Tensor, k: Tensor, v: Tensor, tangents: tuple[Tensor | None, ...]) -> Tensor:
        """The tangent of the output by the formula."""
        x = self._canonical(q, k, v)
        tq, tk, tv = (torch.zeros_like(a) if t is None else t for a, t in zip((q, k, v), tangents, strict=True))
        args = (x.query, k, v, *(() if x.bias is None else (x.bias,)))
        moved = ((tq * self.scale).unflatten(1, x.query.shape[1:3]), tk, tv, *map(torch.zeros_like, args[3:]))
        output: Tensor = applied(Mapped, attention_map(x, Cut()).jvp(), *args, *moved)[0]
        return output.flatten(1, 2)

    def _canonical(self, q: Tensor, k: Tensor, v: Tensor) -> Canonical:
        batch, heads = k.shape[:2]
        groups = q.shape[1] // max(heads, 1)
        bias = self.bias
        if bias is not None:
            bias = bias.unflatten(1, (heads, groups)) if bias.shape[1] == heads * groups else bias.unsqueeze(1)
        rule = Rule(q.shape[2], k.shape[2], self.mask, period=batch)
        return Canonical((q * self.scale).unflatten(1, (heads, groups)), k, v, bias, (), rule)


class Foreign(torch.autograd.Function):
    """A kernel of others with its own first derivative, a graph inside this node; the second by the formula.

    The graph inside holds no tensors: what it saves is saved by this node, so that torch frees it after the backward,
    checkpoints it and moves it to other memory as it does with its own.
    """

    @staticmethod
    def forward(
        ctx: Any, meaning: Meaning, attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        kept: list[Tensor] = []

        def pack(x: Tensor) -> int:
            kept.append(x)
            return len(kept) - 1

        with torch.enable_grad(), saved_tensors_hooks(pack, kept.__getitem__):
            inside = applied(Roots, torch.empty(0, requires_grad=True), q, k, v)
            output = attend(*inside)
        ctx.meaning, ctx.kept = meaning, kept
        ctx.starts = [get_gradient_edge(x) if x.requires_grad else None for x in inside]
        ctx.end = get_gradient_edge(output)
        result = output.detach()
        ctx.save_for_backward(q, k, v, result, *kept)  # the result too: torch then sees if it was changed in place
        kept.clear()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *ctx.meaning.vjp(q, k, v, grad)
        wanted = [start for start in ctx.starts if start is not None]
        ctx.kept.extend(kept)
        try:
            found = iter(torch.autograd.grad(ctx.end, wanted, grad, retain_graph=True))
        finally:
            ctx.kept.clear()
        return None, None, *(None if start is None else next(found) for start in ctx.starts)


class Roots(torch.autograd.Function):
    """Begin a graph at tensors that the graph does not hold."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = tuple(x.detach() for x in tensors)
        ctx.mark_non_differentiable(*(y for x, y in zip(tensors, found, strict=True) if not x.requires_grad))
        return found

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)
