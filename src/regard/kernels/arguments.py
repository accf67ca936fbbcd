"""One problem as the kernels take it: tensors, numbers, and the mask's layout; no scores, no masks, no modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.triton import INTERPRETED
from .block_lists import NONE, BlockLists, BlockMask
from .portable.configs import Config, config, hopper, padded

__all__ = ["BackwardRows", "DoubleBackwardRows", "KernelArgs", "Tangents"]


PLAIN, TENSOR, ALIBI, RELATIVE = 0, 1, 2, 3  # kinds of bias


class BiasArgs(NamedTuple):
    """A bias: a tensor with strides, or the slopes or the table of a structured one."""

    at: Tensor | None = None
    item: int = 0  # strides; 0 where it is broadcast
    head: int = 0
    row: int = 0
    key: int = 0
    offset: int = 0  # of a structured bias: row i stands at key i + offset
    reach: int = 0  # of a table: the distance from which on all are alike


class DropoutArgs(NamedTuple):
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


class BackwardRows(NamedTuple):
    """What a backward pass is given: of each row, with the sink's share already in them."""

    dO: Tensor  # (L, H, N, E)
    row_max: Tensor  # (L, H, N): the largest logit; lse where numbers are not float32
    log_row_sum: Tensor  # lse above it
    delta: Tensor
    g_entropy: Tensor | None
    mean: Tensor | None  # E[S] above lse; above the largest logit in float32


class Tangents(NamedTuple):
    """The tangents of a problem's tensors; None for what stands still."""

    query: Tensor | None = None  # of the shapes and dtypes of their tensors
    key: Tensor | None = None
    value: Tensor | None = None
    scales: Tensor | None = None  # float32 (H,)
    bias: BiasArgs = BiasArgs()

    @property
    def kinds(self) -> dict[str, Any]:
        moving = {"MOVES_Q": self.query, "MOVES_K": self.key, "MOVES_V": self.value}
        return {name: x is not None for name, x in moving.items()}

    @property
    def strides(self) -> Strides:
        query, key, value = (stride_of(x) for x in (self.query, self.key, self.value))
        return Strides(*query, *key, *value, 0, 0, 0)


class DoubleBackwardRows(NamedTuple):
    """What the tangent of a backward pass is given of each row: float32 (L, H, N) each, a dot for what moves."""

    row_max: Tensor  # the largest logit; lse where numbers are not float32
    log_row_sum: Tensor
    delta: Tensor
    delta_dot: Tensor
    u: Tensor  # the tangent of lse
    g: Tensor | None = None  # of the entropy
    g_dot: Tensor | None = None
    mean: Tensor | None = None  # E[S] as in Slopes
    mean_dot: Tensor | None = None


@dataclass(eq=False)
class KernelArgs:
    """Attention of query (L, H, N, D) to key (L, K, M, D) and value (L, K, M, E); H a multiple of K, any strides.

    For the additive score, `vector` (D,) is there, and query and key are what it adds up: (L, H, N, D), (L, K, M, D).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    block_mask: BlockMask
    scale: float = 1.0
    scales: Tensor | None = None  # float32 (H,), in the place of scale
    softcap: float | None = None
    kind: int = PLAIN  # of the bias
    bias: BiasArgs = field(default_factory=BiasArgs)
    drop: DropoutArgs = field(default_factory=DropoutArgs)
    sink: Tensor | None = None  # float32 (H,)
    vector: Tensor | None = None  # float32 (D,)

    @property
    def n(self) -> int:
        return self.query.shape[2]

    @property
    def m(self) -> int:
        return self.key.shape[2]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def groups(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @property
    def rows(self) -> tuple[int, int, int]:
        return (*self.query.shape[:2], self.n)

    @property
    def fast(self) -> bool:
        """Whether the logits are the products times one positive number."""
        return (
            self.scales is None
            and self.scale > 0
            and self.softcap is None
            and self.kind == PLAIN
            and self.vector is None
        )

    @property
    def exact(self) -> bool:
        """Whether exponents are told to all digits of float32."""
        return self.query.element_size() == 4

    def config(self, direction: str) -> Config:
        size = max(self.query.element_size(), self.value.element_size())
        dim = max(padded(self.query.shape[3]), padded(self.value.shape[3]))
        laden = self.kind != PLAIN or self.drop.keys is not None
        if direction == "forward" and self.block_mask.kind == NONE:
            direction = "plain forward"
        return config(direction, self.query.device, size, dim, self.vector is not None, laden)

    @cached_property
    def described(self) -> bool:
        """Whether the chip's copy engine can fetch blocks of q, k and v: unit stride, the others multiples of 16 bytes."""
        tensors = (self.query, self.key, self.value)
        return (
            not INTERPRETED and self.vector is None and hopper(self.query.device) and all(map(describable, tensors))
        )

    @cached_property
    def approximate(self) -> bool:
        return (
            self.value.element_size() == 2 and self.query.is_cuda and torch.version.hip is None and not INTERPRETED
        )

    @cached_property
    def precision(self) -> str:
        """How float32 is multiplied: in tf32 only if torch may; else to float32's rounding, by three products of tf32."""
        if torch.backends.cuda.matmul.allow_tf32:
            return "tf32"
        return "tf32x3" if self.query.is_cuda and torch.version.hip is None else "ieee"

    @cached_property
    def dims(self) -> dict[str, Any]:
        """The compile-time sizes of every kernel that knows values."""
        D, E = self.query.shape[3], self.value.shape[3]
        return {"D": D, "DV": E, "DP": padded(D), "DVP": padded(E)}

    @cached_property
    def kinds(self) -> dict[str, Any]:
        """What a kernel is compiled for, apart from sizes; a mask has only its kind in it."""
        return {
            "MASK": self.block_mask.kind,
            "BIAS": self.kind,
            "CAP": self.softcap is not None,
            "SCALES": self.scales is not None,
            "HIDDEN": self.query.shape[3] if self.vector is not None else 0,
            "APPROXIMATE": self.approximate,
            "PRECISION": self.precision,
        }

    def strides(self, output: Tensor | None = None) -> Strides:
        tail = (0, 0, 0) if output is None else output.stride()[:3]
        return Strides(*self.query.stride(), *self.key.stride(), *self.value.stride(), *tail)

    def where(self, blocks: Config, turned: bool = False) -> BlockLists:
        return (self.block_mask.by_keys if turned else self.block_mask.by_rows)(blocks.BM, blocks.BN)


def describable(x: Tensor) -> bool:
    """Whether a tensor can be described to the copy engine."""
    size = x.element_size()
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 and s > 0 for s in x.stride()[:3])


def stride_of(x: Tensor | None) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2), x.stride(3))
