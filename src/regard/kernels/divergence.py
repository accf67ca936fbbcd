"""The divergence between two attentions by our kernels: its sides, its value and its derivatives.

The kernels have a first derivative. Second ones differentiate the formula in strips of rows, which has them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..compat.torch import cached_signature, call_function
from .arguments import KernelArgs
from .block_mask import BlockMask

if TYPE_CHECKING:
    from .portable.divergence_launch import DivergenceRows, Pair

__all__ = ["FusedDivergence", "FusedSide", "PairTensors", "fused_divergence", "log2_lse"]

_LOG2E = 1 / math.log(2)
_DEEP = -1e4  # as in the kernels: 2 to it is 0


class PairTensors(NamedTuple):
    """The tensors of both sides that may have derivatives."""

    q_p: Tensor  # (L, H, N, D)
    k_p: Tensor  # (L, K, M, D)
    sink_p: Tensor | None  # float32 (H,)
    q_r: Tensor
    k_r: Tensor
    sink_r: Tensor | None


class FusedSide(NamedTuple):
    """What else one of the two attentions has; its logits are products times a positive number, perhaps capped."""

    scale: float
    softcap: float | None
    block_mask: BlockMask
    lse: Tensor | None = None  # where it is known, as `log2_lse` gives it

    def kernel_args(self, query: Tensor, key: Tensor, sink: Tensor | None) -> KernelArgs:
        query, key = query.detach(), key.detach()
        sink = None if sink is None else sink.detach().contiguous()
        return KernelArgs(query, key, key, self.block_mask, self.scale, softcap=self.softcap, sink=sink)


@dataclass(frozen=True, eq=False)
class FusedDivergence:
    """What is computed: KL(p ‖ r), with or without an epsilon, or JS."""

    p: FusedSide
    r: FusedSide
    js: bool
    mean: bool  # whether the weights are averaged over heads first
    listed: bool  # whether both masks are the same
    epsilon: float | None
    count: Tensor | None  # with an epsilon: how many outcomes each row has, broadcastable to (L, H, N)
    formula: Callable[[PairTensors], Tensor]  # with derivatives of every order

    def pair(self, x: PairTensors) -> Pair:
        from .portable.divergence import EPSILON, JS, KL
        from .portable.divergence_launch import Mix, Pair

        p, r = self.p.kernel_args(x.q_p, x.k_p, x.sink_p), self.r.kernel_args(x.q_r, x.k_r, x.sink_r)
        kind, mix = JS if self.js else KL, Mix()
        if self.epsilon is not None and self.count is not None:
            floor = math.log2(self.epsilon) - self.count.float().log2()
            rows = (p.rows[0], 1, p.rows[2]) if self.mean else p.rows
            kind, mix = EPSILON, Mix(math.log1p(-self.epsilon) * _LOG2E, floor.expand(rows).contiguous())
        return Pair(p, r, kind, self.listed, self.mean, mix, (self.p.lse, self.r.lse))


def log2_lse(lse: Tensor | None, query: Tensor) -> Tensor | None:
    """The lse of an Observation as kernels have it: float32 (L, H, N), in log2 units, a constant."""
    return None if lse is None else (lse.detach().float() * _LOG2E).reshape(query.shape[:3]).contiguous()


def fused_divergence(plan: FusedDivergence, x: PairTensors) -> Tensor:
    """The divergence of each row: float32 (L, H, N), or (L, 1, N) for the mean over heads."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        found: Tensor = call_function(_Divergence, plan, *x)
        return found
    return _forward(plan.pair(x)).value


def _forward(pair: Pair) -> DivergenceRows:
    from . import launch

    return launch.divergence(pair.p, pair)


def _backward(pair: Pair, rows: DivergenceRows, g: Tensor, needs: tuple[bool, ...]) -> list[Tensor | None]:
    from . import launch

    dq, dk = launch.divergence_backward(pair.p, pair, rows, g, (needs[0], needs[3]), (needs[1], needs[4]))
    sinks = _sink_gradients(pair, rows, g) if needs[2] or needs[5] else (None, None)
    found = dq.p, dk.p, sinks[0], dq.r, dk.r, sinks[1]
    return [t if need else None for t, need in zip(found, needs, strict=True)]


@cached_signature
class _Divergence(torch.autograd.Function):
    """A divergence with the gradients of queries, keys and sinks of both sides."""

    @staticmethod
    def forward(ctx: Any, plan: FusedDivergence, *tensors: Any) -> Tensor:
        rows = _forward(plan.pair(PairTensors(*tensors)))
        ctx.plan = plan
        ctx.save_for_backward(*tensors, *rows)
        return rows.value.clamp(min=0)  # which rounding may have made negative

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from .portable.divergence_launch import DivergenceRows

        plan, needs = ctx.plan, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors
        x, rows = PairTensors(*saved[:6]), DivergenceRows(*saved[6:])
        if torch.is_grad_enabled():  # a second derivative may be asked for
            wanted = [t for t, need in zip(x, needs, strict=True) if need and t is not None]
            grads = iter(torch.autograd.grad(plan.formula(x), wanted, g, create_graph=True))
            return None, *(next(grads) if need else None for need in needs)
        return None, *_backward(plan.pair(x), rows, g.contiguous(), needs)


def _sink_gradients(w: Pair, rows: DivergenceRows, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of the sinks of both sides, from what is known of the rows: as in `pair_backward`."""
    from .portable.divergence import EPSILON, JS

    weights = []
    for sink, lse in ((w.p.sink, rows.lse_p), (w.r.sink, rows.lse_r)):
        x = torch.full_like(lse, _DEEP) if sink is None else (sink[:, None] * _LOG2E - lse).clamp(min=_DEEP)
        weights.append(torch.where(lse == -torch.inf, _DEEP, x))
    x_p, x_r = weights
    p, r = x_p.exp2(), x_r.exp2()
    if w.kind == JS:
        d = x_p - x_r
        s = torch.logaddexp2(torch.zeros_like(d), d)
        A, rB = 0.5 * (1 - s + d), 0.5 * math.log(2) * r * (1 - s)
    elif w.kind == EPSILON and w.mix.floor is not None:
        d = x_r + w.mix.kept - w.mix.floor
        s = torch.logaddexp2(torch.zeros_like(d), d)
        A, rB = x_p - w.mix.floor - s, -p * (d - s).exp2()
    else:
        A, rB = x_p - x_r, -p
    delta_p, delta_r = rows.delta_p, rows.delta_r
    if delta_p is None or delta_r is None:  # KL
        infinite = rows.value == torch.inf
        g, delta_p = torch.where(infinite, 0.0, g), torch.where(infinite, 0.0, rows.value)
        delta_r = torch.where(rows.lse_p == -torch.inf, 0.0, -1.0)
    d_p, d_r = g * p * (A * math.log(2) - delta_p), g * (rB - r * delta_r)
    return d_p.sum((0, 2)), d_r.sum((0, 2))
