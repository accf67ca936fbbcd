"""From tensors to tensors by the portable kernels: each function allocates results, starts its kernels and returns them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...core.rows import Rows
from .. import launch_cache
from ..arguments import (
    BIAS_ALIBI,
    BIAS_NONE,
    BIAS_RELATIVE,
    NO_ENTROPY,
    PREPROCESS_ROWS,
    BackwardRows,
    BackwardStrides,
    DoubleBackwardRows,
    DoubleBackwardStrides,
    Gradients,
    KernelArgs,
    TangentArgs,
    Tangents,
    matrix_strides,
    takes_tma,
)
from . import bias_gradient as bias_kernels
from .aggregates import Constants, constants
from .backward import backward_dkdv as backward_dkdv_kernel
from .backward import backward_dq as backward_dq_kernel
from .backward import backward_preprocess as backward_preprocess_kernel
from .backward import pack_row_stats
from .configs import Config, padded
from .decode import decode_merge, decode_split
from .double_backward import double_backward_dkdv, double_backward_dq
from .forward import forward as forward_kernel
from .jvp import jvp as jvp_kernel
from .tile_ops import PACK

__all__ = [
    "backward", "backward_preprocess", "bias_gradient", "by_tma", "decodes", "double_backward", "forward", "jvp", "options_of",
    "preprocess_key", "with_smaller_tiles",
]  # fmt: skip

_FEW_ROWS = 64  # that share a key head and fit one tile
_MORE_ROWS = 256  # for which splitting pays where dims are wide, and so tiles few
_MANY_KEYS = 1024  # for which splitting them pays

P = ParamSpec("P")
R = TypeVar("R")
Pass = Callable[Concatenate[KernelArgs, P], R]


def with_smaller_tiles(direction: str) -> Callable[[Pass[P, R]], Pass[P, R]]:
    """Let a pass take smaller tiles of a direction, as long as the chip refuses its launch for lack of resources."""

    def decorated(function: Pass[P, R]) -> Pass[P, R]:
        @wraps(function)
        def wrapped(w: KernelArgs, /, *args: P.args, **kwargs: P.kwargs) -> R:
            while True:
                try:
                    return function(w, *args, **kwargs)
                except triton.OutOfResources:
                    if not w.shrink(direction):
                        raise

        return wrapped

    return decorated


def decodes(w: KernelArgs) -> bool:
    """Whether rows are few and keys many, so that the keys are split."""
    few = _MORE_ROWS if w.wide else _FEW_ROWS
    return w.vector is None and w.groups * w.n <= few and w.m >= _MANY_KEYS


def forward(w: KernelArgs, entropy: bool) -> Rows:
    """The forward pass."""
    return _decode(w, entropy) if decodes(w) else _forward(w, entropy)


@with_smaller_tiles("forward")
def _forward(w: KernelArgs, entropy: bool) -> Rows:
    out = w.new_rows(entropy)
    key = ("forward", entropy, w.signature)
    launch = launch_cache.find(key)
    c = w.config("forward") if launch is None else launch.about
    tensors = {
        "q": w.query, "k": w.key, "v": w.value, "out": out, "args": w.pass_args(w.block_lists(c), w.strides(out.output)), "sinks": w.sink,
    }  # fmt: skip
    if launch is not None:
        launch.again(**tensors)
        return out
    L, H, N = w.rows
    row_blocks = triton.cdiv(N, c.BM)
    parts = 1 if not c.columns or w.dims["DV"] % c.columns else w.dims["DV"] // c.columns
    columns = w.dims["DVP"] if parts == 1 else c.columns
    q, k, v = by_tma(w.by_tma, (w.query, w.key, w.value), (c.BM, c.BN, c.BN), (w.dims["DP"], w.dims["DP"], columns))
    C = _constants(w, c, FAST=w.fast, ENTROPY=entropy, SINK=w.sink is not None, TMA=w.by_tma, DVP=columns, PARTS=parts)
    arguments = {**tensors, "q": q, "k": k, "v": v, **w.sizes, "row_blocks": row_blocks, "C": C}
    launch_cache.start(key, forward_kernel, row_blocks * parts * L * H, arguments, options_of(c), tensors, c)
    return out


class Partials(NamedTuple):
    """What the splits of the keys leave for each row."""

    output: Tensor  # float32 (L, splits, H, N, E)
    stats: Tensor  # float32 (3, L, splits, H, N): m, l, e


@with_smaller_tiles("decode")
def _decode(w: KernelArgs, entropy: bool) -> Rows:
    """The forward pass with split keys."""
    out = w.new_rows(entropy)
    L, H, N = w.rows
    E = w.value.shape[3]
    length = split_length(w.m)
    splits = triton.cdiv(w.m, length)
    partials = Partials(out.lse.new_empty(L, splits, H, N, E), out.lse.new_empty(3, L, splits, H, N))
    args, strides = w.pass_args(w.block_mask.by_rows(128, 128), w.strides()), w.strides(out.output)
    split = {"q": w.query, "k": w.key, "v": w.value, "partials": partials, "args": args}
    merge = {"partials": partials, "out": out, "strides": strides, "sinks": w.sink, "dropout": w.drop}
    split_key, merge_key = ("decode split", entropy, w.signature), ("decode merge", entropy, w.signature)
    launches = launch_cache.find(split_key), launch_cache.find(merge_key)
    if launches[0] is not None and launches[1] is not None:
        launches[0].again(**split)
        launches[1].again(**merge)
        return out
    c = w.config("decode")
    c = c._replace(BM=min(c.BM, padded(w.groups * N)))
    count, tiles = partials.stats.stride(0), triton.cdiv(w.groups * N, c.BM)
    k, v = by_tma(w.by_tma, (w.key, w.value), (c.BN, c.BN))
    C = _constants(w, c, FAST=w.fast, ENTROPY=entropy, TMA=w.by_tma, MIXED_HEADS=True)
    arguments = {**split, "k": k, "v": v, **w.sizes, "length": length, "count": count, "key_blocks": triton.cdiv(w.m, 128), "C": C}
    launch_cache.start(split_key, decode_split, splits * tiles * L * w.key.shape[1], arguments, options_of(c), split)
    sink, largest = w.sink is not None, max(2, 1 << (splits - 1).bit_length())
    C = constants(DV=E, DVP=w.dims["DVP"], SPLITS=largest, FAST=w.fast, ENTROPY=entropy, SINK=sink)
    arguments = {**merge, "n": N, "heads": H, "splits": splits, "count": count, "C": C}
    launch_cache.start(merge_key, decode_merge, N * L * H, arguments, {"num_warps": 1, "enable_fp_fusion": True}, merge)
    return out


def split_length(keys: int) -> int:
    """The keys of one split: by their number alone, so that no result depends on its batch."""
    return 2048 if keys >= 16384 else 512 if keys >= 4096 else 256


@with_smaller_tiles("jvp")
def jvp(w: KernelArgs, tangents: Tangents, entropy: bool) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    """The forward pass, and the tangents of output, lse and entropy. A sink is not included."""
    L, H, N = w.rows
    out = w.new_rows(entropy)
    d_entropy = (torch.empty_like if entropy else torch.zeros_like)(out.lse)
    if not entropy:
        out = out._replace(entropy=torch.zeros_like(out.lse))
    d_out = Rows(torch.empty_like(out.output), torch.empty_like(out.lse), d_entropy)
    c = w.config("jvp")
    row_blocks = triton.cdiv(N, c.BM)
    tensors = (w.query, w.key, w.value, *tangents[:3])
    tma = _all_take_tma(w, tensors)
    C = _constants(
        w, c, FAST=w.fast and tangents.scales is None, ENTROPY=entropy, SINK=False, TMA=tma,
        BIAS_DOT=BIAS_NONE if tangents.bias.at is None else w.kind,
    )  # fmt: skip
    jvp_kernel[(row_blocks * L * H,)](
        *by_tma(tma, tensors, (c.BM, c.BN, c.BN) * 2), out, d_out, w.pass_args(w.block_lists(c), w.strides(out.output)),
        TangentArgs(tangents.strides, tangents.scales, tangents.bias), **w.sizes, row_blocks=row_blocks, C=C, **options_of(c),
    )  # fmt: skip
    return out, (d_out.output, d_out.lse, d_out.entropy)


def backward_preprocess(w: KernelArgs, found: Rows, dO: Tensor, g_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """δ = Σ dO ∘ O − g_lse of each row, lse in the units of the kernels' exponents, and whether a block of rows has one that sees nothing."""
    L, H, N = w.rows
    delta, lse = torch.empty_like(found.lse), torch.empty_like(found.lse)
    empty = torch.empty(L, H, triton.cdiv(N, PREPROCESS_ROWS), dtype=torch.int32, device=delta.device)
    tensors = {"do": dO, "g_lse": g_lse, "out": found._replace(entropy=NO_ENTROPY), "delta": delta, "lse": lse, "empty": empty}
    key = preprocess_key(w, dO, found.output, g_lse)
    launch = launch_cache.find(key)
    if launch is not None:
        launch.again(**tensors)
    else:
        C = constants(DV=w.dims["DV"], DVP=w.dims["DVP"], BM=PREPROCESS_ROWS, FAST=w.fast)
        strides = BackwardStrides(w.strides(found.output), matrix_strides(dO))
        arguments = {**tensors, "strides": strides, "n": N, "heads": H, "C": C}
        launch_cache.start(key, backward_preprocess_kernel, triton.cdiv(N, PREPROCESS_ROWS) * L * H, arguments, {"enable_fp_fusion": True}, tensors)
    return delta, lse, empty


