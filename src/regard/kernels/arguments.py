"""One problem as kernels take it: tensors, numbers and a block mask; no scores, no masks, no modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.triton import INTERPRETED
from ..core.rows import Rows
from .block_lists import BITS, NONE, BlockLists
from .block_mask import BlockMask
from .launch_cache import Shortcuts
from .pointwise import PointwiseArgs, PointwiseKernel
from .portable.configs import WHOLE, Chip, Config, chip_of, config, padded, shrink, split

__all__ = [
    "BIAS_ALIBI", "BIAS_NONE", "BIAS_RELATIVE", "BIAS_TENSOR", "NO_ENTROPY", "PREPROCESS_ROWS", "BackwardRows", "BackwardStrides", "BiasArgs",
    "DoubleBackwardRows", "DoubleBackwardStrides", "DropoutArgs", "Gradients", "KernelArgs", "MatrixStrides", "PassArgs", "RowStatsArgs",
    "ScoreArgs", "Sizes", "Strides", "TangentArgs", "Tangents", "matrix_strides", "takes_tma",
]  # fmt: skip


BIAS_NONE, BIAS_TENSOR, BIAS_ALIBI, BIAS_RELATIVE = 0, 1, 2, 3
NO_ENTROPY: Any = None  # of calls that are not observed
PREPROCESS_ROWS = 64  # rows of a program that prepares a backward pass
NO_FUNCTION = {"POINTWISE": False, "VALUE": None, "SLOPED": False, "SLOPE": None, "BOUNDED": False}


class BiasArgs(NamedTuple):
    """A bias: a tensor with strides, or the slopes or the table of a structured one."""

    at: Tensor | None = None
    item: int = 0  # strides; 0 where it is broadcast
    head: int = 0
    row: int = 0
    key: int = 0
    offset: int = 0  # if structured: row i stands at key i + offset
    reach: int = 0  # of a table: the distance from which on all entries are the same


class DropoutArgs(NamedTuple):
    """Dropout: a 64-bit key per row, the bound that a pair's number must reach, and what kept weights are multiplied by."""

    keys: Tensor | None = None  # int64 (L, H, N)
    bound: int = 0
    factor: float = 1.0


class ScoreArgs(NamedTuple):
    """What makes logits of products, or of the additive score."""

    scale: float
    scales: Tensor | None  # float32 (H,), instead of scale
    cap: float  # 0 if there is none
    bias: BiasArgs
    vector: Tensor | None  # float32 (D,), of the additive score
    pointwise: PointwiseArgs | None


class Sizes(NamedTuple):
    """The sizes of a problem. Launches pass each on its own: Triton compiles for the values of integers in tuples."""

    n: int
    m: int
    heads: int  # of the queries
    groups: int  # query heads that share a key head


class Strides(NamedTuple):
    """Strides of query, key, value and output in numbers."""

    q_batch: int
    q_head: int
    q_row: int
    q_dim: int
    k_batch: int
    k_head: int
    k_row: int
    k_dim: int
    v_batch: int
    v_head: int
    v_row: int
    v_dim: int
    o_batch: int
    o_head: int
    o_row: int


class MatrixStrides(NamedTuple):
    """Strides of one tensor in numbers."""

    batch: int
    head: int
    row: int
    dim: int


class RowStatsArgs(NamedTuple):
    """What a backward kernel reads of each row: float32 (L, H, N) each."""

    row_max: Tensor
    log_row_sum: Tensor
    delta: Tensor
    g_entropy: Tensor | None
    mean: Tensor | None
    packed: Tensor | None = None  # these folded, as `pack_row_stats` has them


class BackwardRows(NamedTuple):
    """What a backward pass gets for each row, with the sink's share already included."""

    dO: Tensor  # (L, H, N, E)
    row_max: Tensor  # (L, H, N): the largest logit; lse unless numbers are float32
    log_row_sum: Tensor  # lse above it
    delta: Tensor
    g_entropy: Tensor | None
    mean: Tensor | None  # E[S] above lse; above the largest logit in float32
    empty: Tensor  # int32 (L, H, blocks of PREPROCESS_ROWS): whether one of the rows sees nothing

    @property
    def stats(self) -> RowStatsArgs:
        return RowStatsArgs(self.row_max, self.log_row_sum, self.delta, self.g_entropy, self.mean)


class Gradients(NamedTuple):
    """Gradients of queries (float32 and not yet scaled if scales are a tensor), keys, values and the additive score's vector."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    vector: Tensor | None = None


class Tangents(NamedTuple):
    """The tangents of a problem's tensors; None for a tensor without one."""

    query: Tensor | None = None  # of the shapes and dtypes of their tensors
    key: Tensor | None = None
    value: Tensor | None = None
    scales: Tensor | None = None  # float32 (H,)
    bias: BiasArgs = BiasArgs()

    @property
    def strides(self) -> Strides:
        query, key, value = (matrix_strides(x) for x in (self.query, self.key, self.value))
        return Strides(*query, *key, *value, 0, 0, 0)


