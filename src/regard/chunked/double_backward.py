"""The tangent of the backward pass over strips of rows: for double backward, and for Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import MaybeTensors, Needs
from ..autograd.strip_map import filled, jvp_of, vjp_of
from ..core.folded import FoldedProblem
from ..core.formula import bias_tile, kept, scores
from ..core.rows import Rows
from ..core.tiling import KEY, QUERY, ROW, Tile, TileSizes, tiles
from .jvp import LogitTangents, tanh_tile
from .tile_ops import RowStats, Workspace, logits_and_weights
from .vjp import GradSums, add_to, rows_of

__all__ = ["RowTangents", "double_backward"]


class RowTangents(NamedTuple):
    """What `double_backward` needs of every row: (L, K, G, N, …) each; a dot marks a tangent."""

    dO: Tensor
    dO_dot: Tensor | None
    stats: RowStats
    delta: Tensor  # g_lse − Σ dO ∘ O
    delta_dot: Tensor
    u: Tensor  # the tangent of lse
    mean: Tensor  # E[S] above the row max
    mean_dot: Tensor
    g_H: Tensor | None
    g_H_dot: Tensor | None

    @staticmethod
    def at(rows: Rows, d_rows: MaybeTensors, g: MaybeTensors, dg: MaybeTensors) -> RowTangents:
        output = rows.output
        O_dot, u, H_dot = d_rows
        dO, g_lse, g_H = g
        dO_dot, g_lse_dot, g_H_dot = dg
        if O_dot is None or u is None or H_dot is None:
            raise RuntimeError("a double backward needs the tangents of the rows")
        dO = torch.zeros_like(output) if dO is None else dO
        delta = -(dO * output).sum(-1) if g_lse is None else g_lse - (dO * output).sum(-1)
        delta_dot = -(dO * O_dot).sum(-1)
        if dO_dot is not None:
            delta_dot = delta_dot - (dO_dot * output).sum(-1)
        if g_lse_dot is not None:
            delta_dot = delta_dot + g_lse_dot
        means = (rows.log_row_sum - rows.entropy, u - H_dot)
        return RowTangents(
            dO, dO_dot, RowStats.at(rows.max_logit, rows.log_row_sum), delta, delta_dot, u, *means, g_H, g_H_dot
        )


def double_backward(
    x: FoldedProblem, moving: LogitTangents, tile_sizes: TileSizes, needs: Needs, b: RowTangents
) -> tuple[Tensor | None, ...]:
    """The tangent of the backward pass: with B = dP + δ − g_H·(S − E[S]) and t the tangent of S less that of lse,

    dS = P ∘ B moves by P ∘ (t B + dB), and so does everything that dS is multiplied with.
    """
    sums = GradSums.zeros(x, needs)
    workspace = Workspace()
    for tile, run in tiles(x.spec, x.query.shape, tile_sizes):
        X, P = logits_and_weights(x, tile, run, b.stats, workspace)  # (l, k, g, r, c)
        T_raw = moving.scores(tile, workspace)
        T = moving.logits(tile, T_raw, X.shape[2])
        T = torch.zeros_like(X) if T is None else T.expand_as(X)
        keep = kept(x.spec, tile, X.shape[2], X.device).to(X.dtype) / (1 - x.spec.dropout) if x.spec.dropout else None
        B, B_dot = _slopes(x, moving, tile, b, X, T, keep, workspace)
        R = T - ROW.part(b.u, tile)[..., None]
        dS = P * B
        dS_dot = B.mul_(R).add_(B_dot).mul_(P)
        if sums.value is not None:
            P = P if keep is None else P.mul_(keep)
            part = KEY.part(sums.value, tile)
            if b.dO_dot is not None:
                part.add_(rows_of(P).mT @ rows_of(QUERY.part(b.dO_dot, tile)))
            part.add_(rows_of(R.mul_(P)).mT @ rows_of(QUERY.part(b.dO, tile)))
        _add_tile(x, moving, tile, Slopes(dS, dS_dot, T_raw), sums)
    return sums.cast(x)


def _slopes(
    x: FoldedProblem,
    moving: LogitTangents,
    tile: Tile,
    b: RowTangents,
    X: Tensor,
    T: Tensor,
    keep: Tensor | None,
    workspace: Workspace,
) -> tuple[Tensor, Tensor]:
    """B and its tangent, (l, k, g, r, c)."""
    values = workspace.transposed("values", x.value, x.spec.n, tile)
    dO = QUERY.part(b.dO, tile)
    B = workspace.product("dP", dO, values)
    B_dot = torch.zeros_like(B)
    if moving.value is not None:
        B_dot += workspace.product("dP_dot", dO, workspace.transposed("moving values", moving.value, x.spec.n, tile))
    if b.dO_dot is not None:
        B_dot += workspace.product("dP_dot", QUERY.part(b.dO_dot, tile), values)
    if keep is not None:
        B, B_dot = B.mul_(keep), B_dot.mul_(keep)
    B.add_(ROW.part(b.delta, tile)[..., None])
    B_dot.add_(ROW.part(b.delta_dot, tile)[..., None])
    surprise = X - ROW.part(b.mean, tile)[..., None]
    if b.g_H is not None:
        g = ROW.part(b.g_H, tile)[..., None]
        B.sub_(g * surprise)
        B_dot.sub_(g * (T - ROW.part(b.mean_dot, tile)[..., None]))
    if b.g_H_dot is not None:
        B_dot.sub_(surprise.mul_(ROW.part(b.g_H_dot, tile)[..., None]))
    return B, B_dot


class Slopes(NamedTuple):
    """Cotangents of a tile's logits, (l, k, g, r, c)."""

    dS: Tensor
    dS_dot: Tensor
    T_raw: Tensor | None  # the tangent of the scores, before cap and bias


