"""Attention by our kernels, as a function of tensors with derivatives.

In eager mode it is an `autograd.Function`: first derivatives by kernels, and where a graph of them is asked for, by the
formula in strips, which has derivatives of every order. Under torch.compile the same two passes are operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .arithmetic import exactly
from .canonical import Canonical, sunk
from .derivatives import Mapped, applied, attention_map
from .dropout import bound, row_keys
from .finite import without_unseen
from .kernels.blocks import Layout
from .kernels.parts import ALIBI, RELATIVE, TENSOR, Added, Dropped
from .rule import Rule
from .tiling import Cut

if TYPE_CHECKING:
    from .kernels.work import Slopes, Work

__all__ = ["Attend", "Inputs", "Spec", "backward", "forward", "work"]


class Inputs(NamedTuple):
    """The tensors of a problem that may have derivatives."""

    query: Tensor  # (L, H, N, D), the score folded in
    key: Tensor  # (L, K, M, D)
    value: Tensor  # (L, K, M, E)
    bias: Tensor | None  # (L|1, H|1, N|1, M|1), slopes (H,), or a table (H|1, 2R + 1)
    scale: Tensor | None  # float32 (1,) or (H,)
    sink: Tensor | None  # float32 (H,)
    vector: Tensor | None  # float32 (D,), of the additive score


@dataclass(frozen=True, eq=False)
class Spec:
    """What else a problem is made of."""

    rule: Rule
    layout: Layout
    kind: int  # of the bias
    offset: int
    scale: float
    observed: bool


def work(spec: Spec, x: Inputs) -> Work:
    """The problem as kernels take it."""
    from .kernels.work import Work

    query, key, value, bias, scale, sink, vector = (None if t is None else t.detach() for t in x)
    if query is None or key is None or value is None:
        raise RuntimeError("a problem has queries, keys and values")
    if vector is not None:  # one hidden unit of all rows side by side
        query, key = query.mT.contiguous().mT, key.mT.contiguous().mT
    number = spec.scale
    if scale is None and vector is None and number < 0:
        query, number = -query, -number
    heads = query.shape[1]
    drop = Dropped()
    if spec.rule.dropout:
        items, hs, rows = (torch.arange(size, device=query.device) for size in (query.shape[0], heads, spec.rule.n))
        drop = Dropped(
            row_keys(spec.rule.seed, items, hs, rows), bound(spec.rule.dropout), 1.0 / (1.0 - spec.rule.dropout)
        )
    return Work(
        query,
        key,
        value,
        spec.layout,
        number,
        None if scale is None else scale.expand(heads).contiguous(),
        spec.rule.softcap,
        spec.kind,
        _added(spec, bias),
        drop,
        sink,
        vector,
    )


def _added(spec: Spec, bias: Tensor | None) -> Added:
    if bias is None:
        return Added()
    if spec.kind == TENSOR:
        strides = (0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
        return Added(bias, *strides)
    bias = bias.contiguous()
    head = 0 if bias.shape[0] == 1 else bias.stride(0)
    return Added(bias, 0, head, 0, 0, spec.offset, bias.shape[-1] // 2 if spec.kind == RELATIVE else 0)


def forward(spec: Spec, x: Inputs) -> tuple[Tensor, ...]:
    """Output, lse, entropy, largest logit and spread, (L, H, N, …)."""
    from .kernels.launch import attend

    output, lse, entropy, peak, spread = attend(work(spec, x), spec.observed)
    if x.sink is not None:
        _, lse, entropy, spread = sunk(x.sink.detach(), lse, entropy, peak, spread)
    return output, lse, entropy, peak, spread


class Attend(torch.autograd.Function):
    """(query, key, value, bias, scale, sink, vector) -> (output, lse, entropy, max logit, spread)."""

    @staticmethod
    def forward(ctx: Any, spec: Spec, *inputs: Any) -> tuple[Tensor, ...]:
        found = forward(spec, Inputs(*inputs))
        ctx.spec = spec
        ctx.mark_non_differentiable(*found[3:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *found)
        return found

    @staticmethod
    @exactly
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under activation checkpointing that computes them
        x, found = Inputs(*saved[:7]), saved[7:]
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # a graph of the derivative is asked for: the formula has one, of any order
            return None, *_by_formula(ctx.spec, x, needs, cotangents[:3])
        return None, *backward(ctx.spec, x, needs, found, cotangents[:3])


def backward(
    spec: Spec, x: Inputs, needs: tuple[bool, ...], found: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Cotangents of the inputs that need one."""
    from .kernels import launch

    w = work(spec, x)
    s, g_sink = _slopes(w, x.sink, found, cotangents)
    grads: list[Tensor | None] = [None] * len(needs)
    if needs[0] or needs[4] or needs[6]:
        dq, grads[6] = launch.query_slopes(w, s)
        if w.scales is not None and x.scale is not None:
            products = torch.where(dq == 0, 0.0, dq * w.query)  # a query without keys may be NaN
            grads[4] = products.sum((0, 2, 3)).sum_to_size(x.scale.shape)
            dq = dq * w.scales[:, None, None]
        negated = x.scale is None and x.vector is None and spec.scale < 0
        grads[0] = (-dq if negated else dq).to(x.query.dtype)
    if needs[1] or needs[2]:
        dk, dv = launch.key_slopes(w, s)
        grads[1], grads[2] = dk.to(x.key.dtype), dv
    if needs[3] and x.bias is not None:
        grads[3] = launch.bias_slopes(w, s, tuple(x.bias.shape)).to(x.bias.dtype)
    grads[5] = g_sink
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


