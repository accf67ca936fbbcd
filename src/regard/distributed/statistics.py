"""Statistics of the weights over a group: keys go round once more, and every rank computes its own rows' weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.engine import required
from ..chunked.statistics import Grid, Moments, Received, add_weights, cell_sizes, shown_keys, strongest
from ..chunked.tile_ops import RowStats, Workspace, masked_logits
from ..compat.torch import without_autocast
from ..core.folded import FoldedProblem
from ..core.tiling import BIAS, ROW, tiles
from ..masks.base import PARTIAL
from .blocks import Block, ChunkedBlockAttention, block_bias
from .layout import TokenRange
from .ranks import Ranks
from .ring import ReduceToOwner, ring_steps
from .ring_plan import RingPlan

__all__ = ["ObservedCall", "RowMoments", "moments", "pooled", "received", "top", "visible"]


@dataclass(frozen=True, eq=False)
class ObservedCall:
    """A finished call: its inputs (query, key, key, bias, *shared) without a graph, and the statistics of its rows."""

    ranks: Ranks
    plan: RingPlan
    blocks: ChunkedBlockAttention
    x: tuple[Tensor | None, ...]
    row_stats: RowStats

    @property
    def query(self) -> Tensor:
        """(L, K, G, n, D)."""
        return required(self.x[0])

    @property
    def key(self) -> Tensor:
        """(L, K, m, D)."""
        return required(self.x[1])

    def ring(self) -> Iterator[tuple[int, list[tuple[TokenRange, Tensor]]]]:
        """Let the keys go round: each step, and the key ranges of this rank in it."""
        for step, ranges in ring_steps(self.ranks, self.plan, [self.key]):
            yield step, [(keys, tensor) for keys, (tensor,) in ranges]

    def blocks_of(self, keys: TokenRange, key: Tensor) -> Iterator[tuple[TokenRange, FoldedProblem, RowStats]]:
        """The blocks of this rank's rows with a range of keys: the rows, their problem, and their statistics."""
        for rows in self.plan.rows[self.ranks.rank]:
            if (state := self.plan.blocks.get((rows, keys))) is None:
                continue
            block = Block(rows, keys, state)
            query, k, v, bias, *shared = self.blocks.inputs(self.x, block, (key, key))
            spec = self.blocks.spec_of(block)
            x = FoldedProblem(required(query), required(k), required(v), bias, tuple(map(required, shared)), spec)
            yield rows, x, RowStats(*(t.narrow(-1, rows.local_start, rows.size) for t in self.row_stats))


@torch.no_grad()
@without_autocast
def received(call: ObservedCall) -> Tensor:
    """Σ over the rows of all ranks of the weight that each key of this rank receives: (L, Hq, m)."""
    total = call.query.new_zeros(*call.key.shape[:3], call.query.shape[2])
    reduction = ReduceToOwner(call.ranks, call.plan, [total])
    for step, ranges in call.ring():
        partials = {}
        for keys, key in ranges:
            sums = total.new_zeros(*total.shape[:2], keys.size, total.shape[3])
            for _, x, row_stats in call.blocks_of(keys, key):
                part = Received(x)
                add_weights(x, row_stats, call.blocks.tile_sizes, part)
                sums += part.total.mT
            partials[keys] = [sums]
        reduction.send(step, partials)
    reduction.finish()
    return total.mT.flatten(1, 2)


class RowMoments(NamedTuple):
    """Two moments of the weights p of each row."""

    gradient_health: Tensor  # Σ p(1 − p)
    distance: Tensor  # Σ p |i + M − N − j|


@torch.no_grad()
@without_autocast
def moments(call: ObservedCall) -> RowMoments:
    """The moments of each row: (L, Hq, n) each."""
    spec = call.blocks.spec
    totals = [call.query.new_zeros(call.query.shape[:-1]) for _ in range(2)]
    for _, ranges in call.ring():
        for keys, key in ranges:
            for rows, x, row_stats in call.blocks_of(keys, key):
                part = Moments(x, ahead=rows.start - keys.start + spec.m - spec.n)
                add_weights(x, row_stats, call.blocks.tile_sizes, part)
                for total, own in zip(totals, part.totals, strict=True):
                    total.narrow(-1, rows.local_start, rows.size).add_(own)
    return RowMoments(*(total.flatten(1, 2) for total in totals))


