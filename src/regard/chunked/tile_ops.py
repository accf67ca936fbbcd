"""Tiles for passes without derivatives: logits in buffers that are used again, hidden pairs without a NaN."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.folded import Canonical
from ..core.formula import bias_tile, hidden, products
from ..core.tiling import BIAS, KEY, QUERY, ROW, TURNED, Run, Tile

__all__ = ["Look", "Room", "below", "depths_and_weights", "exponentials", "masked_logits", "weights"]

_MANY = 64  # rows for which laying the keys out anew pays: sixteen take a third of the time without
_DEEP = -1e4  # exp(−1e4) is 0 in every dtype, and products with it stay finite
_FLOOR = {dtype: math.log(torch.finfo(dtype).tiny) + 0.01 for dtype in (torch.float32, torch.float64)}
_INF_BITS = {  # integers of the same size, and −inf as one
    torch.float32: (torch.int32, -(2**23)),
    torch.float64: (torch.int64, -(2**52)),
}


class Room:
    """Buffers by name. Fresh pages for every tile would cost a tenth of the time."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._turned: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of this shape over a buffer of this name; its content is whatever was there."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = like.new_empty(size)
        return held[:size].view(shape)

    def like(self, name: str, x: Tensor) -> Tensor:
        return self.take(name, tuple(x.shape), x)

    def turned(self, name: str, x: Tensor, rows: int) -> Tensor:
        """Keys (L, K, M, D) as (L, K, D, M), laid out anew if enough rows will read them: most BLAS like it so."""
        if name not in self._turned:
            self._turned[name] = x.mT if rows < _MANY else _laid_out(x)
        return self._turned[name]

    def product(self, name: str, rows: Tensor, turned: Tensor) -> Tensor:
        """Dot products (l, k, g, r, c) of rows (l, k, g, r, D) and turned keys (l, k, D, c)."""
        batch, heads, groups, count, dim = rows.shape
        cols = turned.shape[3]
        S = self.take(name, (batch * heads, groups * count, cols), rows)
        keys = turned.mT.flatten(0, 1).mT if turned.stride(2) == 1 else turned.flatten(0, 1)  # a copy keeps the layout
        torch.bmm(rows.reshape(batch * heads, groups * count, dim), keys, out=S)
        return S.view(batch, heads, groups, count, cols)


def _laid_out(x: Tensor) -> Tensor:
    """The keys turned, such that products with tiles of them copy nothing. MKL multiplies as fast by either layout."""
    if x.device.type == "cpu" and torch.backends.mkl.is_available():
        whole: Tensor = x.flatten(0, 1).unflatten(0, x.shape[:2])
        return whole.mT
    return x.mT.contiguous()


class Look(NamedTuple):
    """What a pass needs of every row: its largest logit (+inf if it sees nothing), and lse above that."""

    peak: Tensor  # (L, K, G, N)
    spread: Tensor

    @staticmethod
    def at(peak: Tensor, spread: Tensor) -> Look:
        return Look(peak.masked_fill(peak == -torch.inf, torch.inf), spread)


def masked_logits(x: Canonical, tile: Tile, run: Run, room: Room) -> Tensor:
    """The logits (l, k, g, r, c) of a tile, hidden pairs at −inf."""
    rule = x.rule
    query = QUERY.part(x.query, tile)
    if rule.pair is None:
        S = room.product("logits", query, TURNED.part(room.turned("keys", x.key, rule.n), tile))
    else:
        S = products(rule, query, KEY.part(x.key, tile), x.shared)
    if rule.softcap is not None:
        S.div_(rule.softcap).tanh_().mul_(rule.softcap)
    bias = None if x.bias is None else BIAS.part(x.bias, tile)
    added = bias_tile(rule, tile, S.shape[2], bias, x.shared)
    if added is not None:
        S.add_(added)
    if not run.full and (hide := hidden(rule, tile, S.shape[2], S.device)) is not None:
        _hide(S, hide)
    return S


def _hide(S: Tensor, hide: Tensor) -> None:
    """Put −inf where pairs are hidden, on CPUs by bits: of a random mask they guess every second branch wrong."""
    bits = _INF_BITS.get(S.dtype)
    if S.device.type != "cpu" or bits is None:
        S.masked_fill_(hide, -torch.inf)
        return
    kind, low = bits
    keep = hide.to(kind).sub_(1)  # all ones where a pair is seen, else 0
    S.view(kind).bitwise_and_(keep).bitwise_or_(keep.bitwise_not_().bitwise_and_(low))


def below(x: Canonical, S: Tensor, peak: Tensor, run: Run) -> Tensor:
    """Turn logits into distances below their row's largest, hidden pairs at a finite depth where exp is exactly 0."""
    S.sub_(peak[..., None])
    return S if _hides_nothing(x, run) else S.clamp_(min=_DEEP)


def _hides_nothing(x: Canonical, run: Run) -> bool:
    return run.full and x.bias is None and x.rule.bias is None


def exponentials(x: Canonical, X: Tensor, run: Run, out: Tensor) -> Tensor:
    """The exponentials of distances X; where pairs may be hidden, 0 for all below the smallest normal number.

    There Intel's exp takes a hundred times as long, so none is taken.
    """
    floor = _FLOOR.get(X.dtype)
    if floor is None or _hides_nothing(x, run):
        return torch.exp(X, out=out)
    return torch.threshold_(torch.clamp(X, min=floor, out=out).exp_(), math.exp(floor + 1e-3), 0.0)


def weights(x: Canonical, tile: Tile, run: Run, look: Look, room: Room) -> Tensor:
    """The weights (l, k, g, r, c) of a tile."""
    X = _depths(x, tile, run, look, room)
    return _weighed(x, X, tile, run, look, out=X)


def depths_and_weights(x: Canonical, tile: Tile, run: Run, look: Look, room: Room) -> tuple[Tensor, Tensor]:
    """The logits of a tile below their row's largest, and its weights, in two buffers: (l, k, g, r, c) each."""
    X = _depths(x, tile, run, look, room)
    return X, _weighed(x, X, tile, run, look, out=room.like("weights", X))


def _depths(x: Canonical, tile: Tile, run: Run, look: Look, room: Room) -> Tensor:
    return below(x, masked_logits(x, tile, run, room), ROW.part(look.peak, tile), run)


def _weighed(x: Canonical, X: Tensor, tile: Tile, run: Run, look: Look, out: Tensor) -> Tensor:
    """exp(X − spread), where X may be `out` itself."""
    X = torch.sub(X, ROW.part(look.spread, tile)[..., None], out=out)
    return exponentials(x, X, run, out=out)
