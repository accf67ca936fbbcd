"""The backward pass, strip by strip: weights are computed again, and their slopes carried back to the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd.engine import MaybeTensors
from ..autograd.strip_map import vjp_of
from ..core.folded import FoldedProblem
from ..core.formula import bias_tile, kept, products
from ..core.rows import Rows
from ..core.tiling import BIAS, KEY, QUERY, ROW, TRANSPOSED, Tile, TileSizes, strips
from .tile_ops import RowStats, Workspace, logits_and_weights

__all__ = ["add", "backward", "rows_of", "zeros"]


def backward(
    x: FoldedProblem,
    tile_sizes: TileSizes,
    needs: tuple[bool, ...],
    found: Rows,
    cotangents: MaybeTensors,
) -> tuple[Tensor | None, ...]:
    """Cotangents of (query, key, value, bias, *shared) where needed: dS = P ∘ (dP − δ + g_lse − g_H·(S − E[S]))."""
    output, _, entropy, row_max, log_row_sum = found
    dO, g_lse, g_H = cotangents
    dO = torch.zeros_like(output) if dO is None else dO
    delta = -(dO * output).sum(-1) if g_lse is None else g_lse - (dO * output).sum(-1)  # (L, K, G, N)
    look = RowStats.at(row_max, log_row_sum)
    mean = log_row_sum - entropy  # E[S] above the largest logit
    inputs = (x.query, x.key, x.value, x.bias, *x.shared)
    grads = [zeros(t, x.query.dtype) if need else None for t, need in zip(inputs, needs, strict=True)]
    workspace = Workspace()
    for strip in strips(x.spec, x.query.shape, tile_sizes):
        for run in strip.runs:
            tile = strip.tile(run)
            X, P = logits_and_weights(x, tile, run, look, workspace)  # (l, k, g, r, c)
            dO_tile = rows_of(QUERY.part(dO, tile))  # (l, k, g·r, E)
            values = TRANSPOSED.part(workspace.turned("values", x.value, x.spec.n), tile)
            dP = workspace.product("slopes", QUERY.part(dO, tile), values)
            Pd = P
            if x.spec.dropout:
                keep = kept(x.spec, tile, X.shape[2], X.device).to(X.dtype) / (1 - x.spec.dropout)
                dP.mul_(keep)
                Pd = P * keep
            if grads[2] is not None:
                KEY.part(grads[2], tile).add_(rows_of(Pd).mT @ dO_tile)
            dS = dP.add_(ROW.part(delta, tile)[..., None]).mul_(P)
            if g_H is not None:
                surprise = X.sub_(ROW.part(mean, tile)[..., None]).mul_(P)
                dS.sub_(surprise.mul_(ROW.part(g_H, tile)[..., None]))
            _pull(x, tile, dS, grads)
    return tuple(g if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))


def _pull(x: FoldedProblem, tile: Tile, dS: Tensor, grads: list[Tensor | None]) -> None:
    """Carry the cotangent of a tile's logits back to bias, queries, keys and parameters."""
    spec = x.spec
    groups = dS.shape[2]
    if grads[3] is not None:
        part = BIAS.part(grads[3], tile)
        part.add_(dS.sum_to_size(part.shape))
    tables = x.shared[spec.paired :]
    if spec.bias is not None and any(g is not None for g in grads[4 + spec.paired :]):
        skipped = x.shared[: spec.paired]
        added, pull = vjp_of(lambda *t: bias_tile(spec, tile, groups, None, (*skipped, *t)), *tables)
        add(grads, 4 + spec.paired, pull(dS.sum_to_size(added.shape)))
    query, key = QUERY.part(x.query, tile), KEY.part(x.key, tile)
    if spec.softcap is not None:
        raw = products(spec, query, key, x.shared)
        dS = dS.mul_(1 - (raw / spec.softcap).tanh_().square_())
    if spec.pair is not None:
        paired = x.shared[: spec.paired]
        _, pull = vjp_of(lambda q, k, *w: products(spec, q, k, w), query, key, *paired)
        d_query, d_key, *d_shared = pull(dS)
        add(grads, 4, d_shared)
    else:
        d_query = (rows_of(dS) @ key).unflatten(2, dS.shape[2:4]) if grads[0] is not None else None
        d_key = rows_of(dS).mT @ rows_of(query) if grads[1] is not None else None
    if grads[0] is not None and d_query is not None:
        QUERY.part(grads[0], tile).add_(d_query)
    if grads[1] is not None and d_key is not None:
        KEY.part(grads[1], tile).add_(d_key)


def add(grads: list[Tensor | None], first: int, found: Sequence[Tensor]) -> None:
    for at, g in enumerate(found, first):
        if (total := grads[at]) is not None:
            total.add_(g)


def rows_of(x: Tensor) -> Tensor:
    """(l, k, g, r, …) as (l, k, g·r, …)."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def zeros(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else torch.zeros(x.shape, dtype=dtype, device=x.device)
