"""Torch's kernels with every derivative: the first by their own backward, the others by the formula."""

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
    cuda_attention,
    cuda_attention_backward,
)
from ...core.problem import Problem
from ...core.versions import Versions
from .call import CUDNN, FLASH, Call

__all__ = ["attend_with_derivatives", "cuda_attention_of"]


def attend_with_derivatives(p: Problem, call: Call) -> Tensor:
    """The output of a call, as a node of the graph."""
    bias = call.mask if isinstance(p.bias, Tensor) else None
    formula = AttentionFormula(p.mask, bias, call.scale, None if p.mask is None else Versions(p.mask.sources))
    if not p.query.is_cpu:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return call._replace(query=q, key=k, value=v).attend()

        output: Tensor = call_function(ForeignKernel, formula, attend, call.query, call.key, call.value)
        return output
    mask = call.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=call.query.dtype, device="cpu").masked_fill_(~mask, -torch.inf)
    output, _ = call_function(CpuFlash, formula, mask, call.causal, call.query, call.key, call.value)
    return output


def cuda_attention_of(kernel: int, call: Call) -> Callable[[Problem], Tensor] | None:
    """Torch's CUDA kernel with its backward for calls like this one; None if torch would change the inputs first."""
    if kernel not in (FLASH, CUDNN) or call.grouped or any(x.shape[-1] % 8 for x in (call.query, call.value)):
        return None
    causal, scale = call.causal, call.scale

    def attend(p: Problem) -> Tensor:
        formula = AttentionFormula(p.mask, None, scale)
        output: Tensor = call_function(CudaAttention, formula, kernel == CUDNN, causal, p.query, p.key, p.value)
        return output

    return attend


class CudaAttention(torch.autograd.Function):
    """Torch's kernel on CUDA, and its backward; second derivatives by the formula, in strips of rows."""

    @staticmethod
    def forward(
        ctx: Any, formula: AttentionFormula, cudnn: bool, causal: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        output, tensors, ctx.rest = cuda_attention(cudnn, q, k, v, causal, formula.scale)
        ctx.formula, ctx.cudnn, ctx.causal = formula, cudnn, causal
        ctx.save_for_backward(q, k, v, output, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, None, *ctx.formula.vjp(q, k, v, grad)
        given, scale = (q, k, v, output), ctx.formula.scale
        found = cuda_attention_backward(ctx.cudnn, grad, given, tensors, ctx.rest, ctx.causal, scale)
        needs = ctx.needs_input_grad[3:]
        return None, None, None, *(x if need else None for x, need in zip(found, needs, strict=True))


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
