"""Attention by our kernels, as an engine: its passes up to the second derivatives.

What the kernels of the second order lack (tangents of a bias, the additive score) comes from the formula in strips, and
scales and sinks that are tensors from plain torch around them. Under torch.compile the first two passes are operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import Engine, Needs, Some, attended, bent_by_meaning, pushed_by_meaning
from ..autograd.strip_map import Mapped, attention_map, pushed
from ..compat.torch import applied, exactly, untraced
from ..core.dropout import bound, row_keys, shifted
from ..core.folded import Canonical, sunk
from ..core.formula import Rows
from ..core.nonfinite import without_unseen
from ..core.spec import Rule
from ..core.tiling import Cut
from .arguments import ALIBI, RELATIVE, TENSOR, Added, Dropped
from .block_lists import Layout

if TYPE_CHECKING:
    from .arguments import Bends, Moves, Slopes, Work

__all__ = ["Inputs", "Kernels", "Spec", "backward", "forward", "work"]


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
    from .arguments import Work

    query, key, value, bias, scale, sink, vector = (None if t is None else t.detach() for t in x)
    if query is None or key is None or value is None:
        raise RuntimeError("a problem has queries, keys and values")
    if vector is not None:  # one hidden unit of all rows side by side
        query, key = query.mT.contiguous().mT, key.mT.contiguous().mT
    number = spec.scale
    if scale is None and vector is None and number < 0:
        query, number = -query, -number
    heads = query.shape[1]
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
        _dropped(spec.rule, query),
        sink,
        vector,
    )


def _dropped(rule: Rule, query: Tensor) -> Dropped:
    if not rule.dropout:
        return Dropped()
    items, heads, rows = (torch.arange(size, device=query.device) for size in query.shape[:3])
    item, head, row, key = *rule.origin, *rule.corner
    keys = row_keys(rule.seed, items // rule.copies + item, heads + head, rows + row)
    return Dropped(shifted(keys, key), bound(rule.dropout), 1.0 / (1.0 - rule.dropout))


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
    from .launch import attend

    output, lse, entropy, peak, spread = attend(work(spec, x), spec.observed)
    if x.sink is not None:
        _, lse, entropy, spread = sunk(x.sink.detach(), lse, entropy, peak, spread)
    return output, lse, entropy, peak, spread


@dataclass(frozen=True, eq=False)
class Kernels(Engine):
    """Passes over `Inputs`."""

    spec: Spec

    @untraced
    @exactly
    def attend(self, x: Some) -> Rows:
        return Rows(*forward(self.spec, _inputs(x)))

    @untraced
    @exactly
    def push(self, x: Some, w: Some) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        given = _inputs(x)
        if given.vector is not None:
            found, tangents = self.attend(x), pushed_by_meaning(self, x, w)[1]
            return found, (tangents[0], tangents[1], tangents[2])
        return _push(self.spec, given, w)

    @untraced
    @exactly
    def pull(self, x: Some, found: Rows, g: Some, needs: Needs) -> Sequence[Tensor | None]:
        return backward(self.spec, _inputs(x), needs, _dense(found), g)

    @untraced
    @exactly
    def bend(
        self, x: Some, found: Rows, moved: Some, g: Some, w: Some, dg: Some, needs: Needs
    ) -> Sequence[Tensor | None]:
        given = _inputs(x)
        learnt = given.scale is not None or given.sink is not None
        if given.vector is not None or w[3] is not None or needs[3] or learnt:
            engine = Around(self.spec) if learnt and given.vector is None else self
            grads = bent_by_meaning(engine, x, g, w, dg)[1]
            return [t if need else None for t, need in zip(grads, needs, strict=True)]
        return _bend(self.spec, given, _dense(found), moved, g, w, dg, needs)

    def meaning(self, x: Some) -> tuple[Tensor, ...]:
        return _formula(self.spec, _inputs(x))

    def over(self, size: int) -> tuple[Engine, int]:
        rule, seen = self.spec.rule, self.spec.layout
        if seen.lead[0] > 1:
            seen.awaited()
            seen = Layout(seen.n, seen.m, seen.lo, seen.hi, seen.words, seen.lead, seen.inner * size)
        rule = replace(rule, inner=rule.inner * size, period=rule.period * size, copies=rule.copies * size)
        return type(self)(replace(self.spec, rule=rule, layout=seen)), 1


class Around(Kernels):
    """The same meaning, with scales and sinks in plain torch: what is left has kernels of every pass."""

    def meaning(self, x: Some) -> tuple[Tensor, ...]:
        given = _inputs(x)
        query = given.query
        if given.scale is not None:
            query = (query.float() * given.scale.reshape(-1, 1, 1)).to(query.dtype)
        spec = replace(self.spec, scale=1.0 if given.scale is not None else self.spec.scale)
        found = attended(Kernels(spec), given._replace(query=query, scale=None, sink=None))
        return found[:3] if given.sink is None else _sunken(given.sink, *found[:3])


def _inputs(x: Some) -> Inputs:
    query, key, value, *others = x
    if query is None or key is None or value is None:
        raise RuntimeError("a problem has queries, keys and values")
    return Inputs(query, key, value, *others)


def _dense(found: Rows) -> Rows:
    """What was found as kernels read it, row after row; vmap may have laid it out otherwise."""
    return Rows(found.output, *(t.contiguous() for t in found[1:]))


def _sunken(sink: Tensor, output: Tensor, lse: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Let the sink take its share of rows, by differentiable operations."""
    left, lse, entropy, _ = sunk(sink, lse, entropy, lse.detach(), torch.zeros_like(lse))
    return (output * left.exp()[..., None]).to(output.dtype), lse, entropy