def _slopes(
    w: Work, sink: Tensor | None, found: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]
) -> tuple[Slopes, Tensor | None]:
    """What the backward kernels need of every row, and the cotangent of the sink, which lives on rows alone."""
    from .kernels import launch
    from .kernels.work import Found, Slopes

    output, lse, entropy, peak, spread = found
    rows = Found(output, lse, entropy, peak, spread)
    dO, g_lse, g_H = (None if c is None else c.detach() for c in cotangents)
    dO = torch.zeros_like(output) if dO is None else dO
    if 0 in dO.stride() or dO.stride(3) != 1:
        dO = dO.contiguous()
    g_lse = None if g_lse is None else torch.where(lse > -torch.inf, g_lse, 0.0).contiguous()
    g_H = None if g_H is None else g_H.contiguous()
    delta, level = launch.prepare(w, rows, dO, g_lse)
    mean, g_sink = None, None
    share = None if sink is None else (sink.detach()[:, None] - lse).exp()  # of the sink in each row
    if g_H is not None:
        above = spread if w.exact else torch.zeros_like(spread)
        mean = above - entropy if share is None else above - entropy - share
    if share is not None:
        slope = -delta if g_H is None else g_H * (1 - share - entropy) - delta
        g_sink = (share * slope).sum((0, 2))
    return Slopes(dO, peak if w.exact else level, spread, delta, g_H, mean), g_sink


def _by_formula(
    spec: Spec, x: Inputs, needs: tuple[bool, ...], cotangents: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """The same cotangents by differentiable operations, so that they have derivatives in turn."""
    results = [r for r, c in zip(_formula(spec, x), cotangents, strict=True) if c is not None]
    given = [c for c in cotangents if c is not None]
    wanted = [t for t, need in zip(x, needs, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(results, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if need and t is not None else None for t, need in zip(x, needs, strict=True)]


def _formula(spec: Spec, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and entropy in strips of plain torch: (L, H, N, …)."""
    heads, groups = x.key.shape[1], x.query.shape[1] // x.key.shape[1]
    bias = x.bias if spec.kind == TENSOR else None
    if bias is not None:
        bias = bias.unsqueeze(1) if bias.shape[1] == 1 else bias.unflatten(1, (heads, groups))
    query, key, value = (t.float() for t in without_unseen(spec.rule, x.query, x.key, x.value, bias))
    if x.vector is None:
        query = query * (spec.scale if x.scale is None else x.scale.reshape(-1, 1, 1))
    shared: tuple[Tensor, ...] = () if x.vector is None else (x.vector,)
    if spec.kind in (ALIBI, RELATIVE) and x.bias is not None:
        shared += (x.bias,)
    made = Canonical(query.unflatten(1, (heads, groups)), key, value, bias, shared, spec.rule)
    tensors = (made.query, key, value, *(() if bias is None else (bias,)), *shared)
    output, lse, entropy = (t.flatten(1, 2) for t in applied(Mapped, attention_map(made, Cut()), *tensors))
    if x.sink is not None:
        left, lse, entropy, _ = sunk(x.sink, lse, entropy, lse.detach(), torch.zeros_like(lse))
        output = output * left.exp()[..., None]
    return output.to(x.value.dtype), lse, entropy