class DoubleBackwardRows(NamedTuple):
    """What the tangent of a backward pass gets for each row: float32 (L, H, N) each, the tangents named `_dot`."""

    row_max: Tensor  # the largest logit; lse unless numbers are float32
    log_row_sum: Tensor
    delta: Tensor
    delta_dot: Tensor
    lse_dot: Tensor
    g_entropy: Tensor | None = None
    g_entropy_dot: Tensor | None = None
    mean: Tensor | None = None  # E[S] as in BackwardRows
    mean_dot: Tensor | None = None


class BackwardStrides(NamedTuple):
    """Strides of query, key, value and output, and of dO."""

    x: Strides
    do: MatrixStrides


class DoubleBackwardStrides(NamedTuple):
    """Strides of query, key and value, of dO, and of their tangents."""

    x: Strides
    x_dot: Strides
    do: MatrixStrides
    do_dot: MatrixStrides


class PassArgs(NamedTuple):
    """What every kernel reads apart from its matrices and sizes."""

    strides: Strides | BackwardStrides | DoubleBackwardStrides
    score: ScoreArgs
    blocks: BlockLists
    dropout: DropoutArgs


class TangentArgs(NamedTuple):
    """What a jvp reads of the tangents, apart from matrices."""

    strides: Strides
    scales: Tensor | None
    bias: BiasArgs


