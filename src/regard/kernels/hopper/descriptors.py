"""TMA descriptors: base, sizes and strides of a tensor, and the layout of its blocks in shared memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...compat.gluon import TensorDescriptor

__all__ = ["GLUON_DTYPES", "describable", "descriptors", "matrix_descriptor", "vector_descriptor"]

GLUON_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


def describable(x: Tensor) -> bool:
    """Whether TMA can describe a tensor (L, H, N, D): unit stride, the others multiples of 16 bytes."""
    batch, head, row, _ = _strides(x)
    unit = 16 // x.element_size()
    aligned = not (batch % unit or head % unit or row % unit or x.data_ptr() % 16)
    return aligned and x.stride(3) == 1 and min(batch, head, row) > 0


def descriptors(x: Tensor, rows: int, *widths: int) -> tuple[Any, ...]:
    """One descriptor of a tensor (L, H, N, D) per width, in blocks of `rows` × width; None for a width of 0."""
    blocks = (None if width == 0 else (1, 1, rows, width) for width in widths)
    return tuple(None if block is None else _descriptor(x, _strides(x), block) for block in blocks)


def vector_descriptor(x: Tensor | None, size: int) -> Any:
    """A descriptor of contiguous numbers, in blocks of `size`."""
    return None if x is None else TensorDescriptor(x, [x.numel()], [1], [size], _layout((size,), x.dtype))


def matrix_descriptor(x: Tensor, rows: int) -> Any:
    """A descriptor of a matrix, in blocks of `rows`."""
    return _descriptor(x, list(x.stride()), (rows, x.shape[1]))


def _descriptor(x: Tensor, strides: list[int], block: tuple[int, ...]) -> Any:
    return TensorDescriptor(x, list(x.shape), strides, list(block), _layout(block, x.dtype))


def _strides(x: Tensor) -> list[int]:
    """Strides. A dimension of size 1 may have any stride; substitute one that TMA accepts."""
    (batch, head, row, _), (items, heads, rows, width) = x.stride(), x.shape
    spare = 8 * max(1, -(-width // 8))
    return [batch if items > 1 else spare, head if heads > 1 else spare, row if rows > 1 else spare, 1]


@lru_cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype])
