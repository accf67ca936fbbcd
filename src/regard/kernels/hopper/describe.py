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
    torch.int32: gl.int32,
}


def describable(x: Tensor) -> bool:
    """Whether a tensor (L, H, N, D) can be described: unit stride, the others multiples of 16 bytes."""
    size = x.element_size()
    aligned = all(s % 16 == 0 and s > 0 for s in (size * s for s in _strides(x)[:3]))
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and aligned


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
    spare = 8 * max(1, -(-x.shape[3] // 8))
    return [s if n > 1 else spare for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)] + [1]


@lru_cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), KINDS[dtype])