def _push(spec: Spec, x: Inputs, w: Some) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    from . import launch

    made = work(spec, x._replace(sink=None))
    found, tangents = launch.push(made, _moves(spec, x, made, w), spec.observed)
    if x.sink is None:
        return Rows(*found), tangents
    d_sink = torch.zeros_like(x.sink) if w[5] is None else w[5]
    seen, moved = pushed(_sunken, (x.sink, *found[:3]), (d_sink, *tangents))
    spread = sunk(x.sink, *found[1:])[3]
    return Rows(seen[0], seen[1], seen[2], found.max_logit, spread), (moved[0], moved[1], moved[2])


def _moves(spec: Spec, x: Inputs, made: Work, w: Some) -> Moves:
    """The tangents as kernels take them."""
    from .arguments import Moves

    query, key, value, bias, scale = w[:5]
    if query is not None and x.scale is None and spec.scale < 0:  # `work` turned the queries round
        query = -query
    query, key, value = (t if t is None or _sound(t) else t.contiguous() for t in (query, key, value))
    scales = None if scale is None else scale.detach().expand(made.heads).contiguous()
    return Moves(query, key, value, scales, Added() if bias is None else _added(spec, bias))


def _sound(x: Tensor) -> bool:
    return 0 not in x.stride() and x.stride(-1) == 1


def _bend(
    spec: Spec, x: Inputs, found: Rows, moved: Some, g: Some, w: Some, dg: Some, needs: Needs
) -> list[Tensor | None]:
    from . import launch

    made = work(spec, x)
    s, _ = _slopes(made, None, tuple(found), g)
    dO_dot = dg[0] if dg[0] is None or _sound(dg[0]) else dg[0].contiguous()
    rows = _bends(made, s, found, moved, g, (dO_dot, *dg[1:]))
    dq, dk, dv = launch.bend(made, _moves(spec, x, made, w), s.dO, dO_dot, rows, needs[:3])
    if dq is not None and spec.scale < 0:
        dq = -dq
    grads = (dq, dk, dv, *(None,) * (len(needs) - 3))
    return [t if need else None for t, need in zip(grads, needs, strict=True)]


def _bends(made: Work, s: Slopes, found: Rows, moved: Some, g: Some, dg: Some) -> Bends:
    """What the kernels need of every row that moves."""
    from .arguments import Bends

    O_dot, u, H_dot = moved
    dO_dot, g_lse_dot, g_H_dot = dg
    if O_dot is None or u is None or H_dot is None:
        raise RuntimeError("rows that move have tangents")
    delta_dot = (s.dO.float() * O_dot).sum(-1)
    if dO_dot is not None:
        delta_dot += (dO_dot.float() * found.output).sum(-1)
    if g_lse_dot is not None:
        delta_dot -= torch.where(found.lse > -torch.inf, g_lse_dot, 0.0)
    rows = Bends(s.peak, s.spread, s.delta, delta_dot.contiguous(), u.contiguous())
    if g[2] is None and g_H_dot is None:
        return rows
    zeros = torch.zeros_like(rows.u)
    g_H, g_H_dot = (zeros if t is None else t.contiguous() for t in (g[2], g_H_dot))
    mean = (found.spread if made.exact else zeros) - found.entropy
    return rows._replace(g=g_H, g_dot=g_H_dot, mean=mean, mean_dot=(u - H_dot).contiguous())


def backward(spec: Spec, x: Inputs, needs: Needs, found: tuple[Tensor, ...], cotangents: Some) -> list[Tensor | None]:
    """Cotangents of the inputs that need one."""
    from . import launch

    w = work(spec, x)
    s, g_sink = _slopes(w, x.sink, found, cotangents)
    grads: list[Tensor | None] = [None] * len(needs)
    dq, dk, grads[2], grads[6] = launch.slopes(w, s, needs[0] or needs[4] or needs[6], needs[1] or needs[2])
    if dq is not None:
        if w.scales is not None and x.scale is not None:
            products = torch.where(dq == 0, 0.0, dq * w.query)  # a query without keys may be NaN
            grads[4] = products.sum((0, 2, 3)).sum_to_size(x.scale.shape)
            dq = dq * w.scales[:, None, None]
        negated = x.scale is None and x.vector is None and spec.scale < 0
        grads[0] = (-dq if negated else dq).to(x.query.dtype)
    grads[1] = None if dk is None else dk.to(x.key.dtype)
    if needs[3] and x.bias is not None:
        grads[3] = launch.bias_slopes(w, s, tuple(x.bias.shape)).to(x.bias.dtype)
    grads[5] = g_sink
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


def _slopes(
    w: Work, sink: Tensor | None, found: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]
) -> tuple[Slopes, Tensor | None]:
    """What the backward kernels need of every row, and the cotangent of the sink, which lives on rows alone."""
    from . import launch
    from .arguments import Found, Slopes

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
        output, lse, entropy = _sunken(x.sink, output, lse, entropy)
    return output.to(x.value.dtype), lse, entropy
