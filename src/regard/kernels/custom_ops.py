"""The fused passes as operators of torch.library, for torch.compile alone: eager mode has an autograd.Function.

An operator gives forward-mode AD a silent zero tangent, and has no second derivative; so nothing outside of a compiled
graph calls these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.spec import Spec
from .block_lists import BlockMask
from .engine import Inputs, KernelSpec, backward, forward

__all__ = ["attend"]

_TENSORS = 7  # of the arguments that may have derivatives
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? factor, Tensor? sink, Tensor? vector, "
    "Tensor? lo, Tensor? hi, float scale, float softcap, int kind, int offset, int inner, bool observed"
)
_COUNT = len(_ARGUMENTS.split(", "))
_FOUND = "Tensor output, Tensor lse, Tensor entropy, Tensor peak, Tensor spread"
_COTANGENTS = "Tensor d_output, Tensor? d_lse, Tensor? d_entropy"


def _kernel_spec(
    x: Inputs,
    lo: Tensor | None,
    hi: Tensor | None,
    scale: float,
    softcap: float,
    kind: int,
    offset: int,
    inner: int,
    observed: bool,
) -> KernelSpec:
    n, m = x.query.shape[2], x.key.shape[2]
    lead = (1, 1) if lo is None else (lo.shape[0], lo.shape[1])
    spec = Spec(n, m, None, softcap or None, inner=inner, period=x.query.shape[0])
    return KernelSpec(spec, BlockMask(n, m, lo, hi, lead=lead, inner=inner), kind, offset, scale, observed)


def _attend(*args: Any) -> tuple[Tensor, ...]:
    """Output, lse, entropy, largest logit and spread: (L, H, N, …)."""
    x = Inputs(*args[:_TENSORS])
    return forward(_kernel_spec(x, *args[_TENSORS:]), x)


attend = torch.library.custom_op(
    "regard::attend", _attend, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    stats = [query.new_empty(rows, dtype=torch.float32) for _ in range(4)]
    return value.new_empty(*rows, value.shape[3]), stats[0], stats[1], stats[2], stats[3]


def _attend_backward(*args: Any) -> list[Tensor]:
    """The gradients of the tensors, empty where none is needed."""
    given, found, cotangents, needs = args[:_COUNT], args[_COUNT : _COUNT + 5], args[_COUNT + 5 : -1], args[-1]
    x = Inputs(*given[:_TENSORS])
    grads = backward(_kernel_spec(x, *given[_TENSORS:]), x, tuple(needs), found, cotangents)
    return [x.query.new_empty(0) if g is None else g for g in grads]


attend_backward = torch.library.custom_op(
    "regard::attend_backward",
    _attend_backward,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, {_FOUND}, {_COTANGENTS}, bool[] needs) -> Tensor[]",
)


@attend_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    tensors, needs = args[:_TENSORS], args[-1]
    return [
        tensors[0].new_empty(0) if t is None or not need else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, need in zip(tensors, needs, strict=True)
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[: _TENSORS + 2], *output)
    ctx.rest = inputs[_TENSORS + 2 :]
    ctx.mark_non_differentiable(*output[3:])


def _pull(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    saved, observed = ctx.saved_tensors, ctx.rest[-1]
    d_output, d_lse, d_entropy = cotangents[:3]
    needs = list(ctx.needs_input_grad[:_TENSORS])
    seen = (d_lse, d_entropy) if observed else (None, None)
    grads = attend_backward(*saved[: _TENSORS + 2], *ctx.rest, *saved[_TENSORS + 2 :], d_output, *seen, needs)
    some = [g if need else None for g, need in zip(grads, needs, strict=True)]
    return *some, *(None,) * (2 + len(ctx.rest))


attend.register_autograd(_pull, setup_context=_keep)
