"""Tensors as the copy engine takes them: base, sizes, strides, and how a block of them lies in shared memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["KINDS", "describable", "described", "in_a_row", "of_matrix"]

KINDS = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


def describable(x: Tensor) -> bool:
    """Whether a tensor (L, H, N, D) can be described: unit stride, the others multiples of 16 bytes."""
    a, b, c, _ = _strides(x)
    unit = 16 // x.element_size()
    aligned = not (a % unit or b % unit or c % unit or x.data_ptr() % 16)
    return aligned and x.stride(3) == 1 and min(a, b, c) > 0


def described(x: Tensor, rows: int, *widths: int) -> tuple[Any, ...]:
    """A tensor (L, H, N, D) in blocks of `rows` and each of the widths; None for a width of 0."""
    blocks = (None if width == 0 else (1, 1, rows, width) for width in widths)
    return tuple(None if block is None else _of(x, _strides(x), block) for block in blocks)


def in_a_row(x: Tensor | None, size: int) -> Any:
    """Numbers one behind the other, in blocks of `size`."""
    return None if x is None else TensorDescriptor(x, [x.numel()], [1], [size], _layout((size,), x.dtype))


def of_matrix(x: Tensor, rows: int) -> Any:
    """A matrix in blocks of `rows`."""
    return _of(x, list(x.stride()), (rows, x.shape[1]))


def _of(x: Tensor, strides: list[int], block: tuple[int, ...]) -> Any:
    return TensorDescriptor(x, list(x.shape), strides, list(block), _layout(block, x.dtype))


def _strides(x: Tensor) -> list[int]:
    """Strides; where there is one of a kind, its stride says nothing, and one that the copy engine takes stands for it."""
    (a, b, c, _), (items, heads, rows, width) = x.stride(), x.shape
    spare = 8 * max(1, -(-width // 8))
    return [a if items > 1 else spare, b if heads > 1 else spare, c if rows > 1 else spare, 1]


@lru_cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), KINDS[dtype])