def _add_tile(x: FoldedProblem, moving: LogitTangents, tile: Tile, slopes: Slopes, sums: GradSums) -> None:
    """Add the tangent of what a tile adds to the gradients in the backward pass."""
    spec = x.spec
    dS, dS_dot, T_raw = slopes
    sums.add_bias(tile, dS_dot)
    if spec.bias is not None and sums.wants_tables:
        tables, fixed = x.shared[spec.paired :], x.shared[: spec.paired]
        groups = dS.shape[2]
        found = _vjp_tangent(
            lambda *t: bias_tile(spec, tile, groups, None, (*fixed, *t)),
            tables,
            moving.shared[spec.paired :],
            dS,
            dS_dot,
        )
        add_to(sums.tables, found)
    query, key = QUERY.part(x.query, tile), KEY.part(x.key, tile)
    if spec.softcap is not None:
        th = tanh_tile(x, tile)
        slope = 1 - th * th
        dS_dot = dS_dot.mul_(slope)
        if T_raw is not None:
            dS_dot.sub_(dS * slope * th * T_raw * (2 / spec.softcap))
        dS = dS.mul_(slope)
    d_query, d_key = (
        None if t is None else kind.part(t, tile) for t, kind in ((moving.query, QUERY), (moving.key, KEY))
    )
    if spec.pairwise:
        moved = (d_query, d_key, *moving.shared[: spec.paired])
        given = (query, key, *x.shared[: spec.paired])
        g_query, g_key, *g_score = _vjp_tangent(lambda q, k, *s: scores(spec, tile, q, k, s), given, moved, dS, dS_dot)
        add_to(sums.score, g_score)
    else:
        g_query = (rows_of(dS_dot) @ key).unflatten(2, dS.shape[2:4])
        g_key = rows_of(dS_dot).mT @ rows_of(query)
        if d_key is not None:
            g_query = g_query + (rows_of(dS) @ d_key).unflatten(2, dS.shape[2:4])
        if d_query is not None:
            g_key = g_key + rows_of(dS).mT @ rows_of(d_query)
    if sums.query is not None:
        QUERY.part(sums.query, tile).add_(g_query)
    if sums.key is not None:
        KEY.part(sums.key, tile).add_(g_key)


def _vjp_tangent(
    function: Callable[..., Tensor | None],
    given: Sequence[Tensor],
    moved: Sequence[Tensor | None],
    g: Tensor,
    g_dot: Tensor,
) -> tuple[Tensor, ...]:
    """The tangent of a function's vjp, along tangents of its arguments and of its cotangent."""
    count = len(given)

    def pull(*both: Tensor) -> tuple[Tensor, ...]:
        result, back = vjp_of(function, *both[:count])
        found: tuple[Tensor, ...] = back(both[count].sum_to_size(result.shape))
        return found

    return jvp_of(pull, (*given, g), (*filled(given, moved), g_dot))[1]
