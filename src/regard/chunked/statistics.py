"""Statistics of the weights from q, k and the row statistics, by passes over tiles that never hold N × M numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..compat.torch import may_need_grad, without_autocast
from ..core.folded import FoldedProblem, fold
from ..core.formula import bias_tile, hidden, logits
from ..core.gathered import GATHERED_QUERY
from ..core.problem import Problem
from ..core.rows import Rows
from ..core.spec import Spec
from ..core.tiling import BIAS, ROW, KeyRun, Points, Tile, TileSizes, tiles
from .gathered_statistics import GatheredTiles, gathered_logits, gathered_weights
from .tile_ops import RowStats, Workspace, masked_logits, weights

__all__ = [
    "SATURATED",
    "Grid",
    "Moments",
    "Received",
    "RowTotals",
    "Survey",
    "TilePart",
    "add_weights",
    "cell_sizes",
    "first_keys",
    "largest",
    "logits_at",
    "moments",
    "pooled",
    "received",
    "shown_keys",
    "strongest",
    "survey",
    "top",
    "visible",
]

SATURATED = 0.99  # hardly any gradient passes through a row whose largest weight is above this
_TALL = 8  # rows of a cell for which sums are cheaper than a product
_SPLIT = 32  # keys per block: blocks compete by their maxima first
_FINE_SPLIT = 8  # the same where so few blocks of the other size are there that most would win


class Survey(NamedTuple):
    """Every statistic that one pass over all weights can give; those of rows are (…, Hq, N)."""

    map: Tensor  # (…, Hq, height, width)
    received: Tensor  # (…, Hq, M)
    health: Tensor  # Σ p(1 − p)
    distance: Tensor  # Σ p |i + M − N − j|
    first: Tensor  # the weight on the first key that receives any, over the heads of a batch item
    own: Tensor  # on the row's own position, with the ends of queries and keys aligned; 0 if it has none
    previous: Tensor  # on the position before
    largest: Tensor  # the largest weight
    key: Tensor  # int64, the key that has it, ties to the lowest; −1 in a row without weights
    visible: Tensor | None = None  # int64, how many keys each row may attend to; where the pass counts them
    totals: Tensor | None = None  # (…, Hq, parts, len(RowTotals._fields)): sums over parts of the rows, from kernels
    peaks: Tensor | None = None  # float64 (…, Hq, parts, 3): over parts of the keys, Σ received, the largest, its key
    seen_from: Tensor | None = None  # int64 (L,): M less the first key that receives weight, 0 for none; from kernels


class RowTotals(NamedTuple):
    """Sums over the rows of a head that see something, or as it says; NaN if the logits of a row are not finite."""

    some: Tensor  # the number of rows that see a key
    several: Tensor  # … more than one key
    with_own: Tensor  # … a key, and whose own position is one
    with_previous: Tensor  # … a key, and whose previous position is one
    entropy: Tensor
    relative_entropy: Tensor  # entropy / log of the number of visible keys, of rows that see several
    perplexity: Tensor  # exp(entropy)
    first: Tensor  # as in Survey
    own: Tensor  # of rows with that position
    previous: Tensor  # of rows with that position
    saturated: Tensor  # the number of rows that see several keys and have more than SATURATED on one
    distance: Tensor
    health: Tensor
    uniform: Tensor  # 1 / the number of visible keys
    max_logit: Tensor  # not a sum: the largest, or NaN if one is


@torch.no_grad()
@without_autocast
def survey(
    p: Problem, rows: Rows, height: int, width: int, tile_sizes: TileSizes, others: Sequence[TilePart] = ()
) -> Survey:
    """`pooled`, `received`, `moments`, the weights near the diagonal and the largest of each row, in one pass.

    `others` are shown the same tiles of weights.
    """
    x, stats = _without_graph(p, rows)
    cells = x.query.new_zeros(*x.query.shape[:3], height, width)
    grid = None if height == width == 1 else Grid(x, p.rows, p.keys, cells)
    received, moments, diagonals, largest = Received(x), Moments(x), _Diagonals(x), _Largest(x)
    add_weights(
        x, stats, tile_sizes, received, moments, diagonals, largest, *(() if grid is None else (grid,)), *others
    )
    first = _on_first_key(x, stats, received.total)
    cells = received.total.sum(-1)[..., None, None] / (x.spec.n * x.spec.m) if grid is None else grid.mean()
    found = cells, received.total, *moments.totals, first, *diagonals.totals, largest.weight, largest.key
    return Survey(*(p.shaped(each.flatten(1, 2)) for each in found))


def first_keys(received: Tensor) -> Tensor:
    """The first key of each batch item that receives weight in any head, (L,), from (L, H, M)."""
    return (received > 0).any(1).int().argmax(-1)


def _on_first_key(x: FoldedProblem, stats: RowStats, received: Tensor) -> Tensor:
    """The weight of each row on the first key of its batch item that receives any: (L, K, G, N)."""
    batch, heads, groups, n = x.query.shape[:4]
    found = x.query.new_zeros(batch, heads, groups, n)
    if not received.numel():
        return found
    starts, rows = first_keys(received.flatten(1, 2)), torch.arange(n, device=x.query.device)
    for start in starts.unique().tolist():
        S = _logits_at(x, rows, torch.full((1,), start, device=rows.device))[..., 0]
        P = torch.where(torch.gt(S, -torch.inf), (S - stats.row_max - stats.log_row_sum).exp(), 0.0)
        found = torch.where((starts == start).view(-1, 1, 1, 1), P, found)
    return found


@torch.no_grad()
@without_autocast
def received(p: Problem, rows: Rows, tile_sizes: TileSizes) -> Tensor:
    """Σ over queries of the weight each key receives: (…, Hq, M)."""
    x, stats = _without_graph(p, rows)
    sums = Received(x)
    add_weights(x, stats, tile_sizes, sums)
    return p.shaped(sums.total.flatten(1, 2))


@torch.no_grad()
@without_autocast
def moments(p: Problem, rows: Rows, tile_sizes: TileSizes) -> tuple[Tensor, Tensor]:
    """Σ p(1 − p) and Σ p |i + M − N − j| of each row: (…, Hq, N) each."""
    x, stats = _without_graph(p, rows)
    sums = Moments(x)
    add_weights(x, stats, tile_sizes, sums)
    health, distance = (p.shaped(total.flatten(1, 2)) for total in sums.totals)
    return health, distance


@torch.no_grad()
@without_autocast
def pooled(p: Problem, rows: Rows, height: int, width: int, tile_sizes: TileSizes) -> Tensor:
    """The mean weight in each cell of a grid over N × M: (…, Hq, height, width)."""
    x, stats = _without_graph(p, rows)
    grid = Grid(x, p.rows, p.keys, x.query.new_zeros(*x.query.shape[:3], height, width))
    add_weights(x, stats, tile_sizes, grid)
    return p.shaped(grid.mean().flatten(1, 2))


class TilePart(Protocol):
    """A statistic that grows by the weights of one tile after the other."""

    def add(self, tile: Tile, P: Tensor, workspace: Workspace) -> None:
        """Add the weights P (l, k, g, r, c) of a tile; the buffer "seen" is free."""
        ...

    def add_gathered(self, tiles: GatheredTiles) -> None:
        """Add the weights of a tile with gathered keys."""
        ...


def add_weights(x: FoldedProblem, stats: RowStats, tile_sizes: TileSizes, *sums: TilePart) -> None:
    """Add the weights tile by tile, in buffers that are reused."""
    gathered = gathered_weights(x, stats, tile_sizes)
    if gathered is not None:
        for part in gathered:
            for each in sums:
                each.add_gathered(part)
        return
    workspace = Workspace()
    for tile, run in tiles(x.spec, x.query.shape, tile_sizes):
        P = weights(x, tile, run, stats, workspace)
        for each in sums:
            each.add(tile, P, workspace)


class Received:
    """Σ over queries of the weights of each key."""

    def __init__(self, x: FoldedProblem) -> None:
        self.total = x.query.new_zeros(*x.query.shape[:3], x.spec.m)

    def add(self, tile: Tile, P: Tensor, workspace: Workspace) -> None:
        self.total[tile.batch, tile.heads, :, tile.cols] += P.sum(-2)

    def add_gathered(self, tiles: GatheredTiles) -> None:
        tiles.add_at(self.total, tiles.j[:, :, :, 0], tiles.values.sum(-2))


class Moments:
    """Σ p(1 − p) and Σ p |i + ahead − j| of each row; `ahead` is where row 0 is among the keys, M − N if not given."""

    def __init__(self, x: FoldedProblem, ahead: int | None = None) -> None:
        self._ahead = x.spec.m - x.spec.n if ahead is None else ahead
        self.totals = x.query.new_zeros(x.query.shape[:-1]), x.query.new_zeros(x.query.shape[:-1])
        self._keys = torch.arange(x.spec.m, dtype=x.query.dtype, device=x.query.device)
        self._own = torch.arange(x.spec.n, dtype=x.query.dtype, device=x.query.device) + self._ahead

    def add(self, tile: Tile, P: Tensor, workspace: Workspace) -> None:
        health, distance = (ROW.part(total, tile) for total in self.totals)
        own, keys = self._own[tile.rows, None], self._keys[tile.cols]
        behind = tile.cols.stop - 1 <= self._ahead + tile.rows.start  # no key is after its row
        if behind:
            steps = torch.stack((torch.ones_like(keys), keys - keys[0]), -1)  # (c, 2)
            total, reach = (P @ steps).unbind(-1)  # (l, k, g, r)
            distance += (own[:, 0] - keys[0]) * total - reach
        else:
            distance += torch.mul(P, (own - keys).abs_(), out=workspace.like("seen", P)).sum(-1)
        health += torch.addcmul(P, P, P, value=-1, out=workspace.like("seen", P)).sum(-1)

    def add_gathered(self, tiles: GatheredTiles) -> None:
        health, distance = (tiles.of_rows(total) for total in self.totals)
        P = tiles.values
        health += (P - P * P).sum(-1)
        distance += (P * (self._own[tiles.i] - self._keys[tiles.j]).abs()).sum(-1)


class _Diagonals:
    """The weights of each row on its own position and on the one before."""

    def __init__(self, x: FoldedProblem) -> None:
        self._ahead = x.spec.m - x.spec.n
        self.totals = x.query.new_zeros(x.query.shape[:-1]), x.query.new_zeros(x.query.shape[:-1])

    def add(self, tile: Tile, P: Tensor, workspace: Workspace) -> None:
        for back, total in enumerate(self.totals):
            offset = tile.rows.start + self._ahead - back - tile.cols.start
            found = P.diagonal(offset, -2, -1) if -P.shape[-2] < offset < P.shape[-1] else P[..., 0, :0]
            top = tile.rows.start + max(0, -offset)
            total[tile.batch, tile.heads, :, top : top + found.shape[-1]] = found

    def add_gathered(self, tiles: GatheredTiles) -> None:
        for back, total in enumerate(self.totals):
            part = tiles.of_rows(total)
            part += tiles.values.masked_fill(tiles.i + (self._ahead - back) != tiles.j, 0.0).sum(-1)


class _Largest:
    """The largest weight of each row, and its key."""

    def __init__(self, x: FoldedProblem) -> None:
        self.weight = x.query.new_zeros(x.query.shape[:-1])
        self.key = torch.full(self.weight.shape, -1, dtype=torch.int64, device=self.weight.device)

    def add(self, tile: Tile, P: Tensor, workspace: Workspace) -> None:
        best, key = ROW.part(self.weight, tile), ROW.part(self.key, tile)
        weight, at = largest(P)
        better = weight > best  # earlier runs have lower keys
        best.copy_(torch.where(better, weight, best))
        key.copy_(torch.where(better, at + tile.cols.start, key))

    def add_gathered(self, tiles: GatheredTiles) -> None:
        best, key = tiles.of_rows(self.weight), tiles.of_rows(self.key)
        weight, at = tiles.values.max(-1)  # the keys of a list are in order, so ties go to the lowest
        better = weight > best
        best.copy_(torch.where(better, weight, best))
        key.copy_(torch.where(better, tiles.keys_at(at), key))


class Grid:
    """The sums in the cells of a grid over N × M: by sums and products, since a scatter is not deterministic.

    It has n rows and m keys, of which a problem may be a part: `total` (L, K, G, height, width) is of the whole.
    """

    def __init__(self, x: FoldedProblem, n: int, m: int, total: Tensor) -> None:
        height, width = total.shape[-2:]
        self.total, self._sizes, (self._row, self._key) = total, (n, m, height, width), x.spec.corner
        rows, keys = (torch.arange(size, device=total.device) for size in (x.spec.n, x.spec.m))
        self._down = (rows + self._row) * height // max(n, 1)  # the cell of each row
        self._across = (keys + self._key) * width // max(m, 1)

    def add(self, tile: Tile, P: Tensor, workspace: Workspace) -> None:
        n, m, height, width = self._sizes
        first, start = self._row + tile.rows.start, self._key + tile.cols.start
        top, bottom = (i * height // n for i in (first, self._row + tile.rows.stop - 1))
        left, right = (j * width // m for j in (start, self._key + tile.cols.stop - 1))
        cells = range(top, bottom + 1)
        if len(cells) * _TALL <= P.shape[-2]:
            edges = [max(-(-y * n // height) - first, 0) for y in (*cells, bottom + 1)]
            pooled = torch.stack([P[..., a:b, :].sum(-2) for a, b in pairwise(edges)], -2)  # (l, k, g, cells, c)
        else:
            pooled = one_hot(self._down[tile.rows] - top, len(cells)).to(P.dtype).mT @ P
        cols = one_hot(self._across[tile.cols] - left, right + 1 - left).to(P.dtype)
        self.total[tile.batch, tile.heads, :, top : bottom + 1, left : right + 1] += pooled @ cols

    def add_gathered(self, tiles: GatheredTiles) -> None:
        _, _, height, width = self._sizes
        cells = self.total.view(*self.total.shape[:3], height * width)
        tiles.add_at(cells, self._down[tiles.i] * width + self._across[tiles.j], tiles.values)

    def mean(self) -> Tensor:
        """The mean weight in each cell."""
        return self.total / cell_sizes(*self._sizes, self.total.device)


def cell_sizes(n: int, m: int, height: int, width: int, device: torch.device) -> Tensor:
    """How many of n × m pairs are in each cell of a grid, (height, width)."""
    sides = ((n, height), (m, width))
    rows, keys = ((-(-torch.arange(cells + 1, device=device) * size // cells)).diff() for size, cells in sides)
    return rows[:, None] * keys


@torch.no_grad()
@without_autocast
def visible(p: Problem, tile_sizes: TileSizes) -> Tensor:
    """How many keys each row may attend to: (…, Hq, N), int64."""
    x = fold(p)
    shape = x.query.shape[:-1]
    count = torch.zeros(shape, dtype=torch.int64, device=x.query.device)
    if (gathered := gathered_logits(x, tile_sizes)) is not None:
        for found in gathered:
            part = found.of_rows(count)
            part += (found.values > -torch.inf).sum(-1)
        return p.shaped(count.flatten(1, 2))
    by_score = x.spec.pointwise is not None and x.spec.pointwise.may_hide
    workspace = Workspace()
    for tile, run in tiles(x.spec, x.query.shape, tile_sizes):
        part = ROW.part(count, tile)
        if by_score:
            part.add_((masked_logits(x, tile, run, workspace) != -torch.inf).sum(-1))
        else:
            bias = None if x.bias is None else BIAS.part(x.bias, tile)
            part.add_(shown_keys(x.spec, tile, run, part, bias, x.shared))
    return p.shaped(count.flatten(1, 2))


def shown_keys(
    spec: Spec, tile: Tile, run: KeyRun, part: Tensor, bias: Tensor | None, shared: tuple[Tensor, ...]
) -> Tensor | int:
    """How many keys of a tile the mask and the bias show to each of its rows, whose results are `part` (l, k, g, r)."""
    groups, width = part.shape[2], run.stop - run.start
    hide = None if run.full else hidden(spec, tile, groups, part.device)
    added = bias_tile(spec, tile, groups, bias, shared)
    if hide is None and added is None:
        return width
    shown = torch.ones((), dtype=torch.bool, device=part.device) if hide is None else ~hide
    shown = shown if added is None else shown & (added != -torch.inf)
    return shown.expand(*part.shape, width).sum(-1)


@torch.no_grad()
@without_autocast
def top(p: Problem, rows: Rows, k: int, tile_sizes: TileSizes) -> tuple[Tensor, Tensor]:
    """The k largest weights of each row and their keys, ties to the lowest index; −1 where fewer are visible."""
    x, stats = _without_graph(p, rows)
    shape = (*x.query.shape[:-1], k)
    best = x.query.new_full(shape, -torch.inf)
    where = torch.full(shape, -1, dtype=torch.int64, device=stats.row_max.device)
    gathered = gathered_logits(x, tile_sizes)
    if gathered is not None:
        for part in gathered:
            S = part.values  # (lists, heads, groups, rows, W)
            values, place = strongest(S, min(k, S.shape[-1]))
            own = _rows_of(best, part), _rows_of(where, part)
            _keep_strongest(*own, values, part.keys_at(place))
    else:
        workspace = Workspace()
        for tile, run in tiles(x.spec, x.query.shape, tile_sizes):
            S = masked_logits(x, tile, run, workspace)  # (l, k, g, r, c)
            values, index = strongest(S, min(k, S.shape[-1]))
            at = (tile.batch, tile.heads, slice(None), tile.rows)
            _keep_strongest(best[at], where[at], values, index + run.start)
    seen = best > -torch.inf
    share = torch.where(seen, (best - stats.row_max[..., None] - stats.log_row_sum[..., None]).exp(), 0.0).to(p.dtype)
    where = where.masked_fill(~seen, -1)
    return p.shaped(share.flatten(1, 2)), p.shaped(where.flatten(1, 2))


def _keep_strongest(best: Tensor, where: Tensor, values: Tensor, index: Tensor) -> None:
    """Keep the largest of the best so far and of more values (…, k), with their keys; ties to those that came first."""
    values, index = torch.cat((best, values), -1), torch.cat((where, index), -1)
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., : best.shape[-1]]  # earlier: lower keys
    best.copy_(values.gather(-1, order))
    where.copy_(index.gather(-1, order))


def _rows_of(total: Tensor, tiles: GatheredTiles) -> Tensor:
    """View the rows of a tile in (L, K, G, N, k): (lists, heads, groups, rows, k)."""
    return GATHERED_QUERY.part(total, tiles.at)[..., tiles.tile.rows, :]


@without_autocast
def logits_at(p: Problem, rows: Tensor, cols: Tensor) -> Tensor:
    """The logits of chosen rows and keys, −inf where hidden, with derivatives: (…, Hq, rows, cols).

    Each depends on one query and one key, so that a hidden NaN can spread through derivatives alone.
    """
    return p.shaped(_logits_at(fold(p, finite=not may_need_grad(*p.tensors)), rows, cols).flatten(1, 2))


def _logits_at(x: FoldedProblem, rows: Tensor, cols: Tensor) -> Tensor:
    """The logits of chosen rows and keys, −inf where hidden: (L, K, G, rows, cols)."""
    batch, heads, groups = x.query.shape[:3]
    points = Points(slice(0, batch), slice(0, heads), rows, cols)
    bias = x.bias
    if bias is not None:
        bias = bias if bias.shape[-2] == 1 else bias.index_select(-2, rows)
        bias = bias if bias.shape[-1] == 1 else bias.index_select(-1, cols)
    S = logits(x.spec, points, x.query.index_select(-2, rows), x.key.index_select(-2, cols), bias, x.shared)
    if (hide := hidden(x.spec, points, groups, S.device)) is not None:
        S = torch.where(hide, -torch.inf, S)
    return S


def largest(P: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row and its position, ties to the lowest: blocks compete by their maxima first.

    >>> [x.tolist() for x in largest(torch.tensor([[0.0, 2.0, 1.0, 2.0]]))]
    [[2.0], [1]]
    """
    count = P.shape[-1] // _SPLIT * _SPLIT
    if count < 2 * _SPLIT:
        value, at = P.max(-1)
        return value, at
    body = P[..., :count].unflatten(-1, (-1, _SPLIT))
    value, block = body.amax(-1).max(-1)
    inside = body.gather(-2, block[..., None, None].expand(*block.shape, 1, _SPLIT))[..., 0, :]
    at = block * _SPLIT + inside.argmax(-1)
    if count == P.shape[-1]:
        return value, at
    rest, place = P[..., count:].max(-1)
    return torch.where(rest > value, rest, value), torch.where(rest > value, place + count, at)


