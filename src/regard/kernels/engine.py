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

from ..autograd.engine import Engine, MaybeTensors, Needs, attend, double_backward_of_formula, jvp_of_formula
from ..autograd.strip_map import MapStrips, attention_strips, jvp_of
from ..compat.torch import call_function, not_compiled, without_autocast
from ..core.dropout import keep_threshold, row_keys, shift_keys
from ..core.folded import FoldedProblem, add_sink
from ..core.nonfinite import zero_unseen
from ..core.rows import Rows
from ..core.spec import Spec
from ..core.tiling import TileSizes
from .arguments import BIAS_ALIBI, BIAS_RELATIVE, BIAS_TENSOR, BiasArgs, DropoutArgs
from .block_lists import BlockMask

if TYPE_CHECKING:
    from .arguments import BackwardRows, DoubleBackwardRows, KernelArgs, Tangents

__all__ = ["Inputs", "KernelSpec", "TritonEngine", "backward", "forward", "kernel_args"]


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
class KernelSpec:
    """What else a problem is made of."""

    spec: Spec
    block_mask: BlockMask
    kind: int  # of the bias
    offset: int
    scale: float
    observed: bool


def kernel_args(kernel_spec: KernelSpec, x: Inputs) -> KernelArgs:
    """The problem as kernels take it."""
    from .arguments import KernelArgs

    query, key, value, bias, scale, sink, vector = (None if t is None else t.detach() for t in x)
    if query is None or key is None or value is None:
        raise RuntimeError("a problem has queries, keys and values")
    if vector is not None:  # one hidden unit of all rows side by side
        query, key = query.mT.contiguous().mT, key.mT.contiguous().mT
    number = kernel_spec.scale
    if scale is None and vector is None and number < 0:
        query, number = -query, -number
    heads = query.shape[1]
    return KernelArgs(
        query,
        key,
        value,
        kernel_spec.block_mask,
        number,
        None if scale is None else scale.expand(heads).contiguous(),
        kernel_spec.spec.softcap,
        kernel_spec.kind,
        _added(kernel_spec, bias),
        _dropped(kernel_spec.spec, query),
        sink,
        vector,
    )


