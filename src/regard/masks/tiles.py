"""Tiles: rectangles of pairs, given by the edges of row blocks and of key blocks, and what is known of each."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FULL", "HIDDEN", "PARTIAL", "members", "tiles", "whole_cover"]

HIDDEN, PARTIAL, FULL = 0, 1, 2


def tiles(seen: Tensor, full: Tensor) -> Tensor:
    """Join where something may be seen and where all is, bool (R, C) or (B, H, R, C), into int8 (R, C) on the CPU."""
    if seen.dim() == 4:
        seen, full = seen.any(0).any(0), full.all(0).all(0)
    return (seen.view(torch.int8) + full.view(torch.int8)).cpu()  # HIDDEN 0, PARTIAL 1, FULL 2


def whole_cover(rows: Tensor, cols: Tensor, value: int) -> Tensor:
    """Say the same of every tile."""
    return torch.full((len(rows) - 1, len(cols) - 1), value, dtype=torch.int8, device="cpu")


def members(edges: Tensor) -> Tensor:
    """Give every member of each block, (R, size of the largest); smaller blocks repeat their last one."""
    starts, stops = edges[:-1, None], edges[1:, None]
    size = max(1, int((stops - starts).max())) if len(starts) else 1
    return torch.minimum(starts + torch.arange(size, device=edges.device), stops - 1).clamp_(min=0)