def strongest(S: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, largest first, ties to the lowest index.

    Blocks of keys compete first: the k largest are in the k blocks with the largest maxima, so most keys are read once.
    """
    count = S.shape[-1]
    size = next((size for size in (_SPLIT, _FINE_SPLIT) if count // size >= 2 * k), 0)
    if not size:
        return _by_rank(S, torch.arange(count, device=S.device), k)
    blocks = count // size
    body = S[..., : blocks * size].unflatten(-1, (blocks, size))
    maxima = body.amax(-1)  # (…, blocks)
    _, chosen = _by_rank(maxima, torch.arange(blocks, device=S.device), k)  # (…, k)
    chosen = chosen.sort(-1).values
    found = body.gather(-2, chosen[..., None].expand(*chosen.shape, size)).flatten(-2)
    index = (chosen[..., None] * size + torch.arange(size, device=S.device)).flatten(-2)
    tail = torch.arange(blocks * size, count, device=S.device)
    found = torch.cat((found, S[..., blocks * size :]), -1)
    index = torch.cat((index, tail.expand(*index.shape[:-1], -1)), -1)
    return _by_rank(found, index, k)


def _by_rank(S: Tensor, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest by (value, then lower position)."""
    if S.dtype != torch.float32:
        values, order = S.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], index.expand(S.shape).gather(-1, order[..., :k])
    bits = (S + 0.0).view(torch.int32).to(torch.int64)  # −0 and 0 tie
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # the order of the floats, as integers
    last = S.shape[-1] - 1
    rank = bits * 2**31 + (last - torch.arange(last + 1, device=S.device))
    order = last - (rank.topk(k).values & 0x7FFFFFFF)
    return S.gather(-1, order), index.expand(S.shape).gather(-1, order)


def _without_graph(p: Problem, rows: Rows) -> tuple[FoldedProblem, RowStats]:
    """The problem without its graph, and the statistics of its rows."""
    x = fold(p)
    shape = x.query.shape[:-1]
    return x, RowStats.at(rows.max_logit.detach().reshape(shape), rows.log_row_sum.detach().reshape(shape))
