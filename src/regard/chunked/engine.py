"""Attention in chunks of rows, in plain torch: the passes of the backend `chunked`, on any device, in linear memory.

Rows are cut into strips and keys into runs; the online softmax folds one run after the other into its strip. Tangents
are folded in the same way: with t the tangent of the logits, Σ P t V + P dV and Σ P t are rescaled with the numerator.
The other passes know each row's max and lse, and compute the weights again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import Engine, MaybeTensors, Needs, required
from ..autograd.strip_map import MapStrips, attention_strips
from ..compat.torch import call_function, without_autocast
from ..core.folded import FoldedProblem
from ..core.formula import kept
from ..core.rows import Rows
from ..core.spec import Spec
from ..core.tiling import KEY, QUERY, ROW, Strip, Tile, TileSizes, strips
from ..softmax import Partial, lowest, merge
from . import gathered
from .batched_forward import fold_batches
from .double_backward import RowTangents, double_backward
from .jvp import LogitTangents
from .tile_batches import items_apart, tile_batches
from .tile_ops import Workspace, below_row_max, exp_below_max, hides_nothing, masked_logits, multiply
from .vjp import vjp

__all__ = ["ChunkedEngine"]


@dataclass(frozen=True, eq=False)
class ChunkedEngine(Engine):
    """Passes over (query, key, value, bias, *shared) as `FoldedProblem` has them."""

    spec: Spec
    tile_sizes: TileSizes
    observed: bool
    lse_is_read: bool = False  # by a sink, whose gradient needs that of lse; of an observed call it always may be

    @without_autocast
    def forward(self, x: MaybeTensors) -> Rows:
        given = _folded(self.spec, x)
        parts = gathered.gathered(given, self.tile_sizes)
        if parts is None:
            return _forward(given, self.tile_sizes, self.observed, None)[0]
        return gathered.values(given, parts, lambda part: _forward(part, self.tile_sizes, self.observed, None)[0])

    @without_autocast
    def jvp(self, x: MaybeTensors, w: MaybeTensors) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        given = _folded(self.spec, x)
        parts = gathered.gathered(given, self.tile_sizes)
        if parts is None:
            return _forward(given, self.tile_sizes, self.observed, LogitTangents(given, w))
        return gathered.tangents(given, parts, w, lambda part, own: _forward(part, self.tile_sizes, self.observed, own))

    @without_autocast
    def vjp(self, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs) -> Sequence[Tensor | None]:
        given = _folded(self.spec, x)
        parts = gathered.gathered(given, self.tile_sizes)
        if parts is None:
            return vjp(given, self.tile_sizes, needs, rows, g)
        return gathered.vjp(given, parts, needs, rows, g, lambda part, *own: vjp(part, self.tile_sizes, needs, *own))

    @without_autocast
    def double_backward(
        self,
        x: MaybeTensors,
        rows: Rows,
        d_rows: MaybeTensors,
        g: MaybeTensors,
        w: MaybeTensors,
        dg: MaybeTensors,
        needs: Needs,
    ) -> Sequence[Tensor | None]:
        given, sizes = _folded(self.spec, x), self.tile_sizes
        parts = gathered.gathered(given, sizes)
        if parts is None:
            return double_backward(given, LogitTangents(given, w), sizes, needs, RowTangents.at(rows, d_rows, g, dg))
        return gathered.tangents_of_vjp(
            given,
            parts,
            needs,
            (rows, d_rows, g, dg),
            w,
            lambda part, moving, *own: double_backward(part, moving, sizes, needs, RowTangents.at(*own)),
        )

    def formula(self, x: MaybeTensors) -> tuple[Tensor, ...]:
        given = _folded(self.spec, x)
        found: tuple[Tensor, ...] = call_function(
            MapStrips, attention_strips(given, self.tile_sizes), *(t for t in x if t is not None)
        )
        return found

    def batched(self, size: int) -> tuple[Engine, int]:
        return self, 0  # the mask repeats after its period


def _folded(spec: Spec, x: MaybeTensors) -> FoldedProblem:
    query, key, value = map(required, x[:3])
    return FoldedProblem(query, key, value, x[3], tuple(t for t in x[4:] if t is not None), spec)


def _forward(
    x: FoldedProblem, tile_sizes: TileSizes, observed: bool, moving: LogitTangents | None
) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    """The rows, strip by strip, and the tangents of output, lse and entropy."""
    sizes = tile_sizes.on(x.query.device, masked=x.spec.mask is not None, independent=True)
    if moving is None and (items := items_apart(x, sizes)):
        alone = [_forward(item, tile_sizes, observed, None)[0] for item in items]
        rows = Rows(*(torch.cat(each) for each in zip(*alone, strict=True)))
        return rows, (rows.output, rows.lse, rows.entropy)
    shape = x.query.shape[:-1]
    dim = x.value.shape[-1]
    output = x.query.new_zeros(*shape, dim)
    totals = x.query.new_zeros(3, *shape)  # row max, row sum, and e of `StripSums`
    tangents = None
    if moving is not None:
        tangents = torch.zeros_like(output), torch.zeros_like(totals[0]), torch.zeros_like(totals[0])

    workspace = Workspace()
    if moving is None and (batches := tile_batches(x, sizes, workspace)) is not None:
        fold_batches(x, batches, observed, output, totals, workspace)
        rows = _rows(output, totals, observed)
        return rows, (rows.output, rows.lse, rows.entropy)
    for strip in strips(x.spec, x.query.shape, sizes):
        if not strip.runs:
            continue
        state, e, c = _fold(x, strip, observed, moving, workspace)
        found = (state.max, state.denominator) if e is None else (state.max, state.denominator, e)
        for total, own in zip(totals[:, strip.batch, strip.heads, :, strip.rows].unbind(), found, strict=False):
            total.copy_(own)
        l = state.denominator.clamp(min=1.0)  # noqa: E741  (the largest logit adds 1; a row that sees nothing has 0)
        scale = (l * (1 - x.spec.dropout) if x.spec.dropout else l)[..., None]
        hull = strip.tile(strip.runs[0])
        numerator = state.numerator if moving is None else state.numerator[..., :dim]
        O = torch.div(numerator, scale, out=QUERY.part(output, hull))  # noqa: E741
        if tangents is not None:
            u = torch.div(state.numerator[..., -1], l, out=ROW.part(tangents[1], hull))  # Σ P t
            A = torch.div(state.numerator[..., dim:-1], scale, out=QUERY.part(tangents[0], hull))
            A.sub_(u[..., None] * O)
            if e is not None and c is not None:
                torch.div(u * e - c, l, out=ROW.part(tangents[2], hull))  # −Cov(t, S)

    rows = _rows(output, totals, observed)
    return rows, (rows.output, rows.lse, rows.entropy) if tangents is None else tangents


def _rows(output: Tensor, totals: Tensor, observed: bool) -> Rows:
    """The results of all rows."""
    row_max, row_sum, e = totals.unbind()
    empty = row_sum == 0
    l = row_sum.masked_fill(empty, 1.0)  # noqa: E741
    log_row_sum = l.log()
    row_max = row_max.masked_fill(empty, -torch.inf)
    entropy = log_row_sum - e / l if observed else torch.zeros_like(l)
    return Rows(output, row_max + log_row_sum, entropy, row_max, log_row_sum)


class StripSums(NamedTuple):
    """A strip's running sums: with X = S − row max, e = Σ exp(X)·X and c = Σ exp(X)·t·X."""

    state: Partial
    e: Tensor | None
    c: Tensor | None