def preprocess_key(w: KernelArgs, dO: Tensor, output: Tensor, g_lse: Tensor | None) -> tuple[Any, ...]:
    """The key of this launch in the cache."""
    return "preprocess", g_lse is None, dO.dtype, dO.data_ptr() & 15, dO.stride(), output.stride(), w.signature


def backward(w: KernelArgs, rows: BackwardRows, queries: bool, keys: bool) -> Gradients:
    """The wanted gradients, of queries or of keys and values."""
    dq, vector = _backward_dq(w, rows) if queries else (None, None)
    dk, dv = None, None
    if keys and w.wide:  # no program holds both
        dk, dv = _backward_dkdv(w, rows, dk=True).dk, _backward_dkdv(w, rows, dv=True).dv
    elif keys:
        _, dk, dv, _ = _backward_dkdv(w, rows, dk=True, dv=True)
    return Gradients(dq, dk, dv, vector)


@with_smaller_tiles("dkdv")
def _backward_dkdv(w: KernelArgs, rows: BackwardRows, dk: bool = False, dv: bool = False) -> Gradients:
    """dK (of what the kernel multiplies with) and dV, or one of them."""
    L, K, M, D = w.key.shape
    grads = Gradients(
        dk=w.key.new_empty(L, K, M, D, dtype=torch.float32 if w.vector is not None else w.key.dtype) if dk else None,
        dv=w.value.new_empty(w.value.shape) if dv else None,
    )
    key, launch, c, tensors = _backward_launch(w, rows, "dkdv", grads)
    packed = _packs(w)
    if packed:
        tensors["stats"] = rows.stats._replace(packed=_packed(w, rows))
    if launch is None:
        arguments, tma = _backward_arguments(w, rows, c, tensors)
        C = _constants(
            w, c, FAST=w.fast, EXACT=w.exact, ENTROPY=rows.g_entropy is not None, TMA=tma, GROUPED=w.groups > 1, WANTS_DK=dk, WANTS_DV=dv,
            PACKED=packed, BY_SPAN=w.by_span,
        )  # fmt: skip
        arguments |= {**w.sizes, "C": C}
        launch_cache.start(key, backward_dkdv_kernel, triton.cdiv(M, c.BN) * L * K, arguments, options_of(c), tensors, c)
    else:
        launch.again(**tensors)
    return grads