@dataclass(eq=False)
class KernelArgs:
    """Attention of query (L, H, N, D) to key (L, K, M, D) and value (L, K, M, E); H a multiple of K, any strides.

    The additive score has a `vector` (D,); then query and key are the projections that it adds up, of the same shapes.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    block_mask: BlockMask
    scale: float = 1.0
    scales: Tensor | None = None  # float32 (H,), instead of scale
    softcap: float | None = None
    kind: int = BIAS_NONE  # of the bias
    bias: BiasArgs = field(default_factory=BiasArgs)
    drop: DropoutArgs = field(default_factory=DropoutArgs)
    sink: Tensor | None = None  # float32 (H,)
    vector: Tensor | None = None  # float32 (D,)
    pointwise: PointwiseKernel | None = None  # a function of the scores
    shortcuts: Shortcuts | None = None  # of calls whose sizes, dtypes and numbers are known to be the same

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

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """All that decides which kernels run and how they are started: what is here twice starts the same launches.

        Addresses count by their last bits: TMA and Triton ask whether they are multiples of 16.
        """
        q, k, v, sink, scales, bias, drop = self.query, self.key, self.value, self.sink, self.scales, self.bias, self.drop
        addresses = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15, None if sink is None else sink.data_ptr() & 15
        if self.shortcuts is not None:
            strides = q.stride(), k.stride(), v.stride()  # hooks on saved tensors may change them
            return self.shortcuts, self.block_mask.kind, self.block_mask.narrow, *addresses, *strides, torch.backends.cuda.matmul.allow_tf32
        made: tuple[Any, ...] = (
            q.device, q.dtype, k.dtype, v.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), addresses, self.scale,
            self.softcap, self.block_mask.kind, self.block_mask.narrow, self.kind,
        )  # fmt: skip
        if bias.at is not None:
            made += bias[1:], bias.at.dtype, bias.at.data_ptr() & 15
        if self.pointwise is not None:
            made += (self.pointwise.key,)
        if scales is not None or drop.keys is not None or self.vector is not None:
            made += (scales is None, drop[1:], drop.keys is None, self.vector is None)
        return made if q.dtype != torch.float32 else (*made, torch.backends.cuda.matmul.allow_tf32)

    @property
    def variant(self) -> tuple[Any, ...]:
        """What kernels are compiled for, about: sizes are left out."""
        q, k, v = self.query, self.key, self.value
        mask, function = self.block_mask, None if self.pointwise is None else self.pointwise.key
        kinds = mask.kind, mask.narrow, self.softcap is None, self.sink is None, self.scales is None, self.groups > 1, function
        bias = self.kind, None if self.bias.at is None else self.bias.at.dtype
        return q.device, q.dtype, q.shape[3], v.shape[3], *kinds, *bias, *(x.stride(3) == 1 for x in (q, k, v))

    @property
    def wide(self) -> bool:
        """Whether a dim is above 256: no program holds both dK and dV, and passes with tangents have no kernel."""
        return max(self.query.shape[3], self.value.shape[3]) > 256

    def new_rows(self, entropy: bool) -> Rows:
        """Uninitialised results."""
        shape = self.query.shape[:3]
        output = self.value.new_empty(*shape, self.value.shape[3])
        lse, row_max, log_row_sum = (self.query.new_empty(shape, dtype=torch.float32) for _ in range(3))
        return Rows(output, lse, torch.empty_like(lse) if entropy else NO_ENTROPY, row_max, log_row_sum)

    @property
    def fast(self) -> bool:
        """Whether the logits are the products times one positive number."""
        return (
            self.scales is None
            and self.scale > 0
            and self.softcap is None
            and self.kind == BIAS_NONE
            and self.vector is None
            and self.pointwise is None
        )

    @property
    def exact(self) -> bool:
        """Whether exponents keep all digits of float32."""
        return self.query.element_size() == 4

    def config(self, direction: str) -> Config:
        """The tile of a direction on this chip."""
        return config(*self._tile(direction))

    def shrink(self, direction: str) -> bool:
        """Take a smaller tile from now on; False if there is none."""
        return shrink(*self._tile(direction))

    def _tile(self, direction: str) -> tuple[str, Chip, int, int, bool, bool, bool]:
        """What the tile of a direction depends on."""
        size = max(self.query.element_size(), self.value.element_size())
        dim = max(sum(split(self.query.shape[3])), padded(self.value.shape[3]))
        extras = self.kind != BIAS_NONE or self.drop.keys is not None
        if direction == "forward" and self.block_mask.kind == NONE:
            direction = "plain forward"
        function = self.pointwise is not None
        return direction, chip_of(self.query.device), size, dim, self.vector is not None, extras, function

    @cached_property
    def by_tma(self) -> bool:
        """Whether TMA can load blocks of q, k and v: the last stride 1, the others multiples of 16 bytes."""
        q, k, v = self.query, self.key, self.value
        plain = self.vector is None and q.shape[3] <= WHOLE
        return not INTERPRETED and plain and chip_of(q.device).tma and all(map(takes_tma, (q, k, v)))

    @property
    def ptx(self) -> bool:
        """Whether kernels may have instructions of NVIDIA's."""
        return not INTERPRETED and chip_of(self.query.device).name[0].isdigit()

    @property
    def by_span(self) -> bool:
        """Whether a pair is visible if its key is in its row's span: nothing else hides one."""
        return self.block_mask.kind != BITS and self.kind == BIAS_NONE and self.vector is None

    @cached_property
    def approximate(self) -> bool:
        """Whether the additive score may take the hardware's tanh."""
        return (
            self.value.element_size() == 2 and self.query.is_cuda and torch.version.hip is None and not INTERPRETED
        )

    @cached_property
    def precision(self) -> str:
        """How float32 is multiplied: in tf32 only if torch is allowed to; else to float32's rounding, by three tf32 products."""
        if torch.backends.cuda.matmul.allow_tf32:
            return "tf32"
        return "tf32x3" if self.query.is_cuda and torch.version.hip is None else "ieee"

    @cached_property
    def dims(self) -> dict[str, Any]:
        """The compile-time sizes of every kernel that reads values."""
        D, E = self.query.shape[3], self.value.shape[3]
        DP, DR = split(D)
        return {"D": D, "DV": E, "DP": DP, "DR": DR, "DVP": padded(E)}

    @cached_property
    def kinds(self) -> dict[str, Any]:
        """What a kernel is compiled for, apart from sizes; masks differ by kind alone."""
        return {
            "MASK": self.block_mask.kind,
            "BIAS": self.kind,
            "CAP": self.softcap is not None,
            "SCALES": self.scales is not None,
            "HIDDEN_DIM": self.query.shape[3] if self.vector is not None else 0,
            "APPROXIMATE": self.approximate,
            "PRECISION": self.precision,
            "MIXED_HEADS": False,
            "PTX": self.ptx,
            "BY_SPAN": False,
            **(NO_FUNCTION if self.pointwise is None else self.pointwise.kinds),
        }

    def strides(self, output: Tensor | None = None) -> Strides:
        tail = (0, 0, 0) if output is None else output.stride()[:3]
        return Strides(*self.query.stride(), *self.key.stride(), *self.value.stride(), *tail)

    def pass_args(self, blocks: BlockLists, strides: Strides | BackwardStrides | DoubleBackwardStrides) -> PassArgs:
        function = None if self.pointwise is None else self.pointwise.args
        score = ScoreArgs(self.scale, self.scales, self.softcap or 0.0, self.bias, self.vector, function)
        return PassArgs(strides, score, blocks, self.drop)

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers that no kernel is compiled for."""
        return Sizes(self.n, self.m, self.heads, self.groups)._asdict()

    def block_lists(self, c: Config, by_keys: bool = False) -> BlockLists:
        return (self.block_mask.by_keys if by_keys else self.block_mask.by_rows)(c.BM, c.BN)


def takes_tma(x: Tensor) -> bool:
    """Whether TMA can load a tensor."""
    size = x.element_size()
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 and s > 0 for s in x.stride()[:3])


def matrix_strides(x: Tensor | None) -> MatrixStrides:
    return MatrixStrides(0, 0, 0, 0) if x is None else MatrixStrides(x.stride(0), x.stride(1), x.stride(2), x.stride(3))
