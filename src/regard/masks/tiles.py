"""Tiles: rectangles of pairs between the edges of row blocks and key blocks, and the state of each."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FULL", "HIDDEN", "PARTIAL", "block_indices", "tile_states", "uniform_cover"]

HIDDEN, PARTIAL, FULL = 0, 1, 2


def tile_states(seen: Tensor, full: Tensor) -> Tensor:
    """Combine where a tile may show something and where it shows all, bool (…, R, C), into int8 (R, C) on the CPU."""
    if seen.dim() == 4:
        seen, full = seen.any(0).any(0), full.all(0).all(0)
    return (seen.view(torch.int8) + full.view(torch.int8)).cpu()  # HIDDEN 0, PARTIAL 1, FULL 2


def uniform_cover(rows: Tensor, cols: Tensor, value: int) -> Tensor:
    """Give every tile the same state."""
    return torch.full((len(rows) - 1, len(cols) - 1), value, dtype=torch.int8, device="cpu")


def block_indices(edges: Tensor) -> Tensor:
    """Give the indices in each block, (R, size of the largest); smaller blocks repeat their last index."""
    starts, stops = edges[:-1, None], edges[1:, None]
    size = max(1, int((stops - starts).max())) if len(starts) else 1
    return torch.minimum(starts + torch.arange(size, device=edges.device), stops - 1).clamp_(min=0)
