"""The problem as tiles take it: scale and score folded into query and key, heads grouped, in exact arithmetic.

Folding is plain differentiable torch, so parameters of scores and scales get derivatives of every order without more
code. So does the sink, which is applied to finished rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .nonfinite import zero_unseen
from .problem import Problem
from .rows import Rows
from .spec import Spec

__all__ = ["FoldedProblem", "add_sink", "fold", "group_bias", "unfold"]


class FoldedProblem(NamedTuple):
    """The tensors that have derivatives, and the spec."""

    query: Tensor  # (L, K, G, N, D): G query heads share one of K key heads
    key: Tensor  # (L, K, M, D)
    value: Tensor  # (L, K, M, E)
    bias: Tensor | None  # (L|1, K|1, G|1, N|1, M|1)
    shared: tuple[Tensor, ...]  # parameters without a batch
    spec: Spec

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The inputs of an engine, in their order."""
        return self.query, self.key, self.value, self.bias, *self.shared


def group_bias(bias: Tensor | None, heads: int) -> Tensor | None:
    """A bias tensor (L|1, H|1, N|1, M|1) with its query heads grouped by key head: (L|1, K|1, G|1, N|1, M|1)."""
    if bias is None:
        return None
    return bias.unsqueeze(1) if bias.shape[1] == 1 else bias.unflatten(1, (heads, bias.shape[1] // max(heads, 1)))


def fold(p: Problem, seed: int | Tensor = 0, finite: bool = False) -> FoldedProblem:
    """Fold the score into query and key, cast, and group the heads; `seed` decides what dropout drops.

    `finite` says that no NaN or inf can spread from what is hidden, and saves the look at every number.
    """
    exact = p.exact_dtype
    heads, groups = p.key.shape[1], p.query.shape[1] // max(p.key.shape[1], 1)
    spec = Spec.of(p, seed)
    bias = group_bias(p.bias if isinstance(p.bias, Tensor) else None, heads)
    parts = zero_unseen(spec, p.query, p.key, p.value, bias, finite)
    query, key, value = (x.to(exact) for x in parts)
    shared: tuple[Tensor, ...] = ()
    if p.score is not None:
        query, key, shared = p.score.prepare(query, key)
        spec = spec.with_score(p.score, len(shared), exact)
    elif isinstance(p.scale, Tensor):
        query = query * p.scale.to(exact).reshape(-1, 1, 1)
    else:
        query = query * p.scale
    if spec.bias is not None:
        shared += tuple(t.to(exact) for t in spec.bias.tensors)
    return FoldedProblem(query.unflatten(1, (heads, groups)), key, value, bias, shared, spec)


def add_sink(sink: Tensor, lse: Tensor, entropy: Tensor, row_max: Tensor, log_row_sum: Tensor) -> tuple[Tensor, ...]:
    """Row statistics (L, H, N) with one more logit per head: log of the keys' share, lse, entropy, log_row_sum."""
    sink = sink.to(lse.dtype)[:, None].expand_as(lse)
    seen = lse > -torch.inf
    alone = torch.where(seen, lse, 0.0)
    total = torch.logaddexp(alone, sink)
    left = torch.where(seen, alone - total, 0.0)
    entropy = left.exp() * (entropy - left)
    log_row_sum = torch.where(seen, torch.logaddexp(log_row_sum, sink.detach() - row_max), 0.0)
    return left, torch.where(seen, total, sink), entropy, log_row_sum


def unfold(p: Problem, rows: Rows) -> Rows:
    """Let the sink take its share of each row, and give the results the caller's shape and dtype."""
    output, lse, entropy, row_max, log_row_sum = (x.flatten(1, 2) for x in rows)
    if p.sink is not None:
        left, lse, entropy, log_row_sum = add_sink(p.sink, lse, entropy, row_max, log_row_sum)
        output = output * left.exp()[..., None]
    output = p.shaped(output.to(p.dtype))
    if not p.observed:
        return Rows(output)
    return Rows(output, p.shaped(lse), p.shaped(entropy), p.shaped(row_max), p.shaped(log_row_sum))
