"""A mask drawn in text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.masks.tiles import FULL, PARTIAL

if TYPE_CHECKING:
    from regard.masks.base import Mask

__all__ = ["draw"]

PAIRS = "·█"
SHADES = " ░▒▓█"
PAIRS_AT_ONCE = 1 << 20


def draw(mask: Mask, n: int, m: int, width: int, batch: int, head: int) -> str:
    """Draw one batch item and head: `·█` a pair if all fit, else shades, from blank (nothing seen) to solid (all)."""
    item = _one(mask, width, batch, head)
    if n == 0 or m == 0:
        return ""
    if max(n, m) <= width:
        cells = item.dense(n, m).reshape(n, m)
        return "\n".join("".join(PAIRS[seen] for seen in line) for line in cells.tolist())
    columns = min(m, width)
    lines = min(n, width, max(1, round(n * columns / m / 2)))  # a character is twice as high as wide
    share = _share(item, _edges(n, lines), _edges(m, columns), n, m)
    return "\n".join("".join(map(_shade, line)) for line in share.tolist())


def _one(mask: Mask, width: int, batch: int, head: int) -> Mask:
    if width < 1:
        raise ArgumentError(f"picture: width must be at least 1; got {width}.")
    for name, at, size in (("batch", batch, mask.lead[0]), ("head", head, mask.lead[1])):
        if at < 0 or (size != 1 and at >= size):
            raise ArgumentError(f"picture: {name} must be from 0 to {size - 1}; got {at}.")
    return mask.restrict(slice(batch, batch + 1), slice(head, head + 1))


def _edges(length: int, cells: int) -> Tensor:
    """Give the edges of cells such that position i is in cell ⌊i·cells/length⌋."""
    return (torch.arange(cells + 1, device="cpu") * length + cells - 1) // cells


def _share(mask: Mask, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
    """Give the share of allowed pairs in each tile; only lines that `cover` leaves open are looked at."""
    known = mask.cover(rows, cols, n, m)
    share = known.double() / FULL
    keys = torch.arange(m, device="cpu")[None, :]
    for line in (known == PARTIAL).any(1).nonzero().flatten().tolist():
        seen = torch.zeros(m + 1, dtype=torch.int64, device="cpu")
        block = torch.arange(int(rows[line]), int(rows[line + 1]), device="cpu")[:, None]
        height = max(1, PAIRS_AT_ONCE // m)
        for top in range(0, len(block), height):
            seen[1:] += mask.allows(block[top : top + height], keys, n, m).reshape(-1, m).sum(0)
        share[line] = seen.cumsum(0)[cols].diff() / (cols.diff() * len(block))
    return share


def _shade(share: float) -> str:
    if share in (0.0, 1.0):
        return SHADES[-int(share)]
    return SHADES[1 + min(2, int(share * 3))]
