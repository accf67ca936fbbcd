"""Torch's kernels with every derivative: the first by their own backward, the others by the formula.

On a GPU, torch's node stays in the graph as it is, with a hook. On a CPU, where torch.func and forward mode are wanted
too, the kernel is a node of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...chunked.foreign import AttentionFormula, ForeignKernel
from ...compat.torch import (
    cached_signature,
    call_function,
    cpu_flash_attention,
    cpu_flash_attention_backward,
    node_in_backward,
    saved_tensors_are_packed,
)
from ...core.problem import Problem
from ...core.versions import Versions
from .call import Call

__all__ = ["attend_on_gpu", "attend_with_derivatives", "second_derivatives"]


def attend_with_derivatives(p: Problem, call: Call) -> Tensor:
    """The output of a call, as a node of the graph."""
    bias = call.mask if isinstance(p.bias, Tensor) else None
    formula = AttentionFormula(p.mask, bias, call.scale, None if p.mask is None else Versions(p.mask.sources))
    if not p.query.is_cpu:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return call._replace(query=q, key=k, value=v).attend()

        return attend_on_gpu(attend, call.query, call.key, call.value, formula, second_derivatives(formula))
    mask = call.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=call.query.dtype, device="cpu").masked_fill_(~mask, -torch.inf)
    output: Tensor = call_function(CpuFlash, formula, mask, call.causal, call.query, call.key, call.value)[0]
    return output


Gradients = tuple[Tensor | None, ...]


def second_derivatives(formula: AttentionFormula) -> Callable[[Gradients, Gradients], Gradients | None]:
    """A hook of torch's node that replaces its gradients by those of the formula where a graph of them is wanted."""

    def hook(found: Gradients, given: Gradients) -> Gradients | None:
        grad = given[0]
        if grad is None or not torch.is_grad_enabled():
            return None
        node = node_in_backward()
        wanted = formula.vjp(node._saved_query, node._saved_key, node._saved_value, grad)
        return *(None if x is None else y for x, y in zip(found[:3], wanted, strict=True)), *found[3:]

    return hook


def attend_on_gpu(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    formula: AttentionFormula,
    hook: Callable[[Gradients, Gradients], Gradients | None],
) -> Tensor:
    """Torch's function, whose node gets the hook.

    The hook reads saved tensors a second time. Activation checkpointing lets nobody do that, so while something packs
    saved tensors, the kernel is a node of ours.
    """
    if saved_tensors_are_packed():
        output: Tensor = call_function(ForeignKernel, formula, attend, q, k, v)
        return output
    output = attend(q, k, v)
    node = output.grad_fn
    if node is not None and type(node).__name__.startswith("Slice"):  # torch padded the dims
        node = node.next_functions[0][0]
    if node is not None and type(node).__name__.startswith("ScaledDotProduct"):  # its matrix path needs no hook
        node.register_hook(hook)
    return output


@cached_signature
class CpuFlash(torch.autograd.Function):
    """Torch's CPU kernel and its backward; every other derivative by the formula, in strips of rows."""

    @staticmethod
    def forward(
        formula: AttentionFormula, mask: Tensor | None, causal: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        return cpu_flash_attention(q, k, v, mask, causal, formula.scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.formula, mask, ctx.causal, q, k, v = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, mask, *output)
        ctx.save_for_forward(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, output, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, None, *ctx.formula.vjp(q, k, v, grad)
        saved = (q, k, v, output, lse)
        return None, None, None, *cpu_flash_attention_backward(grad, saved, mask, ctx.causal, ctx.formula.scale)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.formula.jvp(*ctx.saved_tensors[:3], tangents[3:]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """Item by item: the kernel has one batch dimension, and a mask may follow it."""
        items = [
            call_function(CpuFlash, *(x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(column) for column in zip(*items, strict=True)), (0, 0)
