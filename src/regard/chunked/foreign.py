"""What a call means, for the derivatives that kernels of others do not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ..autograd.engine import jvp, vjp
from ..compat.torch import call_function
from ..core.spec import Spec
from ..core.tiling import TileSizes
from ..masks import Mask
from .engine import ChunkedEngine

__all__ = ["AttentionFormula", "ForeignKernel"]


@dataclass(frozen=True, eq=False)
class AttentionFormula:
    """softmax(scale · q·k + bias | mask) v, with derivatives by the formula, strip by strip."""

    mask: Mask | None
    bias: Tensor | None
    scale: float

    def vjp(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """Cotangents of q, k, v by the formula, differentiable in turn."""
        engine, x = self._engine(q, k, v)
        dq, dk, dv = vjp(engine, x, (grad.unflatten(1, x[0].shape[1:3]), None, None), (True, True, True, False))[:3]
        return (dq * self.scale).flatten(1, 2), dk, dv

    def jvp(self, q: Tensor, k: Tensor, v: Tensor, moved: tuple[Tensor | None, ...]) -> Tensor:
        """The tangent of the output by the formula."""
        engine, x = self._engine(q, k, v)
        tq, tk, tv = moved
        if tq is not None:
            tq = (tq * self.scale).unflatten(1, x[0].shape[1:3])
        return jvp(engine, x, (tq, tk, tv, None))[0].flatten(1, 2)

    def _engine(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[ChunkedEngine, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        batch, heads = k.shape[:2]
        groups = q.shape[1] // max(heads, 1)
        bias = self.bias
        if bias is not None:
            bias = bias.unflatten(1, (heads, groups)) if bias.shape[1] == heads * groups else bias.unsqueeze(1)
        spec = Spec(q.shape[2], k.shape[2], self.mask, period=batch)
        return ChunkedEngine(spec, TileSizes(), False), ((q * self.scale).unflatten(1, (heads, groups)), k, v, bias)


class ForeignKernel(torch.autograd.Function):
    """A kernel of others with its own first derivative, a graph inside this node; the second by the formula.

    The graph inside holds no tensors: what it saves is saved by this node, so that torch frees it after the backward,
    checkpoints it and moves it to other memory as it does with its own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        meaning: AttentionFormula,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        kept: list[Tensor] = []

        def pack(x: Tensor) -> int:
            kept.append(x)
            return len(kept) - 1

        with torch.enable_grad(), saved_tensors_hooks(pack, kept.__getitem__):
            inside = call_function(Roots, torch.empty(0, requires_grad=True), q, k, v)
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
