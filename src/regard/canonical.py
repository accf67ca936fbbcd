"""The problem as every tile sees it: scale and score folded into q and k, heads grouped, in exact arithmetic.

Folding happens in plain differentiable torch, so the parameters of scores and scales get their derivatives, of every
order, for nothing; so does the sink, which is applied to finished rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .biases import Bias
from .masks import Mask
from .problem import Problem

__all__ = ["Canonical", "Result", "Rows", "Rule", "canonical", "finish"]


@dataclass(frozen=True, eq=False)
class Rule:
    """What turns dot products into weights, apart from the tensors that have derivatives."""

    n: int
    m: int
    mask: Mask | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    pair: Callable[..., Tensor] | None = None  # logits of a score that is no dot product
    cost: int = 1  # numbers in flight for each pair
    bias: Bias | None = None  # a structured bias
    paired: int = 0  # how many of the shared tensors belong to `pair`; the others to `bias`
    inner: int = 1  # flattened items that share one batch item of the mask
    period: int = 1  # flattened items before the mask begins again (vmap puts more in front)


class Canonical(NamedTuple):
    """Tensors with derivatives, and the rule."""

    query: Tensor  # (L, K, G, N, D): G query heads share one of K key heads
    key: Tensor  # (L, K, M, D)
    value: Tensor  # (L, K, M, E)
    bias: Tensor | None  # (L|1, K|1, G|1, N|1, M|1)
    shared: tuple[Tensor, ...]  # parameters without a batch
    rule: Rule


class Rows(NamedTuple):
    """What the rows of the softmax come to, before the sink."""

    output: Tensor  # (L, K, G, N, E)
    lse: Tensor  # (L, K, G, N)
    entropy: Tensor  # the same; empty where nobody observes
    max_logit: Tensor


class Result(NamedTuple):
    """What a backend gives back, in the caller's shape; the statistics are None where nobody observes."""

    output: Tensor  # (…, Hq, N, Dv)
    lse: Tensor | None  # (…, Hq, N)
    entropy: Tensor | None
    max_logit: Tensor | None


def canonical(p: Problem) -> Canonical:
    """Fold the score, cast, and group the heads."""
    exact = p.exact_dtype
    query, key, value = p.query.to(exact), p.key.to(exact), p.value.to(exact)
    shared: tuple[Tensor, ...] = ()
    if p.score is not None:
        query, key, shared = p.score.prepare(query, key)
    elif isinstance(p.scale, Tensor):
        query = query * p.scale.to(exact).reshape(-1, 1, 1)
    else:
        query = query * p.scale
    paired = len(shared)
    batch, heads, groups = query.shape[0], key.shape[1], query.shape[1] // max(key.shape[1], 1)
    bias = p.bias if isinstance(p.bias, Tensor) else None
    structured = None
    if bias is not None:
        bias = bias.unflatten(1, (heads, groups)) if bias.shape[1] != 1 or heads * groups == 1 else bias.unsqueeze(1)
    elif isinstance(p.bias, Bias):
        structured = p.bias
        shared += tuple(t.to(exact) for t in structured.tensors)
    rule = Rule(
        n=p.rows,
        m=p.keys,
        mask=p.mask,
        softcap=p.softcap,
        dropout=p.dropout,
        seed=p.seed,
        pair=p.score.pair if p.score is not None and p.score.pairwise else None,
        cost=p.score.cost if p.score is not None else 1,
        bias=structured,
        paired=paired,
        inner=batch // p.mask.lead[0] if p.mask is not None and p.mask.lead[0] > 1 else 1,
        period=batch,
    )
    return Canonical(query.unflatten(1, (heads, groups)), key, value, bias, shared, rule)


def finish(p: Problem, rows: Rows) -> Result:
    """Let the sink take its share of each row, and give the results the caller's shape and dtype."""
    output, lse = rows.output.flatten(1, 2), rows.lse.flatten(1, 2)
    entropy = rows.entropy.flatten(1, 2) if p.observed else None
    if p.sink is not None:
        sink = p.sink.to(lse.dtype)[:, None].expand_as(lse)
        seen = lse > -torch.inf
        alone = torch.where(seen, lse, 0.0)
        total = torch.logaddexp(alone, sink)
        left = torch.where(seen, alone - total, 0.0)  # log of what the sink leaves to the keys
        output = output * left.exp()[..., None]
        entropy = None if entropy is None else left.exp() * (entropy - left)
        lse = torch.where(seen, total, sink)
    output = p.shaped(output.to(p.dtype))
    if entropy is None:
        return Result(output, None, None, None)
    return Result(output, p.shaped(lse), p.shaped(entropy), p.shaped(rows.max_logit.flatten(1, 2)))
