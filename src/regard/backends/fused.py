"""`triton`: our own GPU kernels, with the statistics of the weights at the speed of a fused kernel.

This file turns a problem into the tensors that kernels take, and gives their results derivatives; the kernels are in
`regard.kernels`, behind `launch`. A kernel made for one chip is one more function there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import passes
from ..arithmetic import exactly
from ..biases import Alibi, Bias, Relative
from ..canonical import Canonical, Result, sunk
from ..derivatives import Mapped, applied, attention_map, watched
from ..dropout import bound, draw, row_keys
from ..finite import without_unseen
from ..kernels.blocks import BITS, Layout
from ..kernels.parts import ALIBI, PLAIN, RELATIVE, TENSOR, Added, Dropped
from ..layout import layout, listed
from ..masks.dense import Dense
from ..problem import Problem
from ..rule import Rule
from ..scores.additive import Additive
from ..tiling import Cut
from .base import Backend

if TYPE_CHECKING:
    from ..kernels.work import Slopes, Work

__all__ = ["Fused"]

_WIDEST = 256  # dims that a tile can hold
_MOST_BITS = 2**32  # bytes that the bits of a mask may take
_COARSE = 16  # rows of a cell from which on the map has a kernel
_MOST = 128  # of the strongest keys that a kernel keeps


class Fused(Backend):
    """Kernels of our own, with the statistics of the weights at the speed of a fused kernel."""

    name: ClassVar[str] = "triton"
    about: ClassVar[str] = "our own GPU kernels"

    def refuses(self, p: Problem) -> list[str]:
        if find_spec("triton") is None:
            return ["triton is not installed: pip install 'regard[triton]'"]
        reasons = []
        if not (p.query.is_cuda or (p.query.is_cpu and _interpreting())):
            reasons.append(f"the tensors are on {p.device.type}; it needs a GPU")
        if p.dtype == torch.float64:
            reasons.append("its arithmetic is float32; float64 is asked for")
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            reasons.append("its kernels have no rules for forward mode and torch.func")
        if not (p.query.numel() and p.key.numel() and p.value.numel()):
            reasons.append("nothing is there to compute")
        return reasons + _about_sizes(p) + _about_parts(p)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable imports the compiler
    @exactly
    def run(self, p: Problem) -> Result:
        spec, inputs = _terms(p)
        if watched(*inputs):
            found = applied(Attend, spec, *inputs)
        else:
            found = _forward(spec, inputs)
        if not p.observed:
            return Result(p.shaped(found[0]))
        return Result(*map(p.shaped, found))

    def received(self, p: Problem, found: Result) -> Tensor:
        from ..kernels.launch import received

        return p.shaped(received(*_looking(p, found)))

    def pooled(self, p: Problem, found: Result, height: int, width: int) -> Tensor:
        from ..kernels.launch import pooled

        w, peak, spread = _looking(p, found)
        if w.layout.kind == BITS or p.rows < _COARSE * height:
            return passes.pooled(p, found, height, width, self.cut)
        return p.shaped(pooled(w, peak, spread, height, width))

    def top(self, p: Problem, found: Result, k: int) -> tuple[Tensor, Tensor]:
        from ..kernels.launch import strongest

        if k > _MOST:
            return passes.top(p, found, k, self.cut)
        w, peak, spread = _looking(p, found)
        logits, index = strongest(w, k)
        weights = (logits - peak[..., None] - spread[..., None]).exp().masked_fill(index < 0, 0.0)
        return p.shaped(weights.to(p.dtype)), p.shaped(index)

    def health(self, p: Problem, found: Result) -> Tensor:
        from ..kernels.launch import health

        return p.shaped(health(*_looking(p, found)))

    def visible(self, p: Problem) -> Tensor:
        if p.bias is not None:
            return super().visible(p)
        shape = (p.query.shape[0], p.query.shape[1], p.rows)
        if p.mask is None:
            return p.shaped(torch.full(shape, p.keys, device=p.device))
        count = p.mask.visible(torch.arange(p.rows, device=p.device), p.rows, p.keys)
        if count.dim() == 3 and count.shape[0] > 1:
            count = count.repeat_interleave(shape[0] // count.shape[0], 0)
        return p.shaped(count.expand(shape).contiguous())


def _interpreting() -> bool:
    from ..kernels.work import interpreting

    return interpreting()


def _about_sizes(p: Problem) -> list[str]:
    reasons = []
    width = p.query.shape[-1]
    if isinstance(p.score, Additive):
        width = p.score.hidden
    elif p.score is not None:
        width = p.score.width(width, p.key.shape[-1])
    if max(width, p.value.shape[-1]) > _WIDEST:
        reasons.append(f"a dim is {max(width, p.value.shape[-1])}; its tiles hold up to {_WIDEST}")
    if p.mask is not None and not isinstance(p.mask, Dense) and listed(p.mask, p.rows, p.keys) > _MOST_BITS:
        if not p.mask.span(torch.arange(p.rows, device=p.device), p.rows, p.keys).exact:
            reasons.append(f"the mask is no interval, and its bits may take {listed(p.mask, p.rows, p.keys):,} bytes")
    return reasons


def _about_parts(p: Problem) -> list[str]:
    reasons = []
    if p.score is not None and p.score.pairwise and not isinstance(p.score, Additive):
        reasons.append(f"it has no kernel for the score {type(p.score).__name__}")
    if isinstance(p.bias, Bias) and not isinstance(p.bias, Alibi | Relative):
        reasons.append(f"it has no kernel for the bias {type(p.bias).__name__}")
    if p.dropout and p.query.is_cuda and torch.cuda.is_current_stream_capturing():
        reasons.append("a captured graph would drop the same weights at every replay")
    return reasons


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


def _terms(p: Problem) -> tuple[Spec, Inputs]:
    """Fold the score, and take the problem apart."""
    seed = draw(p.who) if p.dropout else 0
    query, key, scale, vector = _scored(p)
    kind, offset, table = PLAIN, 0, None
    if isinstance(p.bias, Tensor):
        kind, table = TENSOR, p.bias
    elif isinstance(p.bias, Alibi | Relative):
        kind = ALIBI if isinstance(p.bias, Alibi) else RELATIVE
        offset = p.keys - p.rows if p.bias.offset is None else p.bias.offset
        table = p.bias.tensors[0].float()
        table = table[None] if kind == RELATIVE and table.dim() == 1 else table
    batch = p.query.shape[0]
    inner = batch // p.mask.lead[0] if p.mask is not None and p.mask.lead[0] > 1 else 1
    rule = Rule(p.rows, p.keys, p.mask, p.softcap, p.dropout, seed, inner=inner, period=batch)
    if isinstance(p.bias, Bias):
        rule = replace(rule, bias=p.bias)
    if vector is not None:
        rule = replace(rule, pair=Additive.pair, cost=query.shape[-1], paired=1)
    number = 1.0 if isinstance(scale, Tensor) else float(scale)
    spec = Spec(rule, layout(p.mask, p.rows, p.keys, p.device, inner), kind, offset, number, p.observed)
    scale = scale.float().reshape(-1) if isinstance(scale, Tensor) else None
    sink = None if p.sink is None else p.sink.float()
    return spec, Inputs(query, key, p.value, table, scale, sink, vector)


def _scored(p: Problem) -> tuple[Tensor, Tensor, float | Tensor, Tensor | None]:
    """Queries and keys with the score folded in, what their products are multiplied by, the additive score's vector."""
    query, key, scale = p.query, p.key, p.scale
    if p.score is None:
        return query, key, scale, None
    factor = p.score.factor(query.new_empty(0, query.shape[-1], dtype=torch.float32))
    if factor is not None:
        return query, key, factor, None
    query, key, shared = p.score.prepare(query.float(), key.float())
    return query, key, 1.0, shared[0] if isinstance(p.score, Additive) else None


