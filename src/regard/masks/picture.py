"""Pictures in text, of masks and of the share of visible pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..display import block, note, picture

if TYPE_CHECKING:
    from typing import Any

__all__ = ["cell_edges", "draw_pairs", "draw_shades", "html_picture"]

PAIRS = "·█"
SHADES = " ░▒▓█"
_LONGEST = 1 << 14  # rows or keys of a mask that is drawn
_SIDE = 64  # cells along each side of a picture in a notebook
_USUAL = (16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)  # sizes at which a mask that fits any is drawn


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


def html_picture(mask: Any) -> str:
    """Draw a mask for a notebook, at the size that its tensors have, or at one where it hides something."""
    for n, m in _sizes(mask):
        if n * m == 0 or mask.misfit(n, m):
            continue
        try:
            one = mask.restrict(slice(0, 1), slice(0, 1))
            shares = one._tile_densities(_edges(n, min(n, _SIDE)), _edges(m, min(m, _SIDE)), n, m)
            visible = one.density(n, m)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):  # such as those of a predicate
            continue
        if visible == 1.0 and n < _USUAL[-1] and not mask.tensors and not mask.trivial:  # it hides pairs further on
            continue
        text = f"{n:,} queries × {m:,} keys, {visible:.1%} of the pairs are visible"
        more = "; the first item and head" if mask.lead != (1, 1) else ""
        return block(repr(mask), picture(shares.tolist(), f"{mask!r}: {text}"), note(text + more))
    return block(repr(mask))


def _sizes(mask: Any) -> Iterator[tuple[int, int]]:
    """The sizes at which to draw a mask: those of its tensors, then some that show its numbers."""
    yield from _extents(mask)
    lengths: dict[int, None] = {}  # in order
    for tensor in mask.tensors:
        if tensor.dim() >= 1 and tensor.dtype != torch.bool and not tensor.dtype.is_floating_point and tensor.numel():
            lengths |= dict.fromkeys((int(tensor.max()), int(tensor.reshape(-1, tensor.shape[-1])[0].sum())))
        lengths |= dict.fromkeys(reversed(tensor.shape[-2:]))
    known = [length for length in lengths if 0 < length <= _LONGEST]
    yield from ((length, length) for length in known)
    yield from product(known, known)
    size = getattr(mask, "size", None)
    if isinstance(size, tuple):
        yield size
    side = min(2 * max(_numbers(mask), default=0), _LONGEST)
    yield from ((usual, usual) for usual in (*(one for one in _USUAL if one >= side), side) if usual)


def _extents(mask: Any) -> Iterator[tuple[int, int]]:
    """The sizes that a mask or its parts name themselves, such as the rows and keys of lists."""
    if (extent := getattr(mask, "extent", None)) is not None:
        yield extent
    for name in mask.__dataclass_fields__:
        if hasattr(value := getattr(mask, name, None), "__dataclass_fields__"):
            yield from _extents(value)


def _numbers(mask: Any) -> Iterator[int]:
    """The whole numbers in a mask and in its parts, such as the width of a window."""
    for name in mask.__dataclass_fields__:
        value = getattr(mask, name, None)
        if type(value) is int:
            yield abs(value)
        elif hasattr(value, "__dataclass_fields__"):
            yield from _numbers(value)


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
