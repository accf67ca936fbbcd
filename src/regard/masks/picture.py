"""Pictures in text, of masks and of the share of visible pairs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cell_edges", "draw_pairs", "draw_shades"]

PAIRS = "·█"
SHADES = " ░▒▓█"


def draw_pairs(allowed: Tensor) -> str:
    """Draw a bool tensor (n, m), one character per pair.

    >>> print(draw_pairs(torch.ones(2, 3).tril().bool()))
    █··
    ██·
    """
    return "\n".join("".join(PAIRS[seen] for seen in line) for line in allowed.tolist())


def draw_shades(densities: Tensor) -> str:
    """Draw shares from 0 to 1 as shades, from blank (nothing is visible) to solid (everything is).

    >>> draw_shades(torch.tensor([[0.0, 0.1, 0.5, 0.9, 1.0]]))
    ' ░▒▓█'
    """
    return "\n".join("".join(map(_shade, line)) for line in densities.tolist())


def cell_edges(n: int, m: int, width: int) -> tuple[Tensor, Tensor]:
    """Divide `n` rows and `m` keys into cells, one per character of a picture `width` wide; give the edges of both."""
    columns = min(m, width)
    lines = min(n, width, max(1, round(n * columns / m / 2)))  # a character is twice as high as it is wide
    return _edges(n, lines), _edges(m, columns)


def _edges(length: int, cells: int) -> Tensor:
    """Give the edges of cells such that position i is in cell ⌊i·cells/length⌋."""
    return (torch.arange(cells + 1, device="cpu") * length + cells - 1) // cells


def _shade(share: float) -> str:
    if share in (0.0, 1.0):
        return SHADES[-int(share)]
    return SHADES[1 + min(2, int(share * 3))]
