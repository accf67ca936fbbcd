"""The backward pass over strips of rows: weights are computed again, and dS is multiplied into the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..autograd.engine import MaybeTensors, Needs
from ..autograd.strip_map import vjp_of
from ..core.folded import FoldedProblem
from ..core.formula import bias_tile, kept, scores
from ..core.rows import Rows
from ..core.tiling import BIAS, KEY, QUERY, ROW, Tile, TileSizes, tiles
from .batched_vjp import RowCotangents, add_batch
from .tile_batches import items_apart, tile_batches
from .tile_ops import RowStats, Workspace, logits_and_weights, multiply, weights

__all__ = ["GradSums", "add_to", "cast_sums", "rows_of", "vjp", "zero_sums"]


def zero_sums(x: FoldedProblem, needs: Needs) -> list[Tensor | None]:
    """Zeros for the sums of the gradients, in exact arithmetic; None for inputs that need none."""
    return [
        torch.zeros(t.shape, dtype=x.query.dtype, device=t.device) if need and t is not None else None
        for t, need in zip(x.inputs, needs, strict=True)
    ]


def cast_sums(x: FoldedProblem, sums: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The sums in the dtypes of their inputs."""
    return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in zip(sums, x.inputs, strict=True))


@dataclass
class GradSums:
    """Running sums of the gradients by name, as `zero_sums` makes them."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    score: list[Tensor | None]  # of the score's parameters
    tables: list[Tensor | None]  # of the structured bias

    @staticmethod
    def zeros(x: FoldedProblem, needs: Needs) -> GradSums:
        query, key, value, bias, *shared = zero_sums(x, needs)
        return GradSums(query, key, value, bias, shared[: x.spec.paired], shared[x.spec.paired :])

    def cast(self, x: FoldedProblem) -> tuple[Tensor | None, ...]:
        return cast_sums(x, (self.query, self.key, self.value, self.bias, *self.score, *self.tables))

    @property
    def wants_tables(self) -> bool:
        return any(g is not None for g in self.tables)

    def add_keys(self, tile: Tile, key: Tensor | None, value: Tensor | None) -> None:
        for total, g in ((self.key, key), (self.value, value)):
            if total is not None and g is not None:
                part = KEY.part(total, tile)
                part.add_(g.view(part.shape))

    def add_bias(self, tile: Tile, dS: Tensor) -> None:
        if self.bias is not None:
            part = BIAS.part(self.bias, tile)
            part.add_(dS.sum_to_size(part.shape))


def add_to(sums: Sequence[Tensor | None], grads: Sequence[Tensor]) -> None:
    for total, g in zip(sums, grads, strict=True):
        if total is not None:
            total.add_(g)


def vjp(
    x: FoldedProblem, tile_sizes: TileSizes, needs: Needs, rows: Rows, cotangents: MaybeTensors
) -> tuple[Tensor | None, ...]:
    """Cotangents of (query, key, value, bias, *shared) where needed: dS = P ∘ (dP − δ + g_lse − g_H·(S − E[S]))."""
    sizes = tile_sizes.on(x.query.device, masked=x.spec.mask is not None, independent=False)
    if items := items_apart(x, sizes):
        return _vjp_of_items(x, items, tile_sizes, needs, rows, cotangents)
    dO, g_lse, g_H = cotangents
    dO = torch.zeros_like(rows.output) if dO is None else dO
    delta = -(dO * rows.output).sum(-1) if g_lse is None else g_lse - (dO * rows.output).sum(-1)  # (L, K, G, N)
    stats = RowStats.at(rows.max_logit, rows.log_row_sum)
    mean = rows.log_row_sum - rows.entropy  # E[S] above the row max
    sums = GradSums.zeros(x, needs)

    workspace = Workspace()
    batches = None if x.spec.mask is None else tile_batches(x, sizes, workspace)
    if batches is not None:
        given = RowCotangents(dO, stats, delta, mean, g_H)
        for batch in batches:
            add_batch(x, batch, given, (sums.query, sums.key, sums.value), workspace)
        return sums.cast(x)
    for tile, run in tiles(x.spec, x.query.shape, sizes):
        X: Tensor | None = None
        if g_H is None:
            P = weights(x, tile, run, stats, workspace)  # (l, k, g, r, c)
        else:
            X, P = logits_and_weights(x, tile, run, stats, workspace)
        dO_tile = QUERY.part(dO, tile)
        dP = workspace.product("dP", dO_tile, workspace.transposed("values", x.value, x.spec.n, tile))
        Pd = P
        if x.spec.dropout:
            keep = kept(x.spec, tile, P.shape[2], P.device).to(P.dtype) / (1 - x.spec.dropout)
            dP.mul_(keep)
            Pd = P * keep
        d_value = None if sums.value is None else multiply(matrices_of(Pd).mT, matrices_of(dO_tile))
        dS = dP.add_(ROW.part(delta, tile)[..., None]).mul_(P)
        if g_H is not None and X is not None:
            surprise = X.sub_(ROW.part(mean, tile)[..., None]).mul_(P)
            dS.sub_(surprise.mul_(ROW.part(g_H, tile)[..., None]))
        d_key = _add_tile(x, tile, dS, sums, workspace)
        sums.add_keys(tile, d_key, d_value)
    return sums.cast(x)


def _vjp_of_items(
    x: FoldedProblem,
    items: Sequence[FoldedProblem],
    tile_sizes: TileSizes,
    needs: Needs,
    rows: Rows,
    cotangents: MaybeTensors,
) -> tuple[Tensor | None, ...]:
    """The same, item by item."""
    sums = GradSums.zeros(x, needs)
    for b, item in enumerate(items):
        own = Rows(*(r[b : b + 1] for r in rows))
        g = tuple(None if t is None else t[b : b + 1] for t in cotangents)
        found = vjp(item, tile_sizes, needs, own, g)
        for total, part in zip((sums.query, sums.key, sums.value), found, strict=False):
            if total is not None and part is not None:
                total[b : b + 1] = part
    return sums.cast(x)


def _add_tile(x: FoldedProblem, tile: Tile, dS: Tensor, sums: GradSums, workspace: Workspace) -> Tensor | None:
    """Add what the cotangent of a tile's logits gives to bias, queries and parameters; return what it gives to keys."""
    spec = x.spec
    groups = dS.shape[2]
    of_score, tables = x.shared[: spec.paired], x.shared[spec.paired :]
    sums.add_bias(tile, dS)
    if spec.bias is not None and sums.wants_tables:
        added, pull = vjp_of(lambda *t: bias_tile(spec, tile, groups, None, (*of_score, *t)), *tables)
        add_to(sums.tables, pull(dS.sum_to_size(added.shape)))
    query = QUERY.part(x.query, tile)
    d_query: Tensor | None
    d_key: Tensor | None
    if spec.softcap is not None:
        raw = scores(spec, tile, query, KEY.part(x.key, tile), x.shared)
        dS = dS.mul_(1 - (raw / spec.softcap).tanh_().square_())
    if spec.pairwise:
        key = KEY.part(x.key, tile)
        _, pull = vjp_of(lambda q, k, *w: scores(spec, tile, q, k, w), query, key, *of_score)
        d_query, d_key, *d_score = pull(dS)
        add_to(sums.score, d_score)
    else:
        D = matrices_of(dS)
        d_query = None if sums.query is None else multiply(D, workspace.matrices("key rows", x.key, tile))
        d_key = None if sums.key is None else multiply(D.mT, matrices_of(query))
    if sums.query is not None and d_query is not None:
        QUERY.part(sums.query, tile).add_(d_query.view(query.shape))
    return d_key


def matrices_of(x: Tensor) -> Tensor:
    """(l, k, g, r, …) as (l·k, g·r, …)."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3], x.shape[4])


def rows_of(x: Tensor) -> Tensor:
    """(l, k, g, r, …) as (l, k, g·r, …)."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])
