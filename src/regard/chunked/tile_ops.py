"""Logits and weights of one tile, for passes that record no graph: buffers are reused, hidden pairs give no NaN."""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.folded import FoldedProblem
from ..core.formula import bias_tile, hidden, products
from ..core.tiling import BIAS, KEY, QUERY, ROW, TRANSPOSED, KeyRun, Tile

__all__ = ["RowStats", "Workspace", "below_row_max", "exp_below_max", "logits_and_weights", "masked_logits", "weights"]

_ROWS_WORTH_A_COPY = 64  # from here a transposed copy of the keys pays; 16 rows take a third of the time without
_HIDDEN_LOGIT = -1e4  # exp(−1e4) is 0 in every dtype, and products with it stay finite
_FLOOR = {dtype: math.log(torch.finfo(dtype).tiny) + 0.01 for dtype in (torch.float32, torch.float64)}
_INF_BITS = {  # the integer dtype of the same size, and −inf in it
    torch.float32: (torch.int32, -(2**23)),
    torch.float64: (torch.int64, -(2**52)),
}


class Workspace:
    """Buffers by name, reused from tile to tile: fresh memory for every tile would cost a tenth of the time."""

    def __init__(self, beside: Workspace | None = None) -> None:
        """`beside` is the workspace of another thread, with which this one shares the transposed keys."""
        self._held: dict[str, Tensor] = {}
        self._transposed: dict[str, Tensor] = {} if beside is None else beside._transposed
        self._lock = threading.Lock() if beside is None else beside._lock

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of this shape in the buffer of this name."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = like.new_empty(size)
        return held[:size].view(shape)

    def like(self, name: str, x: Tensor) -> Tensor:
        return self.take(name, tuple(x.shape), x)

    def transposed(self, name: str, x: Tensor, rows: int) -> Tensor:
        """Keys (L, K, M, D) as (L, K, D, M), copied if enough rows read them: most BLAS libraries prefer a copy."""
        if name not in self._transposed:
            with self._lock:
                if name not in self._transposed:
                    self._transposed[name] = x.mT if rows < _ROWS_WORTH_A_COPY else _transposed_copy(x)
        return self._transposed[name]

    def product(self, name: str, rows: Tensor, transposed: Tensor) -> Tensor:
        """Dot products (l, k, g, r, c) of rows (l, k, g, r, D) and transposed keys (l, k, D, c)."""
        batch, heads, groups, count, dim = rows.shape
        cols = transposed.shape[3]
        S = self.take(name, (batch * heads, groups * count, cols), rows)
        keys = transposed.mT.flatten(0, 1).mT if transposed.stride(2) == 1 else transposed.flatten(0, 1)
        torch.bmm(rows.reshape(batch * heads, groups * count, dim), keys, out=S)
        return S.view(batch, heads, groups, count, cols)


def _transposed_copy(x: Tensor) -> Tensor:
    """The transposed keys, so that products with tiles of them copy nothing. MKL is as fast with either layout."""
    if x.device.type == "cpu" and torch.backends.mkl.is_available():
        whole: Tensor = x.flatten(0, 1).unflatten(0, x.shape[:2])
        return whole.mT
    return x.mT.contiguous()


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
        S = workspace.product("logits", query, TRANSPOSED.part(workspace.transposed("keys", x.key, spec.n), tile))
    else:
        S = products(spec, query, KEY.part(x.key, tile), x.shared)
    if spec.softcap is not None:
        S.div_(spec.softcap).tanh_().mul_(spec.softcap)
    bias = None if x.bias is None else BIAS.part(x.bias, tile)
    added = bias_tile(spec, tile, S.shape[2], bias, x.shared)
    if added is not None:
        S.add_(added)
    if not run.full and (hide := hidden(spec, tile, S.shape[2], S.device)) is not None:
        _hide(S, hide)
    return S


def _hide(S: Tensor, hide: Tensor) -> None:
    """Put −inf where pairs are hidden. Branch prediction fails half the time on random masks, so bits select."""
    bits = _INF_BITS.get(S.dtype)
    if S.device.type != "cpu" or bits is None:
        S.masked_fill_(hide, -torch.inf)
        return
    kind, low = bits
    keep = hide.to(kind).sub_(1)  # all ones where a pair is visible, else 0
    S.view(kind).bitwise_and_(keep).bitwise_or_(keep.bitwise_not_().bitwise_and_(low))


def below_row_max(x: FoldedProblem, S: Tensor, row_max: Tensor, run: KeyRun) -> Tensor:
    """Logits minus the row max, in place; hidden pairs get a finite value whose exp is exactly 0."""
    S.sub_(row_max[..., None])
    return S if _hides_nothing(x, run) else S.clamp_(min=_HIDDEN_LOGIT)


def _hides_nothing(x: FoldedProblem, run: KeyRun) -> bool:
    return run.full and x.bias is None and x.spec.bias is None


def exp_below_max(x: FoldedProblem, X: Tensor, run: KeyRun, out: Tensor) -> Tensor:
    """exp(X) for X ≤ 0; where pairs may be hidden, 0 for results below the smallest normal number.

    Intel's exp takes a hundred times as long for those, so it is not called.
    """
    floor = _FLOOR.get(X.dtype)
    if floor is None or _hides_nothing(x, run):
        return torch.exp(X, out=out)
    return torch.threshold_(torch.clamp(X, min=floor, out=out).exp_(), math.exp(floor + 1e-3), 0.0)


def weights(x: FoldedProblem, tile: Tile, run: KeyRun, stats: RowStats, workspace: Workspace) -> Tensor:
    """The weights (l, k, g, r, c) of a tile."""
    X = _shifted_logits(x, tile, run, stats, workspace)
    return _weights_of(x, X, tile, run, stats, out=X)


def logits_and_weights(
    x: FoldedProblem, tile: Tile, run: KeyRun, stats: RowStats, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """The logits of a tile minus the row max, and its weights, in two buffers: (l, k, g, r, c) each."""
    X = _shifted_logits(x, tile, run, stats, workspace)
    return X, _weights_of(x, X, tile, run, stats, out=workspace.like("weights", X))


def _shifted_logits(x: FoldedProblem, tile: Tile, run: KeyRun, stats: RowStats, workspace: Workspace) -> Tensor:
    return below_row_max(x, masked_logits(x, tile, run, workspace), ROW.part(stats.row_max, tile), run)


def _weights_of(x: FoldedProblem, X: Tensor, tile: Tile, run: KeyRun, stats: RowStats, out: Tensor) -> Tensor:
    """exp(X − log_row_sum); X may be `out` itself."""
    X = torch.sub(X, ROW.part(stats.log_row_sum, tile)[..., None], out=out)
    return exp_below_max(x, X, run, out=out)
