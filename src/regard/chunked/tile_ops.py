"""Logits and weights of one tile, for passes that record no graph: buffers are reused, hidden pairs give no NaN."""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.folded import FoldedProblem
from ..core.formula import bias_tile, hidden, pairs_of, products
from ..core.spec import Spec
from ..core.tiling import BIAS, KEY, QUERY, ROW, KeyRun, Tile
from ..scores.elementwise import evaluate
from .intervals import Intervals, intervals_of

__all__ = [
    "FLOOR",
    "INF_BITS",
    "RowStats",
    "Workspace",
    "below_row_max",
    "exp_below_max",
    "exp_normal",
    "hides_nothing",
    "logits_and_weights",
    "masked_logits",
    "multiply",
    "weights",
]

_ROWS_WORTH_A_COPY = 64  # from here a transposed copy of the keys pays; 16 rows take a third of the time without
_BLOCK_ROWS = 128  # of a matrix that is multiplied in blocks
_FEWEST_ROWS = 8  # of a block: the bits of fewer rows depend on how many there are
_MOST_THREADS = 2  # per product: with more, MKL divides rows so that some are summed in another order
_FEW = 8  # matrices, whose rows are divided into blocks so that there are more
_HIDDEN_LOGIT = -1e4  # exp(−1e4) is 0 in every dtype, and products with it stay finite
FLOOR = {dtype: math.log(torch.finfo(dtype).tiny) + 0.01 for dtype in (torch.float32, torch.float64)}
INF_BITS = {  # the integer dtype of the same size, and −inf in it
    torch.float32: (torch.int32, -(2**23)),
    torch.float64: (torch.int64, -(2**52)),
}


