"""Positions of pairs: how row and key indices, and parameters with one entry a batch item, are laid side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from regard.errors import ShapeError

__all__ = ["Index", "aligned", "indices", "joint", "per_item", "pick", "spread"]

Index: TypeAlias = Tensor | int


def indices(i: Index, j: Index) -> tuple[Tensor, Tensor]:
    """Give `i` and `j` as tensors on one device (that of `i`), with the same number of dimensions."""
    device = i.device if isinstance(i, Tensor) else j.device if isinstance(j, Tensor) else None
    i = i if isinstance(i, Tensor) else torch.tensor(i, device=device)
    j = j.to(i.device) if isinstance(j, Tensor) else torch.tensor(j, device=device)
    dims = max(i.dim(), j.dim())
    return i.reshape((1,) * (dims - i.dim()) + i.shape), j.reshape((1,) * (dims - j.dim()) + j.shape)


def per_item(value: int | Tensor, like: Tensor) -> int | Tensor:
    """View a parameter of shape (B,) as (B, 1, 1, …), to stand before the dimensions of `like`; a number stays one."""
    if isinstance(value, Tensor):
        return value.to(like.device).reshape((-1, 1) + (1,) * like.dim())
    return value


def aligned(offset: int | Tensor | None, like: Tensor, n: int, m: int) -> int | Tensor:
    """Give the offset of the diagonal; `None` aligns the last row with the last key."""
    return per_item(m - n if offset is None else offset, like)


def pick(values: Tensor, at: Tensor) -> Tensor:
    """Take `values` (X,) or (B, X) at the positions `at`: the shape of `at`, or (B, 1, and that shape)."""
    found = values.to(at.device)[..., at]
    return found.unsqueeze(1) if values.dim() == 2 else found


def spread(result: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Expand a result that depends on `i` or `j` alone to every pair."""
    return result.expand(joint(result.shape, i.shape, j.shape))


def joint(*shapes: Sequence[int]) -> torch.Size:
    """Give the shape that the shapes broadcast to; torch.broadcast_shapes would import half a second of algebra."""
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for at, size in enumerate(reversed(shape), 1):
            if size != 1 and result[-at] not in (1, size):
                raise ShapeError(f"shapes {', '.join(str(tuple(s)) for s in shapes)} do not broadcast")
            result[-at] = result[-at] if size == 1 else size
    return torch.Size(result)