@torch.no_grad()
@without_autocast
def pooled(call: ObservedCall, height: int, width: int) -> Tensor:
    """The mean weight in each cell of a grid over all rows and keys: (L, Hq, height, width), the same on all ranks."""
    n, m = call.blocks.spec.n, call.blocks.spec.m
    total = call.query.new_zeros(*call.query.shape[:3], height, width)
    for _, ranges in call.ring():
        for keys, key in ranges:
            for _, x, row_stats in call.blocks_of(keys, key):
                add_weights(x, row_stats, call.blocks.tile_sizes, Grid(x, n, m, total))
    total = call.ranks.all_reduce(total)
    return (total / cell_sizes(n, m, height, width, total.device)).flatten(1, 2)


@torch.no_grad()
@without_autocast
def top(call: ObservedCall, k: int) -> tuple[Tensor, Tensor]:
    """The k largest weights of each row and their positions among all keys, (L, Hq, n, k) each; −1 for none."""
    shape = (*call.query.shape[:-1], k)
    best = call.query.new_full(shape, -torch.inf)
    positions = torch.full(shape, -1, dtype=torch.int64, device=best.device)
    for _, ranges in call.ring():
        for keys, key in ranges:
            for rows, x, _ in call.blocks_of(keys, key):
                best_part, positions_part = (t.narrow(-2, rows.local_start, rows.size) for t in (best, positions))
                workspace = Workspace()
                for tile, run in tiles(x.spec, x.query.shape, call.blocks.tile_sizes):
                    S = masked_logits(x, tile, run, workspace)
                    values, index = strongest(S, min(k, S.shape[-1]))
                    at = (tile.batch, tile.heads, slice(None), tile.rows)
                    values = torch.cat((best_part[at], values), -1)
                    index = torch.cat((positions_part[at], index + (run.start + keys.start)), -1)
                    best_part[at], positions_part[at] = _largest(values, index, k)
    seen = best > -torch.inf
    row_max, log_row_sum = (t[..., None] for t in call.row_stats)
    P = torch.where(seen, (best - row_max - log_row_sum).exp(), 0.0)
    return P.flatten(1, 2), positions.masked_fill(~seen, -1).flatten(1, 2)


def _largest(values: Tensor, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest; ties go to the lowest position, because ranges come in ring order, not in sequence order."""
    order = index.sort(dim=-1, stable=True).indices
    values, index = values.gather(-1, order), index.gather(-1, order)
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return values.gather(-1, order), index.gather(-1, order)


@torch.no_grad()
@without_autocast
def visible(call: ObservedCall) -> Tensor:
    """How many keys each row may attend to, (L, Hq, n); mask and bias suffice for it, so nothing is sent."""
    count = torch.zeros(call.query.shape[:-1], dtype=torch.int64, device=call.query.device)
    _, _, _, bias, *shared = call.x
    tables = tuple(map(required, shared))
    all_keys = TokenRange(call.ranks.rank, 0, call.blocks.spec.m, 0)
    for rows in call.plan.rows[call.ranks.rank]:
        spec = call.blocks.spec_of(Block(rows, all_keys, PARTIAL))
        rows_bias = block_bias(bias, rows, all_keys)
        rows_count = count.narrow(-1, rows.local_start, rows.size)
        for tile, run in tiles(spec, call.query.shape, call.blocks.tile_sizes):
            part = ROW.part(rows_count, tile)
            tile_bias = None if rows_bias is None else BIAS.part(rows_bias, tile)
            part.add_(shown_keys(spec, tile, run, part, tile_bias, tables))
    return count.flatten(1, 2)