def _packs(w: KernelArgs) -> bool:
    """Whether what `backward_dkdv` reads of rows is packed first."""
    return w.ptx and not w.exact and w.vector is None


def _packed(w: KernelArgs, rows: BackwardRows) -> Tensor:
    """What `backward_dkdv` reads of each row: float32 (L · H, N padded, 4)."""
    L, H, N = w.rows
    blocks = triton.cdiv(N, PACK.value)
    out = rows.delta.new_empty(L * H, blocks * PACK.value, 4)
    tensors = {"stats": rows.stats, "out": out}
    key = ("packed rows", rows.g_entropy is None, w.signature)
    launch = launch_cache.find(key)
    if launch is not None:
        launch.again(**tensors)
        return out
    C = constants(FAST=w.fast, EXACT=False, ENTROPY=rows.g_entropy is not None)
    launch_cache.start(key, pack_row_stats, blocks * L * H, {**tensors, "n": N, "C": C}, {"enable_fp_fusion": True}, tensors)
    return out


def _backward_launch(w: KernelArgs, rows: BackwardRows, direction: str, grads: Gradients) -> tuple[Any, Any, Config, dict[str, Any]]:
    """A backward kernel's key, its launch if it was started before, its config, and the arguments that hold tensors."""
    wanted = [x is not None for x in grads]
    key = (direction, *wanted, rows.g_entropy is None, rows.dO.dtype, rows.dO.stride(), rows.dO.data_ptr() & 15, w.signature)
    launch = launch_cache.find(key)
    c = w.config(direction) if launch is None else launch.about
    args = w.pass_args(w.block_lists(c, by_keys=direction == "dkdv"), _backward_strides(w, rows))
    tensors = {"q": w.query, "k": w.key, "v": w.value, "do": rows.dO, "out": grads, "stats": rows.stats, "args": args}
    return key, launch, c, tensors


