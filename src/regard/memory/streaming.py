"""Reads that see a chunk of rows at a time: the online softmax, its gradient, and the strongest rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..chunked.statistics import strongest as strongest_of
from ..compat.torch import call_function, without_autocast
from ..softmax import arithmetic_dtype, lowest
from .progress import Progress
from .reading import Asked, Reading
from .snapshot import Source

__all__ = ["chunk_rows", "read", "strongest"]

_BYTES = 8 << 20  # of keys and values that are mapped together
_PAIRS = 1 << 20  # logits in flight
_KEYS = 2048  # of a tile, at least: below it a product does not pay


@dataclass(frozen=True)
class _Plan:
    """A read that can be done again, for its gradient."""

    source: Source
    asked: Asked
    size: int  # rows in memory together
    observed: bool = True  # whether the entropy is wanted
    progress: Progress | None = None


def chunk_rows(row_bytes: int) -> int:
    """Say how many rows are mapped together."""
    return max(_BYTES // row_bytes, 1)


def read(source: Source, asked: Asked, size: int, observed: bool, progress: Progress) -> Reading:
    """Average all values with softmax weights, in memory that does not depend on how many rows there are."""
    plan = _Plan(source, asked, size, observed, progress)
    return Reading(*call_function(_Read, plan, asked.queries, *asked.parameters)[:4])


@without_autocast
def strongest(source: Source, asked: Asked, k: int, size: int, progress: Progress) -> tuple[Tensor, Tensor]:
    """Find the largest logits (n, k), largest first, and the places of their rows; ties to the row written first."""
    plan = _Plan(source, asked, size, progress=progress)
    n = len(asked.queries)
    dtype = arithmetic_dtype(asked.queries.dtype)
    best = torch.full((n, k), -torch.inf, dtype=dtype, device=asked.queries.device)
    where = torch.full((n, k), -1, dtype=torch.int64, device=asked.queries.device)
    with torch.no_grad():
        for rows, queries, keys, _, places in _tiles(plan):
            S = asked.logits(queries, keys)  # (r, c)
            ahead = (S.amax(-1) > best[rows, -1]).nonzero().squeeze(-1)  # the others have nothing new
            if not len(ahead):
                continue
            S = S if len(ahead) == len(S) else S[ahead]
            found, index = strongest_of(S, min(k, S.shape[-1]))
            ahead = ahead + rows.start
            found = torch.cat((best[ahead], found), -1)
            index = torch.cat((where[ahead], places[index]), -1)
            order = found.sort(dim=-1, descending=True, stable=True).indices[:, :k]
            best[ahead], where[ahead] = found.gather(-1, order), index.gather(-1, order)
    return best, where


class _Read(torch.autograd.Function):
    """(queries, *parameters) -> (output, lse, entropy, max logit, ln of the denominator above it)."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, plan: _Plan, queries: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        O, l, e, m = _fold(plan)  # noqa: E741
        spread = l.log()
        found = (O / l[:, None]).to(queries.dtype), m + spread, spread - e / l, m, spread
        ctx.plan = replace(plan, progress=None)
        ctx.save_for_backward(queries, *parameters, *found)
        ctx.mark_non_differentiable(*found[3:])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Read again: dS = P ∘ (dP − δ + g_lse − g_H·(S − E[S])), carried from each tile to queries and parameters."""
        queries, *_, output, _, entropy, m, spread = ctx.saved_tensors
        parameters = ctx.plan.asked.parameters
        dO, g_lse, g_H, *_ = cotangents
        dtype = m.dtype
        dO = None if dO is None else dO.to(dtype)
        delta = torch.zeros_like(m) if g_lse is None else g_lse
        delta = delta if dO is None else delta - (dO * output).sum(-1)  # (n)
        leaves = [p for p in parameters if p.requires_grad]
        grads = [torch.zeros_like(queries, dtype=dtype), *(torch.zeros_like(p) for p in leaves)]
        for rows, q, keys, values, _ in _tiles(ctx.plan):
            with torch.enable_grad():
                q = q.detach().requires_grad_()
                S = ctx.plan.asked.logits(q, keys)  # (r, c)
            X = S.detach() - m[rows, None]
            P = (X - spread[rows, None]).exp_()
            dS = delta[rows, None] + (0.0 if dO is None else dO[rows] @ values.mT)
            if g_H is not None:
                mean = (spread - entropy)[rows, None]  # E[S] above the largest logit
                dS = dS - g_H[rows, None] * (X - mean)
            parts = torch.autograd.grad(S, [q, *leaves], dS * P, allow_unused=True)
            for whole, part in zip((grads[0][rows], *grads[1:]), parts, strict=True):
                if part is not None:
                    whole.add_(part)
        given = iter(grads[1:])
        return None, grads[0].to(queries.dtype), *(next(given) if p.requires_grad else None for p in parameters)


def _fold(plan: _Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numerator, denominator, e = Σ exp(s − max)·(s − max), and max of every row."""
    queries = plan.asked.queries
    dtype = arithmetic_dtype(queries.dtype)
    l = torch.zeros(len(queries), dtype=dtype, device=queries.device)  # noqa: E741
    e, m = torch.zeros_like(l), torch.full_like(l, lowest(dtype))
    O: Tensor | None = None  # noqa: E741
    for rows, q, keys, values, _ in _tiles(plan):
        if O is None:
            O = values.new_zeros(len(queries), values.shape[-1])  # noqa: E741
        S = plan.asked.logits(q, keys)  # (r, c)
        top = torch.maximum(m[rows], S.amax(-1))
        down = (m[rows] - top).clamp_(min=-1e4)  # finite, and deep enough for exp to be 0
        a = down.exp()
        X = S.sub_(top[:, None])
        P = X.exp() if plan.observed else X.exp_()
        if plan.observed:
            e[rows] = a * (e[rows] + down * l[rows]) + torch.linalg.vecdot(X, P)
        l[rows].mul_(a).add_(P.sum(-1))
        O[rows].mul_(a[:, None]).addmm_(P, values)
        m[rows] = top
    if O is None:
        raise RuntimeError("a memory without rows has nothing to fold")
    return O, l, e, m


def _tiles(plan: _Plan) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Every tile: which queries, these, keys, values, and the keys' places, in the dtype of the arithmetic."""
    queries = plan.asked.queries.detach()
    queries = queries.to(arithmetic_dtype(queries.dtype))
    pairs = max(_PAIRS // plan.asked.cost, 1)
    height = max(min(pairs // _KEYS, len(queries)), 1)
    width = max(pairs // height, 1)
    for chunk, places in plan.source.chunks(plan.size):
        for start in range(0, len(places), width):
            part = slice(start, start + width)
            keys, values = (x[part].detach().to(queries.dtype) for x in (chunk.keys, chunk.values))
            for first in range(0, len(queries), height):
                rows = slice(first, min(first + height, len(queries)))
                yield rows, queries[rows], keys, values, places[part]
        if plan.progress is not None:
            plan.progress.add(len(places))
