"""What the weights say, over a group: keys go round once more, and every rank looks at its own rows' weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..chunked.statistics import strongest as strongest_of
from ..chunked.tile_ops import RowStats, Workspace, masked_logits, weights
from ..compat.torch import without_autocast
from ..core.folded import FoldedProblem
from ..core.formula import bias_tile, hidden
from ..core.tiling import BIAS, ROW, KeyRun, Tile, strips
from ..masks.base import PARTIAL
from .blocks import Strips, block_bias
from .layout import Piece
from .ranks import Ranks
from .ring import Home, rounds
from .ring_plan import Routes

__all__ = ["Looking", "moments", "pooled", "received", "strongest", "visible"]


@dataclass(frozen=True, eq=False)
class Looking:
    """A call as late passes see it: inputs (query, key, key, bias, *shared) without a graph, and what rows came to."""

    ranks: Ranks
    routes: Routes
    blocks: Strips
    x: tuple[Tensor | None, ...]
    look: RowStats

    @property
    def query(self) -> Tensor:
        """(L, K, G, n, D)."""
        return _there(self.x[0])

    @property
    def key(self) -> Tensor:
        """(L, K, m, D)."""
        return _there(self.x[1])

    def blocks_of(self, key: Piece, visitor: Tensor) -> Iterator[tuple[Piece, FoldedProblem, RowStats]]:
        """The blocks of this rank's rows with a piece of keys."""
        for row in self.routes.rows[self.ranks.rank]:
            if (state := self.routes.seen.get((row, key))) is None:
                continue
            query, k, v, bias, *shared = self.blocks.inputs(self.x, row, key, (visitor, visitor))
            spec = self.blocks.spec_of(row, key, state)
            x = FoldedProblem(_there(query), _there(k), _there(v), bias, tuple(map(_there, shared)), spec)
            yield row, x, RowStats(*(t.narrow(-1, row.here, row.size) for t in self.look))

    def tiles(self, x: FoldedProblem) -> Iterator[tuple[Tile, KeyRun, Workspace]]:
        """The tiles of a block, with buffers that are used again."""
        workspace = Workspace()
        for strip in strips(x.spec, x.query.shape, self.blocks.tile_sizes):
            yield from ((strip.tile(run), run, workspace) for run in strip.runs)


def _there(x: Tensor | None) -> Tensor:
    if x is None:
        raise RuntimeError("a rank has queries and keys")
    return x


@torch.no_grad()
@without_autocast
def received(at: Looking) -> Tensor:
    """Σ over the rows of all ranks of the weight that each key of this rank receives: (L, Hq, m)."""
    groups = at.query.shape[2]
    total = at.query.new_zeros(*at.key.shape[:3], groups)
    home = Home(at.ranks, at.routes, [total])
    for step, visitors in rounds(at.ranks, at.routes, [at.key]):
        told = {}
        for key, (visitor,) in visitors:
            sums = total.new_zeros(*total.shape[:2], key.size, groups)
            for _, x, look in at.blocks_of(key, visitor):
                for tile, run, workspace in at.tiles(x):
                    P = weights(x, tile, run, look, workspace)  # (l, k, g, r, c)
                    sums[tile.batch, tile.heads, tile.cols] += P.sum(-2).mT
            told[key] = [sums]
        home.send(step, told)
    home.settle()
    return total.mT.flatten(1, 2)


@torch.no_grad()
@without_autocast
def moments(at: Looking) -> tuple[Tensor, Tensor]:
    """Σ p(1 − p) and Σ p |i + M − N − j| of each row: (L, Hq, n) each."""
    spec = at.blocks.spec
    health, distance = (at.query.new_zeros(at.query.shape[:-1]) for _ in range(2))
    for _, visitors in rounds(at.ranks, at.routes, [at.key]):
        for key, (visitor,) in visitors:
            for row, x, look in at.blocks_of(key, visitor):
                parts = [t.narrow(-1, row.here, row.size) for t in (health, distance)]
                for tile, run, workspace in at.tiles(x):
                    P = weights(x, tile, run, look, workspace)
                    i, j = tile.indices(P.device)
                    away = (i[:, None] - j + (row.start - key.start + spec.m - spec.n)).abs().to(P.dtype)
                    ROW.part(parts[0], tile).add_((P - P * P).sum(-1))
                    ROW.part(parts[1], tile).add_((P * away).sum(-1))
    return health.flatten(1, 2), distance.flatten(1, 2)


