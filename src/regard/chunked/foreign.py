"""Kernels of others (torch's, FlashAttention-4's) with the derivatives that they lack, by the formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ..autograd.engine import jvp, vjp
from ..compat.torch import call_function
from ..core.folded import group_bias
from ..core.spec import Spec
from ..core.tiling import TileSizes
from ..core.versions import Versions
from ..masks import Mask
from .engine import ChunkedEngine

__all__ = ["AttentionFormula", "ForeignKernel"]


@dataclass(frozen=True, eq=False)
class AttentionFormula:
    """softmax(scale · q·k + bias | mask) v, with derivatives by the formula, in strips of rows."""

    mask: Mask | None
    bias: Tensor | None
    scale: float
    read: Versions | None = None  # as in Spec

    def vjp(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """The cotangents of q, k and v, which can be differentiated again."""
        engine, x = self._engine(q, k, v)
        dq, dk, dv = vjp(engine, x, (grad.unflatten(1, x[0].shape[1:3]), None, None), (True, True, True, False))[:3]
        return (dq * self.scale).flatten(1, 2), dk, dv

    def jvp(self, q: Tensor, k: Tensor, v: Tensor, tangents: tuple[Tensor | None, ...]) -> Tensor:
        """The tangent of the output."""
        engine, x = self._engine(q, k, v)
        tq, tk, tv = tangents
        if tq is not None:
            tq = (tq * self.scale).reshape(x[0].shape)  # a view that torch.autograd can batch
        return jvp(engine, x, (tq, tk, tv, None))[0].reshape(*q.shape[:-1], v.shape[-1])

    def _engine(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[ChunkedEngine, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        batch, heads = k.shape[:2]
        spec = Spec(q.shape[2], k.shape[2], self.mask, period=max(batch, 1), read=self.read)
        query = (q * self.scale).unflatten(1, (heads, q.shape[1] // max(heads, 1)))
        return ChunkedEngine(spec, TileSizes(), False), (query, k, v, group_bias(self.bias, heads))


class ForeignKernel(torch.autograd.Function):
    """A kernel with its own first derivative, recorded as a graph inside this node; the formula gives the second.

    The inner graph holds no tensors: this node saves them, so that torch frees, checkpoints and offloads them like
    the tensors of its own functions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        formula: AttentionFormula,
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
            inside = call_function(Roots, torch.empty(0, requires_grad=True, device="cpu"), q, k, v)
            output = attend(*inside)
        ctx.formula, ctx.kept = formula, kept
        ctx.starts = [get_gradient_edge(x) if x.requires_grad else None for x in inside]
        ctx.end = get_gradient_edge(output)
        result = output.detach()
        ctx.save_for_backward(q, k, v, result, *kept)  # with the result, torch notices in-place changes of it
        kept.clear()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *ctx.formula.vjp(q, k, v, grad)
        wanted = [start for start in ctx.starts if start is not None]
        ctx.kept.extend(kept)
        try:
            found = iter(torch.autograd.grad(ctx.end, wanted, grad, retain_graph=True))
        finally:
            ctx.kept.clear()
        return None, None, *(None if start is None else next(found) for start in ctx.starts)


class Roots(torch.autograd.Function):
    """Start a graph at tensors that the graph does not hold."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = tuple(x.detach() for x in tensors)
        ctx.mark_non_differentiable(*(y for x, y in zip(tensors, found, strict=True) if not x.requires_grad))
        return found

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)