class Workspace:
    """Buffers by name, reused from tile to tile: fresh memory for every tile would cost a tenth of the time."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._views: dict[str, dict[tuple[int, ...], Tensor]] = {}
        self._matrices: dict[str, Tensor | None] = {}
        self._intervals: tuple[Intervals, ...] | None = None

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of this shape in the buffer of this name."""
        views = self._views.setdefault(name, {})
        if shape not in views:
            size = math.prod(shape)
            held = self._held.get(name)
            if held is None or held.numel() < size:
                held = self._held[name] = like.new_empty(size)
                views.clear()
            views[shape] = held[:size].view(shape)
        return views[shape]

    def like(self, name: str, x: Tensor) -> Tensor:
        return self.take(name, tuple(x.shape), x)

    def matrices(self, name: str, x: Tensor, tile: Tile) -> Tensor:
        """The tile's keys or values (l·k, c, D), out of (L, K, M, D)."""
        if name not in self._matrices:
            self._matrices[name] = _flat(x)
        whole = self._matrices[name]
        return KEY.part(x, tile).flatten(0, 1) if whole is None else _part(whole, x.shape[1], tile, -2)

    def transposed(self, name: str, x: Tensor, rows: int, tile: Tile) -> Tensor:
        """The same, transposed (l·k, D, c), copied if enough rows read them: most BLAS libraries prefer a copy."""
        if name not in self._matrices:
            flat = _flat(x)
            few = x.mT if flat is None else flat.mT
            self._matrices[name] = _transposed_copy(x) if rows >= _ROWS_WORTH_A_COPY else few
        whole = self._matrices[name]
        if whole is not None and whole.dim() == 4:
            whole = None
        return KEY.part(x, tile).flatten(0, 1).mT if whole is None else _part(whole, x.shape[1], tile, -1)

    def intervals(self, spec: Spec) -> tuple[Intervals, ...]:
        """`intervals_of` the mask."""
        if self._intervals is None:
            self._intervals = intervals_of(spec)
        return self._intervals

    def product(self, name: str, rows: Tensor, transposed: Tensor) -> Tensor:
        """Dot products (l, k, g, r, c) of rows (l, k, g, r, D) and transposed keys (l·k, D, c)."""
        batch, heads, groups, count, dim = rows.shape
        cols = transposed.shape[2]
        S = self.take(name, (batch * heads, groups * count, cols), rows)
        multiply(rows.reshape(batch * heads, groups * count, dim), transposed, out=S)
        return self.take(name, (batch, heads, groups, count, cols), rows)


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The products of matrices (B, r, k) and (B, k, c); in float32, with the same bits for every number of threads.

    BLAS libraries divide one product among their threads, by its sums too. Several products they compute side by
    side, with one thread or two for each. So the rows of few matrices are multiplied as several matrices. Rows beyond
    the last whole block are multiplied apart, however many matrices there are: no bit depends on that number either.
    """
    if a.device.type != "cpu" or 0 in (*a.shape, b.shape[2]):
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    if a.requires_grad or b.requires_grad:
        return _several(a, b, out)
    rows = a.shape[1]
    whole = rows - rows % _BLOCK_ROWS if rows >= 2 * _BLOCK_ROWS else rows
    if whole == rows:
        return _in_blocks(a, b, out)
    parts = [_in_blocks(part, b, None) for part in a.split((whole, rows - whole), 1)]
    return torch.cat(parts, 1) if out is None else torch.cat(parts, 1, out=out)


def _in_blocks(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """`multiply` where rows are whole blocks, or few."""
    batch, rows = a.shape[:2]
    blocks = 2 if batch == 1 and rows % 2 == 0 and rows >= 2 * _FEWEST_ROWS else 1
    if rows >= 2 * _BLOCK_ROWS:
        blocks = rows // _BLOCK_ROWS if batch < _FEW else 1
    if blocks == 1:
        return _several(a, b, out)
    found = a.new_empty(batch, rows, b.shape[2]) if out is None else out
    for one, other, into in zip(a, b, found, strict=True):
        _several(one.unflatten(0, (blocks, -1)), other.expand(blocks, -1, -1), into.unflatten(0, (blocks, -1)))
    return found


def _several(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """`multiply` without blocks of rows. Threads that would share a product compute the same one again beside it."""
    each = _MOST_THREADS if a.shape[1] >= _FEWEST_ROWS else 1
    times = -(-max(2, -(-torch.get_num_threads() // each)) // len(a))
    if times == 1:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    found = torch.bmm(_repeated(a, times), _repeated(b, times))[: len(a)]
    return found if out is None else out.copy_(found)


def _repeated(x: Tensor, times: int) -> Tensor:
    """As many matrices, in the layout of these; one, or several that are the same, are not copied."""
    if len(x) == 1 or x.stride(0) == 0:
        return x[:1].expand(times * len(x), -1, -1)
    return x.repeat(times, 1, 1) if x.stride(2) == 1 else x.mT.repeat(times, 1, 1).mT


def _flat(x: Tensor) -> Tensor | None:
    """(L, K, M, D) as (L·K, M, D); None if that takes a copy."""
    return x.flatten(0, 1) if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) else None


def _transposed_copy(x: Tensor) -> Tensor:
    """The transposed keys, so that products with tiles of them copy nothing. MKL is as fast with either layout."""
    if x.device.type == "cpu" and torch.backends.mkl.is_available():
        return x.flatten(0, 1).mT
    return x.mT.contiguous().flatten(0, 1)


def _part(whole: Tensor, heads: int, tile: Tile, keys: int) -> Tensor:
    """The tile's part of all matrices (L·K, …) whose dimension `keys` counts keys; a tile of items has all heads."""
    first = tile.batch.start * heads + tile.heads.start
    count = (tile.batch.stop - tile.batch.start) * (tile.heads.stop - tile.heads.start)
    if count != whole.shape[0]:
        whole = whole.narrow(0, first, count)
    start, stop = tile.cols.start, tile.cols.stop
    return whole if stop - start == whole.shape[keys] else whole.narrow(keys, start, stop - start)


class RowStats(NamedTuple):
    """What a late pass needs of every row: its largest logit (+inf if all keys are hidden), and lse − row_max."""

    row_max: Tensor  # (L, K, G, N)
    log_row_sum: Tensor

    @staticmethod
    def at(row_max: Tensor, log_row_sum: Tensor) -> RowStats:
        return RowStats(row_max.masked_fill(row_max == -torch.inf, torch.inf), log_row_sum)