@torch.no_grad()
@without_autocast
def pooled(at: Looking, height: int, width: int) -> Tensor:
    """The mean weight in each cell of a grid over all rows and keys: (L, Hq, height, width), alike on all ranks."""
    n, m = at.blocks.spec.n, at.blocks.spec.m
    total = at.query.new_zeros(*at.query.shape[:3], height, width)
    for _, visitors in rounds(at.ranks, at.routes, [at.key]):
        for key, (visitor,) in visitors:
            for row, x, look in at.blocks_of(key, visitor):
                for tile, run, workspace in at.tiles(x):
                    P = weights(x, tile, run, look, workspace)
                    top, rows = _in_grid(tile.rows, row.start, n, height, P)
                    left, cols = _in_grid(tile.cols, key.start, m, width, P)
                    part = total[tile.batch, tile.heads, :, top : top + rows.shape[1], left : left + cols.shape[1]]
                    part += rows.mT @ P @ cols
    total = at.ranks.total(total)
    sizes = (_in_cells(n, height, total.device)[:, None] * _in_cells(m, width, total.device)).to(total.dtype)
    return (total / sizes).flatten(1, 2)


def _in_grid(some: slice, start: int, length: int, cells: int, like: Tensor) -> tuple[int, Tensor]:
    """The first cell that some rows or keys are in, and for each of them a one in the column of its own."""
    first, last = ((start + at) * cells // length for at in (some.start, some.stop - 1))
    places = (torch.arange(some.start, some.stop, device=like.device) + start) * cells // length
    return first, one_hot(places - first, last + 1 - first).to(like.dtype)


def _in_cells(length: int, cells: int, device: torch.device) -> Tensor:
    """How many of so many rows or keys are in each cell."""
    edges = -(-torch.arange(cells + 1, device=device) * length // cells)
    return edges.diff()


@torch.no_grad()
@without_autocast
def strongest(at: Looking, k: int) -> tuple[Tensor, Tensor]:
    """The k largest weights of each row and their places among all keys, (L, Hq, n, k) each; −1 for none."""
    shape = (*at.query.shape[:-1], k)
    best = at.query.new_full(shape, -torch.inf)
    where = torch.full(shape, -1, dtype=torch.int64, device=best.device)
    for _, visitors in rounds(at.ranks, at.routes, [at.key]):
        for key, (visitor,) in visitors:
            for row, x, _ in at.blocks_of(key, visitor):
                b, w = (t.narrow(-2, row.here, row.size) for t in (best, where))
                for tile, run, workspace in at.tiles(x):
                    S = masked_logits(x, tile, run, workspace)
                    values, index = strongest_of(S, min(k, S.shape[-1]))
                    rows = (tile.batch, tile.heads, slice(None), tile.rows)
                    values = torch.cat((b[rows], values), -1)
                    index = torch.cat((w[rows], index + (run.start + key.start)), -1)
                    b[rows], w[rows] = _ranked(values, index, k)
    seen = best > -torch.inf
    share = torch.where(seen, (best - at.look.row_max[..., None] - at.look.log_row_sum[..., None]).exp(), 0.0)
    return share.flatten(1, 2), where.masked_fill(~seen, -1).flatten(1, 2)


def _ranked(values: Tensor, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest, ties to the lowest place among all keys: pieces come in the order of the ring, not in theirs."""
    order = index.sort(dim=-1, stable=True).indices
    values, index = values.gather(-1, order), index.gather(-1, order)
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return values.gather(-1, order), index.gather(-1, order)


@torch.no_grad()
@without_autocast
def visible(at: Looking) -> Tensor:
    """How many keys each row may attend, (L, Hq, n): what mask and bias say, so that nothing is sent."""
    count = torch.zeros(at.query.shape[:-1], dtype=torch.int64, device=at.query.device)
    spec = at.blocks.spec
    everywhere = Piece(at.ranks.rank, 0, spec.m, 0)
    for row in at.routes.rows[at.ranks.rank]:
        some = at.blocks.spec_of(row, everywhere, PARTIAL)
        bias = block_bias(at.x[3], row, everywhere)
        whole = count.narrow(-1, row.here, row.size)
        for strip in strips(some, at.query.shape, at.blocks.tile_sizes):
            for run in strip.runs:
                tile = strip.tile(run)
                part = ROW.part(whole, tile)
                shown = torch.ones((), dtype=torch.bool, device=count.device)
                if not run.full and (hide := hidden(some, tile, part.shape[2], count.device)) is not None:
                    shown = ~hide
                piece = None if bias is None else BIAS.part(bias, tile)
                added = bias_tile(some, tile, part.shape[2], piece, tuple(map(_there, at.x[4:])))
                if added is not None:
                    shown = shown & (added != -torch.inf)
                part.add_(shown.expand(*part.shape, run.stop - run.start).sum(-1))
    return count.flatten(1, 2)
