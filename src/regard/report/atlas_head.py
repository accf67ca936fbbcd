"""Extract one head of an observation, so that a map computes that head alone and keeps every option that acts on it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.biases import Alibi, Bias, Relative
from regard.chunked.tile_ops import RowStats
from regard.compat.torch import without_autocast
from regard.core.folded import FoldedProblem, fold
from regard.core.problem import Problem
from regard.errors import ArgumentError
from regard.masks import Mask
from regard.observation import Observation

__all__ = ["one_head", "size_of"]


def size_of(seen: Observation) -> tuple[int, int, int, int]:
    """(batch items, query heads, queries, keys) of an observation."""
    p = seen._problem
    return p.query.shape[0], p.query.shape[1], p.rows, p.keys


@torch.no_grad()
@without_autocast
def one_head(seen: Observation, item: int, head: int) -> tuple[FoldedProblem, RowStats]:
    """The folded problem of one batch item and one head, and the row statistics of its forward pass."""
    p, found = seen._plain_problem("Pyramid"), seen._rows
    batch, heads, rows, keys = size_of(seen)
    for name, at, size in (("item", item, batch), ("head", head, heads)):
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < size:
            raise ArgumentError(f"Pyramid: {name} must be a whole number from 0 to {size - 1}. Got {at!r}.")
    if 0 in (rows, keys):
        raise ArgumentError(f"Pyramid: a map needs at least one query and one key. Got {rows} queries, {keys} keys.")
    if found.max_logit is None or found.log_row_sum is None:
        raise RuntimeError("a map needs the row statistics of the forward pass")
    row_max, log_row_sum = (
        t.reshape(batch, heads, rows)[item, head].view(1, 1, 1, -1) for t in (found.max_logit, found.log_row_sum)
    )
    return _fold_head(p, item, head), RowStats.at(row_max.detach(), log_row_sum.detach())


def _fold_head(p: Problem, item: int, head: int) -> FoldedProblem:
    query, key = p.query[item : item + 1], p.key[item : item + 1]
    scale, shared = p.scale, tuple[Tensor, ...]()
    if p.score is not None:  # its parameters may differ per head: prepare all heads, then keep one
        query, key, shared = p.score.prepare(query.to(p.exact_dtype), key.to(p.exact_dtype))
        scale = 1.0
    elif isinstance(scale, Tensor) and scale.numel() > 1:
        scale = scale[head]
    kv_head = head // (p.query.shape[1] // p.key.shape[1])
    key = key[:, kv_head : kv_head + 1]
    x = fold(
        p._replace(
            query=query[:, head : head + 1],
            key=key,
            value=key[..., :0],
            mask=None if p.mask is None else _one_head_mask(p.mask, p.query.shape[0], item, head),
            bias=_one_head_bias(p.bias, item, head),
            score=None,
            scale=scale,
            sink=None,  # the row statistics include it
            dropout=0.0,
            lead=(1, 1),
        )
    )
    if p.score is not None:
        spec = replace(x.spec.with_score(p.score, len(shared), p.exact_dtype), origin=(item, head))
        x = x._replace(shared=(*shared, *x.shared), spec=spec)
    return x._replace(key=x.key.mT.contiguous().mT)  # the layout that tile_ops reads, so that no tile copies it again


def _one_head_mask(mask: Mask, batch: int, item: int, head: int) -> Mask:
    items = mask.lead[0]
    at = item * items // batch  # several flattened items may share one item of the mask
    return mask.restrict(slice(at, at + 1), slice(head, head + 1))


def _one_head_bias(bias: Tensor | Bias | None, item: int, head: int) -> Tensor | Bias | None:
    if isinstance(bias, Tensor):
        bias = bias if bias.shape[0] == 1 else bias[item : item + 1]
        return bias if bias.shape[1] == 1 else bias[:, head : head + 1]
    if bias is None or bias.heads == 1:
        return bias
    if isinstance(bias, Alibi):
        return replace(bias, slopes=bias.slopes[head : head + 1])
    if isinstance(bias, Relative):
        return replace(bias, table=bias.table[head : head + 1])
    return _OneHeadBias(bias, head)


class _OneHeadBias(Bias):
    """One head of a user-defined bias."""

    def __init__(self, bias: Bias, head: int) -> None:
        self.bias, self.head = bias, head

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.bias.tensors

    @property
    def heads(self) -> int:
        return 1

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        return self.bias.tile(tensors, i, j, n, m)[self.head : self.head + 1]

    def to(self, device: torch.device | str) -> _OneHeadBias:
        return _OneHeadBias(self.bias.to(device), self.head)