def masked_logits(x: FoldedProblem, tile: Tile, run: KeyRun, workspace: Workspace) -> Tensor:
    """The logits (l, k, g, r, c) of a tile, hidden pairs at −inf."""
    spec = x.spec
    query = QUERY.part(x.query, tile)
    if spec.pair is None:
        S = workspace.product("logits", query, workspace.transposed("keys", x.key, spec.n, tile))
    else:
        S = products(spec, query, KEY.part(x.key, tile), x.shared)
    if spec.pointwise is not None:
        S = evaluate(spec.pointwise, pairs_of(spec, tile, S.shape[2], S.device), x.shared[spec.tables], S)
    if spec.softcap is not None:
        S.div_(spec.softcap).tanh_().mul_(spec.softcap)
    bias = None if x.bias is None else BIAS.part(x.bias, tile)
    added = bias_tile(spec, tile, S.shape[2], bias, x.shared)
    if added is not None:
        S.add_(added)
    if run.full:
        return S
    several = spec.n > S.shape[3] and S.device.type == "cpu" and S.dtype in INF_BITS  # strips that share the intervals
    intervals = workspace.intervals(spec) if several else ()
    if intervals:
        spec.check_unchanged()
        _show_only(S, reduce(Tensor.bitwise_or_, (own.visible(tile) for own in intervals)))
    elif (hide := hidden(spec, tile, S.shape[2], S.device)) is not None:
        _hide(S, hide)
    return S


def _hide(S: Tensor, hide: Tensor) -> None:
    """Put −inf where pairs are hidden."""
    if S.device.type != "cpu" or S.dtype not in INF_BITS:
        S.masked_fill_(hide, -torch.inf)
    else:
        _show_only(S, ~hide)


def _show_only(S: Tensor, visible: Tensor) -> None:
    """Put −inf where pairs are not visible. Branch prediction fails half the time on random masks, so bits select."""
    kind, low = INF_BITS[S.dtype]
    keep = visible.to(kind).neg_()  # all ones where a pair is visible, else 0
    S.view(kind).bitwise_and_(keep).bitwise_or_(keep.bitwise_not_().bitwise_and_(low))


def below_row_max(x: FoldedProblem, S: Tensor, row_max: Tensor, run: KeyRun) -> Tensor:
    """Logits minus the row max, in place; hidden pairs get a finite value whose exp is exactly 0."""
    S.sub_(row_max[..., None])
    return S if hides_nothing(x, run) else S.clamp_(min=FLOOR.get(S.dtype, _HIDDEN_LOGIT))


def hides_nothing(x: FoldedProblem, run: KeyRun) -> bool:
    return run.full and x.bias is None and not x.spec.hides_by_value


def exp_below_max(x: FoldedProblem, X: Tensor, run: KeyRun, out: Tensor, clamped: bool = False) -> Tensor:
    """exp(X) for X ≤ 0; where pairs may be hidden, 0 for results below the smallest normal number.

    Intel's exp takes a hundred times as long for those, so it is not called. `clamped` says that X is from
    `below_row_max`, which has no such numbers.
    """
    floor = FLOOR.get(X.dtype)
    if floor is None or hides_nothing(x, run):
        return torch.exp(X, out=out)
    return exp_normal(X if clamped else torch.clamp(X, min=floor, out=out), out)


def exp_normal(X: Tensor, out: Tensor) -> Tensor:
    """exp(X) for X of at least `FLOOR`, and 0 where X is that."""
    return torch.threshold_(torch.exp(X, out=out), math.exp(FLOOR[X.dtype] + 1e-3), 0.0)


def weights(x: FoldedProblem, tile: Tile, run: KeyRun, stats: RowStats, workspace: Workspace) -> Tensor:
    """The weights (l, k, g, r, c) of a tile."""
    S = masked_logits(x, tile, run, workspace)
    return _weights_of(x, S.sub_(ROW.part(stats.row_max, tile)[..., None]), tile, run, stats, out=S)


def logits_and_weights(
    x: FoldedProblem, tile: Tile, run: KeyRun, stats: RowStats, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """The logits of a tile minus the row max, and its weights, in two buffers: (l, k, g, r, c) each."""
    X = below_row_max(x, masked_logits(x, tile, run, workspace), ROW.part(stats.row_max, tile), run)
    return X, _weights_of(x, X, tile, run, stats, out=workspace.like("weights", X))


def _weights_of(x: FoldedProblem, X: Tensor, tile: Tile, run: KeyRun, stats: RowStats, out: Tensor) -> Tensor:
    """exp(X − log_row_sum); X may be `out` itself."""
    X = torch.sub(X, ROW.part(stats.log_row_sum, tile)[..., None], out=out)
    return exp_below_max(x, X, run, out=out)