def _work(spec: Spec, x: Inputs) -> Work:
    """The problem as kernels take it."""
    from ..kernels.work import Work

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


def _forward(spec: Spec, x: Inputs) -> tuple[Tensor, ...]:
    """Output, lse, entropy, largest logit and spread, (L, H, N, …)."""
    from ..kernels.launch import attend

    output, lse, entropy, peak, spread = attend(_work(spec, x), spec.observed)
    if x.sink is not None:
        _, lse, entropy, spread = sunk(x.sink.detach(), lse, entropy, peak, spread)
    return output, lse, entropy, peak, spread


class Attend(torch.autograd.Function):
    """(query, key, value, bias, scale, sink, vector) -> (output, lse, entropy, max logit, spread)."""

    @staticmethod
    def forward(ctx: Any, spec: Spec, *inputs: Any) -> tuple[Tensor, ...]:
        found = _forward(spec, Inputs(*inputs))
        ctx.spec = spec
        ctx.mark_non_differentiable(*found[3:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *found[:3])
        return found

    @staticmethod
    @exactly
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        x, found = Inputs(*ctx.saved_tensors[:7]), ctx.saved_tensors[7:]
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # a graph of the derivative is asked for: the formula has one, of any order
            return None, *_by_formula(ctx.spec, x, needs, cotangents[:3])
        return None, *_backward(ctx.spec, x, needs, found, cotangents[:3])


def _backward(
    spec: Spec, x: Inputs, needs: tuple[bool, ...], found: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Cotangents of the inputs that need one."""
    from ..kernels import launch

    w = _work(spec, x)
    s, g_sink = _slopes(w, x.sink, found, cotangents)
    grads: list[Tensor | None] = [None] * len(needs)
    if needs[0] or needs[4] or needs[6]:
        dq, grads[6] = launch.query_slopes(w, s)
        if w.scales is not None and x.scale is not None:
            grads[4] = (dq * w.query).sum((0, 2, 3)).sum_to_size(x.scale.shape)
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
    from ..kernels import launch
    from ..kernels.work import Slopes

    output, lse, entropy = found
    dO, g_lse, g_H = (None if c is None else c.detach() for c in cotangents)
    dO = torch.zeros_like(output) if dO is None else dO
    if 0 in dO.stride() or dO.stride(3) != 1:
        dO = dO.contiguous()
    g_lse = None if g_lse is None else torch.where(lse > -torch.inf, g_lse, 0.0).contiguous()
    g_H = None if g_H is None else g_H.contiguous()
    delta = launch.delta(w, output, dO, g_lse)
    mean, g_sink = None, None
    share = None if sink is None else (sink.detach()[:, None] - lse).exp()  # of the sink in each row
    if g_H is not None:
        mean = lse - entropy if share is None else lse - entropy - share
    if share is not None:
        rows = -delta if g_H is None else g_H * (1 - share - entropy) - delta
        g_sink = (share * rows).sum((0, 2))
    return Slopes(dO, lse, delta, g_H, mean), g_sink


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
    shared = () if x.vector is None else (x.vector,)
    if spec.kind in (ALIBI, RELATIVE) and x.bias is not None:
        shared += (x.bias,)
    made = Canonical(query.unflatten(1, (heads, groups)), key, value, bias, shared, spec.rule)
    tensors = (made.query, key, value, *(() if bias is None else (bias,)), *shared)
    output, lse, entropy = (t.flatten(1, 2) for t in applied(Mapped, attention_map(made, Cut()), *tensors))
    if x.sink is not None:
        left, lse, entropy, _ = sunk(x.sink, lse, entropy, lse.detach(), torch.zeros_like(lse))
        output = output * left.exp()[..., None]
    return output.to(x.value.dtype), lse, entropy


def _looking(p: Problem, found: Result) -> tuple[Work, Tensor, Tensor]:
    """The problem without its graph, and what is known of its rows."""
    with torch.no_grad():
        spec, inputs = _terms(p._replace(dropout=0.0))
        w = _work(spec, inputs)
    if found.max_logit is None or found.spread is None:
        raise RuntimeError("a pass needs what the forward pass found")
    shape = w.rows
    return w, found.max_logit.detach().reshape(shape).contiguous(), found.spread.detach().reshape(shape).contiguous()
