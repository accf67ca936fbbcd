"""Weights of rows with lists of keys, some lists at a time, and how statistics by row, key or cell add them up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.folded import FoldedProblem
from ..core.gathered import GATHERED_ROW, GatheredTile, add_in_order
from ..core.tiling import Tile, TileSizes, tiles
from .gathered import Part, gathered
from .tile_ops import RowStats, Workspace, masked_logits, weights

__all__ = ["GatheredTiles", "gathered_logits", "gathered_weights"]


class GatheredTiles(NamedTuple):
    """The weights or the logits of a tile with gathered keys, and where its rows and keys are in the whole problem."""

    at: GatheredTile
    tile: Tile
    values: Tensor  # (lists, heads, groups, rows, W)
    workspace: Workspace

    @property
    def i(self) -> Tensor:
        """The row of each pair, (lists, 1, 1, rows, 1)."""
        return self.at.positions.rows[:, None, None, self.tile.rows, None]

    @property
    def j(self) -> Tensor:
        """The key of each pair, (lists, heads|1, 1, 1, W)."""
        return self.at.positions.keys[:, :, None, None, self.tile.cols]

    def of_rows(self, total: Tensor) -> Tensor:
        """View these rows of a contiguous tensor (L, K, G, N): (lists, heads, groups, rows)."""
        return GATHERED_ROW.part(total, self.at)[..., self.tile.rows]

    def add_at(self, total: Tensor, where: Tensor, values: Tensor) -> None:
        """Add values (lists, heads, groups, …) to places `where`, which broadcast with them, of (L, K, G, X)."""
        own = total[self.at.item].view(-1, 1)
        heads = torch.arange(total.shape[1] * total.shape[2], device=total.device)
        heads = heads.view(self.at.heads.heads, self.at.heads.groups, *(1,) * (values.dim() - 3))
        index = (heads * total.shape[-1] + where).expand(values.shape)
        add_in_order(own, index.flatten(), values.reshape(-1, 1))

    def keys_at(self, place: Tensor) -> Tensor:
        """The keys at places (lists, heads, groups, rows, …) among those of this tile."""
        keys = self.j.expand(*place.shape[:4], -1)
        found = keys.gather(-1, place if place.dim() == keys.dim() else place[..., None])
        return found if place.dim() == keys.dim() else found[..., 0]


def gathered_weights(x: FoldedProblem, stats: RowStats, tile_sizes: TileSizes) -> Iterator[GatheredTiles] | None:
    """The weights of all lists, some at a time; None if the rows have no lists."""
    parts = gathered(x, tile_sizes)
    return None if parts is None else _tiles(parts, stats, tile_sizes)


def gathered_logits(x: FoldedProblem, tile_sizes: TileSizes) -> Iterator[GatheredTiles] | None:
    """The logits of all lists, −inf where hidden, some at a time; None if the rows have no lists."""
    parts = gathered(x, tile_sizes)
    return None if parts is None else _tiles(parts, None, tile_sizes)


def _tiles(parts: Iterator[Part], stats: RowStats | None, tile_sizes: TileSizes) -> Iterator[GatheredTiles]:
    for at, part in parts:
        own = None if stats is None else RowStats(*(GATHERED_ROW.part(each, at) for each in stats))
        workspace = Workspace()
        for tile, run in tiles(part.spec, part.query.shape, tile_sizes):
            if own is None:
                values = masked_logits(part, tile, run, workspace)
            else:
                values = weights(part, tile, run, own, workspace)
            yield GatheredTiles(at, tile, values, workspace)
