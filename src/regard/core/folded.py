"""The problem as every tile sees it: scale and score folded into q and k, heads grouped, in exact arithmetic.

Folding happens in plain differentiable torch, so the parameters of scores and scales get their derivatives, of every
order, for nothing; so does the sink, which is applied to finished rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..biases import Bias
from .nonfinite import zero_unseen
from .problem import Problem
from .rows import Rows
from .spec import Spec

__all__ = ["FoldedProblem", "add_sink", "fold", "unfold"]


class FoldedProblem(NamedTuple):
    """Tensors with derivatives, and the rule."""

    query: Tensor  # (L, K, G, N, D): G query heads share one of K key heads
    key: Tensor  # (L, K, M, D)
    value: Tensor  # (L, K, M, E)
    bias: Tensor | None  # (L|1, K|1, G|1, N|1, M|1)
    shared: tuple[Tensor, ...]  # parameters without a batch
    spec: Spec


def fold(p: Problem, seed: int = 0) -> FoldedProblem:
    """Fold the score, cast, and group the heads; `seed` decides what dropout drops."""
    exact = p.exact_dtype
    batch, heads, groups = p.query.shape[0], p.key.shape[1], p.query.shape[1] // max(p.key.shape[1], 1)
    structured, bias = (p.bias, None) if isinstance(p.bias, Bias) else (None, p.bias)
    if bias is not None:
        bias = bias.unsqueeze(1) if bias.shape[1] == 1 else bias.unflatten(1, (heads, groups))
    spec = Spec(
        n=p.rows,
        m=p.keys,
        mask=p.mask,
        softcap=p.softcap,
        dropout=p.dropout,
        seed=seed,
        bias=structured,
        inner=batch // p.mask.lead[0] if p.mask is not None and p.mask.lead[0] > 1 else 1,
        period=batch,
    )
    parts = zero_unseen(spec, p.query, p.key, p.value, bias)
    query, key, value = (x.to(exact) for x in parts)
    shared: tuple[Tensor, ...] = ()
    if p.score is not None:
        query, key, shared = p.score.prepare(query, key)
        pair = p.score.pair if p.score.pairwise else None
        spec = replace(spec, pair=pair, cost=p.score.cost, paired=len(shared))
    elif isinstance(p.scale, Tensor):
        query = query * p.scale.to(exact).reshape(-1, 1, 1)
    else:
        query = query * p.scale
    if structured is not None:
        shared += tuple(t.to(exact) for t in structured.tensors)
    return FoldedProblem(query.unflatten(1, (heads, groups)), key, value, bias, shared, spec)


def add_sink(sink: Tensor, lse: Tensor, entropy: Tensor, row_max: Tensor, log_row_sum: Tensor) -> tuple[Tensor, ...]:
    """Row statistics (L, H, N) with one more logit a head: log of what it leaves to the keys; lse, entropy, spread."""
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
