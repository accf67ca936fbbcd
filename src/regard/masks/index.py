"""Indices of pairs: how rows, keys and parameters with one entry per batch item broadcast together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from regard.errors import MaskError, ShapeError

__all__ = [
    "Index",
    "broadcast_shapes",
    "broadcast_sizes",
    "diagonal_offset",
    "expand_to_pairs",
    "fits",
    "indices",
    "per_item",
    "take",
]

Index: TypeAlias = Tensor | int


def indices(i: Index, j: Index) -> tuple[Tensor, Tensor]:
    """Give `i` and `j` as tensors on one device (that of `i`), with the same number of dimensions."""
    device = i.device if isinstance(i, Tensor) else j.device if isinstance(j, Tensor) else torch.device("cpu")
    i = i if isinstance(i, Tensor) else torch.tensor(i, device=device)
    j = j.to(i.device) if isinstance(j, Tensor) else torch.tensor(j, device=device)
    dims = max(i.dim(), j.dim())
    return i.reshape((1,) * (dims - i.dim()) + i.shape), j.reshape((1,) * (dims - j.dim()) + j.shape)


def per_item(value: int | Tensor, like: Tensor) -> int | Tensor:
    """View a parameter (B,) as (B, 1, 1, …), ready to broadcast with `like`; an integer stays as it is."""
    if isinstance(value, Tensor):
        return value.to(like.device).reshape((-1, 1) + (1,) * like.dim())
    return value


def diagonal_offset(offset: int | Tensor | None, like: Tensor, n: int, m: int) -> int | Tensor:
    """Give the offset of the diagonal; `None` aligns the last row with the last key."""
    return per_item(m - n if offset is None else offset, like)


def take(values: Tensor, at: Tensor) -> Tensor:
    """Take `values` (X,) or (B, X) at the positions `at`: the shape of `at`, after (B, 1) if there is a batch."""
    found = values.to(at.device)[..., at]
    return found.unsqueeze(1) if values.dim() == 2 else found


def expand_to_pairs(result: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Expand a result that depends on `i` or `j` alone to every pair."""
    return result.expand(broadcast_shapes(result.shape, i.shape, j.shape))


def fits(size: int, whole: int) -> bool:
    """Whether a size broadcasts to `whole`, asked so that torch.export can keep a size that depends on data."""
    return (isinstance(size, int) and size == 1) or size == whole or size == 1


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """Give the shape that the shapes broadcast to; torch.broadcast_shapes spends half a second on importing sympy."""
    result = list(shapes[0])
    for shape in shapes[1:]:
        result = [1] * (len(shape) - len(result)) + result
        for at, size in enumerate(reversed(shape), 1):
            if size == result[-at]:  # asked first: it is known even of a size that depends on data
                continue
            if size != 1 and result[-at] != 1:
                raise ShapeError(f"shapes {', '.join(str(tuple(s)) for s in shapes)} do not broadcast")
            result[-at] = result[-at] if size == 1 else size
    return torch.Size(result)


def broadcast_sizes(a: int, b: int, what: str, sign: str) -> int:
    """Give the common number of batch items or heads of two masks, of which one may be 1."""
    if a == 1:
        return b
    if a != b and b != 1:
        raise MaskError(
            f"{sign}: two masks must have the same number of {what}, or one of them 1; got {a} and {b}. "
            f"Make both for the same batch and the same heads."
        )
    return a
