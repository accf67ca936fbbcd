"""Forward and backward of our kernels as operators of torch.library, for torch.compile only.

Eager mode uses an autograd.Function: an operator gives forward-mode AD a silent zero tangent, and has no second
derivative. So nothing outside of a compiled graph calls these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.rows import Rows
from ..core.spec import Spec
from .block_mask import BlockMask
from .engine import Inputs, TritonEngine

__all__ = ["Settings", "attend"]


class Settings(NamedTuple):
    """The arguments of the operator after `Inputs`."""

    lo: Tensor | None  # the spans of the mask, int32 (items, heads, n)
    hi: Tensor | None
    scale: float
    softcap: float  # 0 for none
    bias_kind: int
    bias_offset: int
    inner: int
    observed: bool


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? factor, Tensor? sink, Tensor? vector, "
    "Tensor? lo, Tensor? hi, float scale, float softcap, int bias_kind, int bias_offset, int inner, bool observed"
)
_ROWS = "Tensor output, Tensor lse, Tensor entropy, Tensor row_max, Tensor log_row_sum"
_COTANGENTS = "Tensor d_output, Tensor? d_lse, Tensor? d_entropy"
_INPUTS = len(Inputs._fields)
_GIVEN = _INPUTS + len(Settings._fields)
_SAVED = _INPUTS + 2  # the inputs, lo and hi


def _engine(x: Inputs, s: Settings) -> TritonEngine:
    n, m = x.query.shape[2], x.key.shape[2]
    lead = (1, 1) if s.lo is None else (s.lo.shape[0], s.lo.shape[1])
    spec = Spec(n, m, None, s.softcap or None, inner=s.inner, period=x.query.shape[0])
    block_mask = BlockMask(n, m, s.lo, s.hi, lead=lead, inner=s.inner)
    return TritonEngine(spec, block_mask, s.bias_kind, s.bias_offset, s.scale, s.observed)


def _attend(*args: Any) -> tuple[Tensor, ...]:
    """The fields of Rows, (L, H, N, …)."""
    x = Inputs(*args[:_INPUTS])
    rows = _engine(x, Settings(*args[_INPUTS:])).forward(x)
    return rows if rows.entropy is not None else rows._replace(entropy=torch.zeros_like(rows.lse))


attend = torch.library.custom_op(
    "regard::attend", _attend, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    stats = [query.new_empty(rows, dtype=torch.float32) for _ in range(4)]
    return value.new_empty(*rows, value.shape[3]), stats[0], stats[1], stats[2], stats[3]


def _attend_backward(*args: Any) -> list[Tensor]:
    """The gradients of the inputs, empty where none is needed."""
    given, rows, cotangents, needs = args[:_GIVEN], args[_GIVEN : _GIVEN + 5], args[_GIVEN + 5 : -1], args[-1]
    x = Inputs(*given[:_INPUTS])
    grads = _engine(x, Settings(*given[_INPUTS:])).vjp(x, Rows(*rows), cotangents, tuple(needs))
    return [x.query.new_empty(0) if g is None else g for g in grads]


attend_backward = torch.library.custom_op(
    "regard::attend_backward",
    _attend_backward,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, {_ROWS}, {_COTANGENTS}, bool[] needs) -> Tensor[]",
)


@attend_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    tensors, needs = args[:_INPUTS], args[-1]
    return [
        tensors[0].new_empty(0) if t is None or not need else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, need in zip(tensors, needs, strict=True)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_SAVED], *output)
    ctx.rest = inputs[_SAVED:]
    ctx.mark_non_differentiable(*output[3:])


def _vjp(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    saved, observed = ctx.saved_tensors, ctx.rest[-1]
    d_output, d_lse, d_entropy = cotangents[:3]
    needs = list(ctx.needs_input_grad[:_INPUTS])
    of_statistics = (d_lse, d_entropy) if observed else (None, None)
    grads = attend_backward(*saved[:_SAVED], *ctx.rest, *saved[_SAVED:], d_output, *of_statistics, needs)
    some = [g if need else None for g, need in zip(grads, needs, strict=True)]
    return *some, *(None,) * (2 + len(ctx.rest))


attend.register_autograd(_vjp, setup_context=_save)