def _fold(
    x: FoldedProblem, strip: Strip, observed: bool, moving: LogitTangents | None, workspace: Workspace
) -> StripSums:
    """Fold the runs of a strip; with tangents, the numerator is wider: Σ exp(X)·(V | t V + dV | t)."""
    sums: StripSums | None = None
    for run in strip.runs:
        tile = strip.tile(run)
        S = masked_logits(x, tile, run, workspace)  # (l, k, g, r, c)
        m = S.amax(-1)  # (l, k, g, r)
        if not hides_nothing(x, run):
            m.clamp_(min=lowest(S.dtype))
        X = below_row_max(x, S, m, run)
        P = exp_below_max(x, X, run, workspace.like("weights", X) if observed else X, clamped=True)
        l = P.sum(-1)  # noqa: E741
        XP = X.mul_(P) if observed else None
        e = None if XP is None else XP.sum(-1)
        c = None
        keep = kept(x.spec, tile, S.shape[2], S.device) if x.spec.dropout else None
        if moving is None:
            P = P if keep is None else P.mul_(keep)
            values = workspace.matrices("value rows", x.value, tile)
            O = multiply(P.view(len(values), -1, P.shape[-1]), values)  # noqa: E741
            O = O.view(*P.shape[:-1], values.shape[-1])  # noqa: E741
        else:
            T = moving.logits(tile, moving.scores(tile, workspace), S.shape[2])
            c = torch.zeros_like(l) if XP is None or T is None else (XP * T).sum(-1)
            O = _with_tangents(x, moving, tile, P, T, keep)  # noqa: E741
        new = StripSums(Partial(m, l, O), e, c)
        sums = new if sums is None else _merge_sums(sums, new)
    if sums is None:
        raise RuntimeError("a strip without runs has nothing to fold")
    return sums


def _with_tangents(
    x: FoldedProblem, moving: LogitTangents, tile: Tile, P: Tensor, T: Tensor | None, keep: Tensor | None
) -> Tensor:
    """Σ P·(V | t V + dV | t) over the keys of a tile."""
    PT = None if T is None else P * T
    u = P.new_zeros(P.shape[:-1]) if PT is None else PT.sum(-1)
    if keep is not None:
        P = P.mul_(keep)
        PT = None if PT is None else PT.mul_(keep)
    dim = x.value.shape[-1]
    both = _weighted_sum(P, KEY.part(moving.values, tile))
    A = both[..., dim:] if moving.value is not None else torch.zeros_like(both)
    if PT is not None:
        A = A + _weighted_sum(PT, KEY.part(x.value, tile))
    return torch.cat((both[..., :dim], A, u[..., None]), -1)


def _weighted_sum(P: Tensor, values: Tensor) -> Tensor:
    """(l, k, g, r, c) times (l, k, c, E)."""
    O: Tensor = (P.flatten(2, 3) @ values).unflatten(2, P.shape[2:4])  # noqa: E741
    return O


def _merge_sums(old: StripSums, new: StripSums) -> StripSums:
    state = merge(old.state, new.state)
    e = None if old.e is None or new.e is None else _rescale(old.e, old, state) + _rescale(new.e, new, state)
    c = None if old.c is None or new.c is None else _rescale(old.c, old, state, -1) + _rescale(new.c, new, state, -1)
    return StripSums(state, e, c)


def _rescale(sum_: Tensor, old: StripSums, new: Partial, column: int | None = None) -> Tensor:
    """A sum of exp(X)·y·X relative to a new max: exp(down)·(sum + down·Σ exp(X)·y)."""
    down = (old.state.max - new.max).clamp_(min=-1e4)  # finite, and deep enough for exp to be 0
    mass = old.state.denominator if column is None else old.state.numerator[..., column]
    return down.exp() * (sum_ + down * mass)
