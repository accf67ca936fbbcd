"""`sdpa`: torch's own fused kernels, where they do exactly what is asked."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...chunked.foreign import AttentionFormula
from ...compat.torch import forward_mode_is_active, is_recording, may_need_grad
from ...core.problem import Problem
from ...core.rows import Rows
from ...masks.causal import Causal
from ...masks.everything import Everything
from ..base import Backend, Prepared
from .call import KERNELS, call_of, kernel_of, probe_of
from .derivatives import attend_on_gpu, attend_with_derivatives, second_derivatives
from .fast_path import fast_path
from .refusals import refusals

__all__ = ["Sdpa", "fast_path"]


class Sdpa(Backend):
    """`torch.nn.functional.scaled_dot_product_attention`, by its fused kernels only."""

    name: ClassVar[str] = "sdpa"
    about: ClassVar[str] = "torch's fused kernels"

    def refuses(self, p: Problem) -> list[str]:
        reasons = refusals(p)
        if not reasons and not torch.compiler.is_compiling() and kernel_of(probe_of(p)) not in KERNELS:
            reasons.append(
                "torch would take its matrix path: none of its fused kernels does this, or they are switched off"
            )
        return reasons

    def detail(self, p: Problem) -> str:
        return f"torch's {KERNELS.get(kernel_of(probe_of(p)), 'matrix')} kernel"

    def run(self, p: Problem) -> Rows:
        call = call_of(p)
        if torch.compiler.is_compiling() or (is_recording() and not forward_mode_is_active()):
            output = call.attend_traced()
        elif may_need_grad(call.query, call.key, call.value):
            output = attend_with_derivatives(p, call)
        else:
            output = call.attend()
        return Rows(p.shaped(output if output.dtype == p.dtype else output.to(p.dtype)))

    def prepare(self, p: Problem) -> Prepared | None:
        plain = p.plain_scale and p.bias is None and (p.mask is None or isinstance(p.mask, Causal | Everything))
        call = call_of(p)
        if not (p.query.is_cuda and plain and call.mask is None and call.query is p.query and call.key is p.key):
            return None
        causal, scale = call.causal, call.scale
        given: dict[str, Any] = {"enable_gqa": True} if call.grouped else {}
        if scale != 1.0 / math.sqrt(p.query.shape[-1]):  # torch is slower if it is told what it would compute
            given["scale"] = scale

        def attend(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
            if causal or given:
                return F.scaled_dot_product_attention(query, key, value, None, 0.0, causal, **given)
            return F.scaled_dot_product_attention(query, key, value)  # which torch reads sooner

        if not may_need_grad(p.query, p.key, p.value):
            return attend
        formula = AttentionFormula(p.mask, None, scale)
        hook = second_derivatives(formula)
        return lambda query, key, value, *_: attend_on_gpu(attend, query, key, value, formula, hook)