def _dropped(spec: Spec, query: Tensor) -> DropoutArgs:
    if not spec.dropout:
        return DropoutArgs()
    items, heads, rows = (torch.arange(size, device=query.device) for size in query.shape[:3])
    item, head, row, key = *spec.origin, *spec.corner
    keys = row_keys(spec.seed, items // spec.copies + item, heads + head, rows + row)
    return DropoutArgs(shift_keys(keys, key), keep_threshold(spec.dropout), 1.0 / (1.0 - spec.dropout))


def _added(kernel_spec: KernelSpec, bias: Tensor | None) -> BiasArgs:
    if bias is None:
        return BiasArgs()
    if kernel_spec.kind == BIAS_TENSOR:
        strides = (0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
        return BiasArgs(bias, *strides)
    bias = bias.contiguous()
    head = 0 if bias.shape[0] == 1 else bias.stride(0)
    return BiasArgs(bias, 0, head, 0, 0, kernel_spec.offset, bias.shape[-1] // 2 if kernel_spec.kind == BIAS_RELATIVE else 0)


def forward(kernel_spec: KernelSpec, x: Inputs) -> tuple[Tensor, ...]:
    """Output, lse, entropy, largest logit and spread, (L, H, N, …)."""
    from . import launch

    output, lse, entropy, row_max, log_row_sum = launch.forward(kernel_args(kernel_spec, x), kernel_spec.observed)
    if x.sink is not None:
        _, lse, entropy, log_row_sum = add_sink(x.sink.detach(), lse, entropy, row_max, log_row_sum)
    return output, lse, entropy, row_max, log_row_sum


@dataclass(frozen=True, eq=False)
class TritonEngine(Engine):
    """Passes over `Inputs`."""

    kernel_spec: KernelSpec

    @not_compiled
    @without_autocast
    def forward(self, x: MaybeTensors) -> Rows:
        return Rows(*forward(self.kernel_spec, _inputs(x)))

    @not_compiled
    @without_autocast
    def jvp(self, x: MaybeTensors, w: MaybeTensors) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        given = _inputs(x)
        if given.vector is not None:
            found, tangents = self.forward(x), jvp_of_formula(self, x, w)[1]
            return found, (tangents[0], tangents[1], tangents[2])
        return _push(self.kernel_spec, given, w)

    @not_compiled
    @without_autocast
    def vjp(self, x: MaybeTensors, found: Rows, g: MaybeTensors, needs: Needs) -> Sequence[Tensor | None]:
        return backward(self.kernel_spec, _inputs(x), needs, _dense(found), g)

    @not_compiled
    @without_autocast
    def double_backward(
        self, x: MaybeTensors, found: Rows, moved: MaybeTensors, g: MaybeTensors, w: MaybeTensors, dg: MaybeTensors, needs: Needs
    ) -> Sequence[Tensor | None]:
        given = _inputs(x)
        learnt = given.scale is not None or given.sink is not None
        if given.vector is not None or w[3] is not None or needs[3] or learnt:
            engine = TorchScaleEngine(self.kernel_spec) if learnt and given.vector is None else self
            grads = double_backward_of_formula(engine, x, g, w, dg)[1]
            return [t if need else None for t, need in zip(grads, needs, strict=True)]
        return _bend(self.kernel_spec, given, _dense(found), moved, g, w, dg, needs)

    def formula(self, x: MaybeTensors) -> tuple[Tensor, ...]:
        return _formula(self.kernel_spec, _inputs(x))

    def batched(self, size: int) -> tuple[Engine, int]:
        spec, seen = self.kernel_spec.spec, self.kernel_spec.block_mask
        if seen.lead[0] > 1:
            seen.awaited()
            seen = BlockMask(seen.n, seen.m, seen.lo, seen.hi, seen.mask_bits, seen.lead, seen.inner * size)
        spec = replace(spec, inner=spec.inner * size, period=spec.period * size, copies=spec.copies * size)
        return type(self)(replace(self.kernel_spec, spec=spec, block_mask=seen)), 1


class TorchScaleEngine(TritonEngine):
    """The same meaning, with scales and sinks in plain torch: what is left has kernels of every pass."""

    def formula(self, x: MaybeTensors) -> tuple[Tensor, ...]:
        given = _inputs(x)
        query = given.query
        if given.scale is not None:
            query = (query.float() * given.scale.reshape(-1, 1, 1)).to(query.dtype)
        kernel_spec = replace(self.kernel_spec, scale=1.0 if given.scale is not None else self.kernel_spec.scale)
        found = attend(TritonEngine(kernel_spec), given._replace(query=query, scale=None, sink=None))
        return found[:3] if given.sink is None else _sunken(given.sink, *found[:3])


def _inputs(x: MaybeTensors) -> Inputs:
    query, key, value, *others = x
    if query is None or key is None or value is None:
        raise RuntimeError("a problem has queries, keys and values")
    return Inputs(query, key, value, *others)


def _dense(found: Rows) -> Rows:
    """What was found as kernels read it, row after row; vmap may have laid it out otherwise."""
    return Rows(found.output, *(t.contiguous() for t in found[1:]))


def _sunken(sink: Tensor, output: Tensor, lse: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Let the sink take its share of rows, by differentiable operations."""
    left, lse, entropy, _ = add_sink(sink, lse, entropy, lse.detach(), torch.zeros_like(lse))
    return (output * left.exp()[..., None]).to(output.dtype), lse, entropy


def _push(kernel_spec: KernelSpec, x: Inputs, w: MaybeTensors) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    from . import launch

    made = kernel_args(kernel_spec, x._replace(sink=None))
    found, tangents = launch.jvp(made, _moves(kernel_spec, x, made, w), kernel_spec.observed)
    if x.sink is None:
        return Rows(*found), tangents
    d_sink = torch.zeros_like(x.sink) if w[5] is None else w[5]
    seen, moved = jvp_of(_sunken, (x.sink, *found[:3]), (d_sink, *tangents))
    log_row_sum = add_sink(x.sink, *found[1:])[3]
    return Rows(seen[0], seen[1], seen[2], found.max_logit, log_row_sum), (moved[0], moved[1], moved[2])


def _moves(kernel_spec: KernelSpec, x: Inputs, made: KernelArgs, w: MaybeTensors) -> Tangents:
    """The tangents as kernels take them."""
    from .arguments import Tangents

    query, key, value, bias, scale = w[:5]
    if query is not None and x.scale is None and kernel_spec.scale < 0:  # `kernel_args` turned the queries round
        query = -query
    query, key, value = (t if t is None or _sound(t) else t.contiguous() for t in (query, key, value))
    scales = None if scale is None else scale.detach().expand(made.heads).contiguous()
    return Tangents(query, key, value, scales, BiasArgs() if bias is None else _added(kernel_spec, bias))


def _sound(x: Tensor) -> bool:
    return 0 not in x.stride() and x.stride(-1) == 1


def _bend(
    kernel_spec: KernelSpec, x: Inputs, found: Rows, moved: MaybeTensors, g: MaybeTensors, w: MaybeTensors, dg: MaybeTensors, needs: Needs
) -> list[Tensor | None]:
    from . import launch

    made = kernel_args(kernel_spec, x)
    s, _ = _slopes(made, None, tuple(found), g)
    dO_dot = dg[0] if dg[0] is None or _sound(dg[0]) else dg[0].contiguous()
    rows = _bends(made, s, found, moved, g, (dO_dot, *dg[1:]))
    dq, dk, dv, _ = launch.double_backward(made, _moves(kernel_spec, x, made, w), s.dO, dO_dot, rows, needs[:3])
    if dq is not None and kernel_spec.scale < 0:
        dq = -dq
    grads = (dq, dk, dv, *(None,) * (len(needs) - 3))
    return [t if need else None for t, need in zip(grads, needs, strict=True)]


def _bends(made: KernelArgs, s: BackwardRows, found: Rows, moved: MaybeTensors, g: MaybeTensors, dg: MaybeTensors) -> DoubleBackwardRows:
    """What the kernels need of every row that moves."""
    from .arguments import DoubleBackwardRows

    O_dot, u, H_dot = moved
    dO_dot, g_lse_dot, g_H_dot = dg
    if O_dot is None or u is None or H_dot is None:
        raise RuntimeError("rows that move have tangents")
    delta_dot = (s.dO.float() * O_dot).sum(-1)
    if dO_dot is not None:
        delta_dot += (dO_dot.float() * found.output).sum(-1)
    if g_lse_dot is not None:
        delta_dot -= torch.where(found.lse > -torch.inf, g_lse_dot, 0.0)
    rows = DoubleBackwardRows(s.row_max, s.log_row_sum, s.delta, delta_dot.contiguous(), u.contiguous())
    if g[2] is None and g_H_dot is None:
        return rows
    zeros = torch.zeros_like(rows.lse_dot)
    g_H, g_H_dot = (zeros if t is None else t.contiguous() for t in (g[2], g_H_dot))
    mean = (found.log_row_sum if made.exact else zeros) - found.entropy
    return rows._replace(g_entropy=g_H, g_entropy_dot=g_H_dot, mean=mean, mean_dot=(u - H_dot).contiguous())


def backward(kernel_spec: KernelSpec, x: Inputs, needs: Needs, found: tuple[Tensor, ...], cotangents: MaybeTensors) -> list[Tensor | None]:
    """Cotangents of the inputs that need one."""
    from . import launch

    w = kernel_args(kernel_spec, x)
    s, g_sink = _slopes(w, x.sink, found, cotangents)
    grads: list[Tensor | None] = [None] * len(needs)
    dq, dk, grads[2], grads[6] = launch.backward(w, s, needs[0] or needs[4] or needs[6], needs[1] or needs[2])
    if dq is not None:
        if w.scales is not None and x.scale is not None:
            products = torch.where(dq == 0, 0.0, dq * w.query)  # a query without keys may be NaN
            grads[4] = products.sum((0, 2, 3)).sum_to_size(x.scale.shape)
            dq = dq * w.scales[:, None, None]
        negated = x.scale is None and x.vector is None and kernel_spec.scale < 0
        grads[0] = (-dq if negated else dq).to(x.query.dtype)
    grads[1] = None if dk is None else dk.to(x.key.dtype)
    if needs[3] and x.bias is not None:
        grads[3] = launch.bias_gradient(w, s, tuple(x.bias.shape)).to(x.bias.dtype)
    grads[5] = g_sink
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


def _slopes(
    w: KernelArgs, sink: Tensor | None, found: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]
) -> tuple[BackwardRows, Tensor | None]:
    """What the backward kernels need of every row, and the cotangent of the sink, which lives on rows alone."""
    from ..core.rows import Rows
    from . import launch
    from .arguments import BackwardRows

    output, lse, entropy, row_max, log_row_sum = found
    rows = Rows(output, lse, entropy, row_max, log_row_sum)
    dO, g_lse, g_H = (None if c is None else c.detach() for c in cotangents)
    dO = torch.zeros_like(output) if dO is None else dO
    if 0 in dO.stride() or dO.stride(3) != 1:
        dO = dO.contiguous()
    g_lse = None if g_lse is None else torch.where(lse > -torch.inf, g_lse, 0.0).contiguous()
    g_H = None if g_H is None else g_H.contiguous()
    delta, level = launch.backward_preprocess(w, rows, dO, g_lse)
    mean, g_sink = None, None
    share = None if sink is None else (sink.detach()[:, None] - lse).exp()  # of the sink in each row
    if g_H is not None:
        above = log_row_sum if w.exact else torch.zeros_like(log_row_sum)
        mean = above - entropy if share is None else above - entropy - share
    if share is not None:
        slope = -delta if g_H is None else g_H * (1 - share - entropy) - delta
        g_sink = (share * slope).sum((0, 2))
    return BackwardRows(dO, row_max if w.exact else level, log_row_sum, delta, g_H, mean), g_sink


def _formula(kernel_spec: KernelSpec, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and entropy in strips of plain torch: (L, H, N, …)."""
    heads, groups = x.key.shape[1], x.query.shape[1] // x.key.shape[1]
    bias = x.bias if kernel_spec.kind == BIAS_TENSOR else None
    if bias is not None:
        bias = bias.unsqueeze(1) if bias.shape[1] == 1 else bias.unflatten(1, (heads, groups))
    query, key, value = (t.float() for t in zero_unseen(kernel_spec.spec, x.query, x.key, x.value, bias))
    if x.vector is None:
        query = query * (kernel_spec.scale if x.scale is None else x.scale.reshape(-1, 1, 1))
    shared: tuple[Tensor, ...] = () if x.vector is None else (x.vector,)
    if kernel_spec.kind in (BIAS_ALIBI, BIAS_RELATIVE) and x.bias is not None:
        shared += (x.bias,)
    made = FoldedProblem(query.unflatten(1, (heads, groups)), key, value, bias, shared, kernel_spec.spec)
    tensors = (made.query, key, value, *(() if bias is None else (bias,)), *shared)
    output, lse, entropy = (t.flatten(1, 2) for t in call_function(MapStrips, attention_strips(made, TileSizes()), *tensors))
    if x.sink is not None:
        output, lse, entropy = _sunken(x.sink, output, lse, entropy)
    return output.to(x.value.dtype), lse, entropy
