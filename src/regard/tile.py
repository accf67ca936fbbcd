"""One tile of a problem, and the part of each tensor that belongs to it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BIAS", "KEY", "QUERY", "ROW", "SHARED", "TURNED", "Kind", "Spots", "Tile"]


class Tile(NamedTuple):
    """Which part of the problem: flattened batch items, key heads, rows, keys."""

    batch: slice
    heads: slice
    rows: slice
    cols: slice

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and key indices, 1-D."""
        i = torch.arange(self.rows.start, self.rows.stop, device=device)
        return i, torch.arange(self.cols.start, self.cols.stop, device=device)


class Spots(NamedTuple):
    """Rows and keys picked one by one."""

    batch: slice
    heads: slice
    rows: Tensor
    cols: Tensor

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and key indices, 1-D."""
        return self.rows.to(device), self.cols.to(device)


class Kind(NamedTuple):
    """Which dimensions of a tensor, counted from its end, follow batch, heads, rows and keys."""

    batch: int | None = None
    heads: int | None = None
    rows: int | None = None
    cols: int | None = None

    def part(self, x: Tensor, tile: Tile) -> Tensor:
        """View the tile's part of x; dimensions of size 1 are broadcast and stay."""
        for dim, where in zip(self, tile, strict=True):
            if dim is not None and x.shape[dim] != 1:
                x = x.narrow(dim, where.start, where.stop - where.start)
        return x


QUERY = Kind(batch=-5, heads=-4, rows=-2)  # (L, K, G, N, D); the output too
KEY = Kind(batch=-4, heads=-3, cols=-2)  # (L, K, M, D); values too
TURNED = Kind(batch=-4, heads=-3, cols=-1)  # (L, K, D, M)
BIAS = Kind(batch=-5, heads=-4, rows=-2, cols=-1)  # (L|1, K|1, G|1, N|1, M|1)
ROW = Kind(batch=-4, heads=-3, rows=-1)  # (L, K, G, N)
SHARED = Kind()
