"""Tiles for passes without derivatives: logits in buffers that are used again, hidden pairs at a finite floor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .canonical import Canonical
from .formula import FILL, bias_tile, hidden, products
from .tile import BIAS, KEY, QUERY, ROW, Tile
from .tiling import Run

__all__ = ["Room", "masked_logits", "weights"]


class Room:
    """Buffers by name. Fresh pages for every tile would cost a tenth of the time."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of this shape over a buffer of this name; its content is whatever was there."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = like.new_empty(size)
        return held[:size].view(shape)

    def like(self, name: str, x: Tensor) -> Tensor:
        return self.take(name, tuple(x.shape), x)

    def product(self, rows: Tensor, keys: Tensor, name: str = "logits") -> Tensor:
        """Dot products (l, k, g, r, c) of rows (l, k, g, r, D) and keys (l, k, c, D)."""
        batch, heads, groups, count, dim = rows.shape
        cols = keys.shape[2]
        S = self.take(name, (batch * heads, groups * count, cols), rows)
        torch.bmm(rows.reshape(batch * heads, -1, dim), keys.reshape(batch * heads, cols, dim).mT, out=S)
        return S.view(batch, heads, groups, count, cols)


def masked_logits(x: Canonical, tile: Tile, run: Run, room: Room) -> Tensor:
    """The logits (l, k, g, r, c) of a tile, hidden pairs at FILL."""
    rule = x.rule
    query, key = QUERY.part(x.query, tile), KEY.part(x.key, tile)
    S = room.product(query, key) if rule.pair is None else products(rule, query, key, x.shared)
    if rule.softcap is not None:
        S.div_(rule.softcap).tanh_().mul_(rule.softcap)
    bias = None if x.bias is None else BIAS.part(x.bias, tile)
    added = bias_tile(rule, tile, S.shape[2], bias, x.shared)
    if added is not None:
        S.add_(added)
    if not run.full and (hide := hidden(rule, tile, S.shape[2], S.device)) is not None:
        S.masked_fill_(hide, FILL)
    return S if x.bias is None else S.clamp_(min=FILL)


def weights(x: Canonical, tile: Tile, run: Run, safe: Tensor, room: Room) -> Tensor:
    """The weights (l, k, g, r, c) of a tile from its rows' lse, in which an empty row has +inf."""
    return masked_logits(x, tile, run, room).sub_(ROW.part(safe, tile)[..., None]).exp_()
