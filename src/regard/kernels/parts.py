"""What kernels are given besides queries, keys and values: small structures of tensors and numbers."""

from __future__ import annotations

import os
from typing import NamedTuple

from torch import Tensor

__all__ = ["ALIBI", "INTERPRETED", "PLAIN", "RELATIVE", "TENSOR", "Added", "Dropped", "Strides"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs its kernels in Python; it reads this once, too
PLAIN, TENSOR, ALIBI, RELATIVE = 0, 1, 2, 3  # kinds of bias


class Added(NamedTuple):
    """A bias: a tensor with strides, or the slopes or the table of a structured one."""

    at: Tensor | None = None
    item: int = 0  # strides; 0 where it is broadcast
    head: int = 0
    row: int = 0
    key: int = 0
    offset: int = 0  # of a structured bias: row i stands at key i + offset
    reach: int = 0  # of a table: the distance from which on all are alike


class Dropped(NamedTuple):
    """Dropout: a 64-bit key a row, the bound that a pair's number must reach, and what the kept are divided by."""

    keys: Tensor | None = None  # int64 (L, H, N)
    bound: int = 0
    factor: float = 1.0


class Strides(NamedTuple):
    """Strides of query, key, value and output in numbers."""

    q_item: int
    q_head: int
    q_row: int
    q_dim: int
    k_item: int
    k_head: int
    k_row: int
    k_dim: int
    v_item: int
    v_head: int
    v_row: int
    v_dim: int
    o_item: int
    o_head: int
    o_row: int