def _backward_arguments(w: KernelArgs, rows: BackwardRows, c: Config, tensors: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """These arguments with TMA descriptors where TMA can load, and whether it can."""
    matrices = (w.query, w.key, w.value, rows.dO)
    tma = _all_take_tma(w, matrices)
    described = by_tma(tma, matrices, (c.BM, c.BN, c.BN, c.BM))
    return {**tensors, **dict(zip(("q", "k", "v", "do"), described, strict=True))}, tma


@with_smaller_tiles("dq")
def _backward_dq(w: KernelArgs, rows: BackwardRows) -> tuple[Tensor, Tensor | None]:
    """dQ, in float32 and not yet scaled if scales are a tensor; and for the additive score d vector."""
    L, H, N = w.rows
    exact = w.scales is not None or w.vector is not None
    dq = w.query.new_empty(w.query.shape, dtype=torch.float32 if exact else w.query.dtype)
    dw = torch.empty_like(dq) if w.vector is not None else None
    key, launch, c, tensors = _backward_launch(w, rows, "dq", Gradients(dq=dq, vector=dw))
    if launch is None:
        row_blocks = triton.cdiv(N, c.BM)
        arguments, tma = _backward_arguments(w, rows, c, tensors)
        C = _constants(w, c, FAST=w.fast, EXACT=w.exact, ENTROPY=rows.g_entropy is not None, TMA=tma, BY_SPAN=w.by_span)
        arguments |= {**w.sizes, "row_blocks": row_blocks, "C": C}
        launch_cache.start(key, backward_dq_kernel, row_blocks * L * H, arguments, options_of(c), tensors, c)
    else:
        launch.again(**tensors)
    return dq, None if dw is None else dw.sum((0, 1, 2))


def double_backward(
    w: KernelArgs, tangents: Tangents, dO: Tensor, dO_dot: Tensor | None, rows: DoubleBackwardRows, needs: tuple[bool, ...]
) -> Gradients:
    """The tangents of dQ, dK and dV, the last two together. Scales are numbers, biases have no tangent, no sink."""
    dq = None
    if needs[0]:
        direction = "double dq" if dO_dot is None else "double dq, all"
        dq = with_smaller_tiles(direction)(_double_backward_dq)(w, tangents, dO, dO_dot, rows, direction)
    dk, dv = _double_backward_dkdv(w, tangents, dO, dO_dot, rows) if needs[1] or needs[2] else (None, None)
    return Gradients(dq, dk, dv)


def _double_arguments(
    w: KernelArgs, tangents: Tangents, dO: Tensor, dO_dot: Tensor | None, rows: DoubleBackwardRows
) -> tuple[tuple[Tensor | None, ...], DoubleBackwardStrides, dict[str, Any]]:
    """The tensors of a double backward, their strides, and what its kernels are compiled for."""
    strides = DoubleBackwardStrides(w.strides(), tangents.strides, matrix_strides(dO), matrix_strides(dO_dot))
    tensors = (w.query, w.key, w.value, dO, *tangents[:3], dO_dot)
    tma = _all_take_tma(w, tensors)
    kinds: dict[str, Any] = {"FAST": w.fast, "EXACT": w.exact, "ENTROPY": rows.g_entropy is not None, "TMA": tma}
    kinds |= {"CURVED": False, "CURVE": None} if w.pointwise is None else w.pointwise.second_kinds
    return tensors, strides, kinds


def _double_backward_dq(
    w: KernelArgs, tangents: Tangents, dO: Tensor, dO_dot: Tensor | None, rows: DoubleBackwardRows, direction: str
) -> Tensor:
    L, H, N = w.rows
    tensors, strides, more = _double_arguments(w, tangents, dO, dO_dot, rows)
    c, dq = w.config(direction), w.query.new_empty(w.query.shape)
    row_blocks = triton.cdiv(N, c.BM)
    double_backward_dq[(row_blocks * L * H,)](
        *by_tma(more["TMA"], tensors, (c.BM, c.BN, c.BN, c.BM) * 2), Gradients(dq=dq), rows, w.pass_args(w.block_lists(c), strides),
        **w.sizes, row_blocks=row_blocks, C=_constants(w, c, **more), **options_of(c),
    )  # fmt: skip
    return dq


@with_smaller_tiles("double dkdv")
def _double_backward_dkdv(
    w: KernelArgs, tangents: Tangents, dO: Tensor, dO_dot: Tensor | None, rows: DoubleBackwardRows
) -> tuple[Tensor, Tensor]:
    L, K, M = w.key.shape[:3]
    tensors, strides, more = _double_arguments(w, tangents, dO, dO_dot, rows)
    c = w.config("double dkdv")
    dk, dv = w.key.new_empty(w.key.shape), w.value.new_empty(w.value.shape)
    C = _constants(w, c, GROUPED=w.groups > 1, WANTS_DK=True, WANTS_DV=True, **more)
    double_backward_dkdv[(triton.cdiv(M, c.BN) * L * K,)](
        *by_tma(more["TMA"], tensors, (c.BM, c.BN, c.BN, c.BM) * 2), Gradients(dk=dk, dv=dv), rows,
        w.pass_args(w.block_lists(c, by_keys=True), strides), **w.sizes, C=C, **options_of(c),
    )  # fmt: skip
    return dk, dv


@with_smaller_tiles("bias gradient")
def bias_gradient(w: KernelArgs, rows: BackwardRows, shape: tuple[int, ...]) -> Tensor:
    """The gradient of a bias tensor of `shape` (L|1, H|1, N|1, M|1), of slopes (H,), or of a table (H|1, 2R + 1)."""
    L, H, N = w.rows
    c = w.config("bias gradient")
    c = c._replace(BM=min(c.BM, c.BN), BN=min(c.BM, c.BN))
    row_blocks, key_blocks = triton.cdiv(N, c.BM), triton.cdiv(w.m, c.BN)
    owners, shared_heads, shared_rows = L * H, 1, 1
    if w.kind == BIAS_RELATIVE:
        shared_rows = max(1, math.ceil(row_blocks * L * H * shape[-1] / 2**24))
        mode, parts, tiles = bias_kernels.TABLE, triton.cdiv(row_blocks, shared_rows), shared_rows * key_blocks
        out = rows.delta.new_zeros(L, H, parts, shape[-1])
    elif w.kind == BIAS_ALIBI or shape[3] == 1:
        mode, parts, tiles = bias_kernels.ROWS, row_blocks, key_blocks
        out = rows.delta.new_empty(L, H, N)
    elif shape[2] == 1:
        mode, parts, tiles = bias_kernels.KEYS, key_blocks, row_blocks
        out = rows.delta.new_empty(L, H, w.m)
    else:
        owners, shared_heads = shape[0] * shape[1], H // shape[1]
        mode, parts, tiles = bias_kernels.PAIRS, row_blocks * key_blocks, L // shape[0] * shared_heads
        out = rows.delta.new_empty(shape)
    C = _constants(w, c, FAST=False, EXACT=w.exact, ENTROPY=rows.g_entropy is not None, TMA=False, MODE=mode)
    bias_kernels.bias_gradient[(parts * owners,)](
        w.query, w.key, w.value, rows.dO, out, rows.stats, w.pass_args(w.block_lists(c), _backward_strides(w, rows)), **w.sizes,
        parts=parts, tiles=tiles, shared_heads=shared_heads, shared_rows=shared_rows, C=C, **options_of(c),
    )  # fmt: skip
    if w.kind in (BIAS_RELATIVE, BIAS_ALIBI):
        total = out.sum((0, 2))  # (H, 2R + 1), (H,)
        return total if shape[0] == H else total.sum(0, keepdim=True)
    if mode == bias_kernels.ROWS:
        return out[..., None].sum_to_size(shape)
    return out[:, :, None].sum_to_size(shape) if mode == bias_kernels.KEYS else out


def _backward_strides(w: KernelArgs, rows: BackwardRows) -> BackwardStrides:
    return BackwardStrides(w.strides(), matrix_strides(rows.dO))


def _constants(w: KernelArgs, c: Config, **more: Any) -> Constants:
    """What a kernel that reads values is compiled for."""
    return constants(BM=c.BM, BN=c.BN, DROP=w.drop.keys is not None, **{**w.dims, **w.kinds, **more})


def options_of(c: Config) -> dict[str, int]:
    """The options of a launch; they name the fusion of products and sums, which Triton 3.10 switches off by default."""
    return {"num_warps": c.warps, "num_stages": c.stages, "enable_fp_fusion": True}


def _all_take_tma(w: KernelArgs, tensors: tuple[Tensor | None, ...]) -> bool:
    return w.by_tma and all(x is None or takes_tma(x) for x in tensors)


def by_tma(
    tma: bool, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], columns: tuple[int, ...] | None = None
) -> list[Any]:
    """Tensors as a kernel takes them: as TMA descriptors of blocks of so many rows and columns (all of them), or as they are."""
    if not tma:
        return list(tensors)
    columns = columns or tuple(0 if x is None else padded(x.shape[3]) for x in tensors)
    return [None if x is None else _descriptor(x, *size) for x, *size in zip(tensors, sizes, columns, strict=True)]


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])
