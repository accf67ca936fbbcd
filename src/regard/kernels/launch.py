"""From tensors to tensors: each function starts its kernels on the problem's device and gives back what they wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compat.triton import INTERPRETED
from ..core.rows import Rows
from .arguments import (
    ALIBI,
    PLAIN,
    RELATIVE,
    BackwardRows,
    DoubleBackwardRows,
    KernelArgs,
    Strides,
    Tangents,
    describable,
    stride_of,
)
from .portable import backward as backward_kernels
from .portable import bias_gradient as bias_kernels
from .portable import decode as decode_kernels
from .portable import double_backward as bend_kernels
from .portable import statistics as pass_kernels
from .portable.configs import Config, hopper, padded
from .portable.forward import forward as forward_kernel
from .portable.jvp import push as push_kernel

__all__ = ["attend", "bend", "bias_slopes", "moments", "pooled", "prepare", "push", "received", "slopes", "strongest"]

_FEW = 64  # rows that share a key head and fit one tile
_MANY = 1024  # keys for which splitting them pays
_BLOCK = 64  # rows and keys of a tile of the bias's gradient
P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(function: Callable[Concatenate[KernelArgs, P], R]) -> Callable[Concatenate[KernelArgs, P], R]:
    """Run a function on the device of its work: Triton starts kernels on the current one, whatever their tensors are on."""

    @wraps(function)
    def wrapped(w: KernelArgs, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(w.query):
            return function(w, *args, **kwargs)

    return wrapped


@on_its_device
def attend(w: KernelArgs, entropy: bool) -> Rows:
    """The forward pass: by decoding, by the chip's own kernel, or by the portable one."""
    L, H, N = w.rows
    few = w.vector is None and w.groups * N <= _FEW and w.m >= _MANY
    if not few and not INTERPRETED and hopper(w.query.device):
        from .hopper import forward_launch as chip

        if not chip.refuses(w):
            return chip.launch_forward(w, entropy)
    output = w.value.new_empty(L, H, N, w.value.shape[3])
    lse, row_max, log_row_sum = (w.query.new_empty(L, H, N, dtype=torch.float32) for _ in range(3))
    found = Rows(output, lse, torch.empty_like(lse) if entropy else torch.zeros_like(lse), row_max, log_row_sum)
    if few:
        _decode(w, found, entropy)
        return found
    c = w.config("forward")
    blocks = triton.cdiv(N, c.BM)
    q, k, v = _blocks_of(w, c)
    forward_kernel[(blocks * L * H,)](
        q, k, v, output, lse, row_max, log_row_sum, found.entropy, w.strides(output), w.scale, w.scales, w.softcap or 0.0, w.sink, w.bias,
        w.where(c), w.drop, w.vector, N, w.m, blocks, H, w.groups, **w.dims, BM=c.BM, BN=c.BN, **w.kinds, FAST=w.fast, ENTROPY=entropy,
        DROP=w.drop.keys is not None, SINK=w.sink is not None, TMA=w.described, num_warps=c.warps, num_stages=c.stages,
    )
    return found


@on_its_device
def push(w: KernelArgs, moves: Tangents, entropy: bool) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    """The forward pass with its tangent: of output, lse and entropy. A sink is not seen."""
    L, H, N = w.rows
    output, d_output = (w.value.new_empty(L, H, N, w.value.shape[3]) for _ in range(2))
    lse, row_max, log_row_sum, d_lse = (w.query.new_empty(L, H, N, dtype=torch.float32) for _ in range(4))
    stat, d_stat = ((torch.empty_like if entropy else torch.zeros_like)(lse) for _ in range(2))
    c = w.config("push")
    blocks = triton.cdiv(N, c.BM)
    tma, tensors = _laid((w.query, w.key, w.value, *moves[:3]), w, (c.BM, c.BN, c.BN) * 2)
    push_kernel[(blocks * L * H,)](
        *tensors, output, lse, row_max, log_row_sum, stat, d_output, d_lse, d_stat, w.strides(output), moves.strides, w.scale, w.scales, moves.scales,
        w.softcap or 0.0, w.bias, moves.bias, w.where(c), w.drop, N, w.m, blocks, H, w.groups, **w.dims, BM=c.BM, BN=c.BN, **_of_products(w),
        SCALES=w.scales is not None, FAST=w.fast and moves.scales is None, ENTROPY=entropy, DROP=w.drop.keys is not None, TMA=tma, **moves.kinds,
        MOVES_SCALES=moves.scales is not None, MOVES_BIAS=PLAIN if moves.bias.at is None else w.kind, num_warps=c.warps, num_stages=c.stages,
    )
    return Rows(output, lse, stat, row_max, log_row_sum), (d_output, d_lse, d_stat)


@on_its_device
def bend(w: KernelArgs, moves: Tangents, dO: Tensor, dO_dot: Tensor | None, rows: DoubleBackwardRows, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The tangents of dQ, dK and dV; of these the last two together. Scales are numbers, biases stand still, no sink."""
    L, H, N = w.rows
    K, M = w.key.shape[1:3]
    strides = Strides(*stride_of(dO), *stride_of(dO_dot), *stride_of(None), 0, 0, 0)
    shared = {
        "FAST": w.fast, "EXACT": w.exact, "ENTROPY": rows.g is not None, "DROP": w.drop.keys is not None, **moves.kinds, "MOVES_G": dO_dot is not None,
    }
    numbers = (w.strides(), moves.strides, strides, w.scale, w.softcap or 0.0, w.bias)
    every = (w.query, w.key, w.value, dO, *moves[:3], dO_dot)
    dq, dk, dv = None, None, None
    if needs[0]:
        c = w.config("bend queries" if dO_dot is None else "bend all queries")
        dq = w.query.new_empty(w.query.shape)
        blocks = triton.cdiv(N, c.BM)
        tma, tensors = _laid(every, w, (c.BM, c.BN, c.BN, c.BM) * 2)
        bend_kernels.queries[(blocks * L * H,)](
            *tensors, dq, rows, *numbers, w.where(c), w.drop, N, M, blocks, H, w.groups, **w.dims, BM=c.BM, BN=c.BN, **_of_products(w), **shared,
            TMA=tma, num_warps=c.warps, num_stages=c.stages,
        )
    if needs[1] or needs[2]:
        c = w.config("bend keys")
        dk, dv = w.key.new_empty(w.key.shape), w.value.new_empty(w.value.shape)
        tma, tensors = _laid(every, w, (c.BM, c.BN, c.BN, c.BM) * 2)
        bend_kernels.keys[(triton.cdiv(M, c.BN) * L * K,)](
            *tensors, dk, dv, rows, *numbers, w.where(c, turned=True), w.drop, N, M, H, w.groups, **w.dims, BM=c.BM, BN=c.BN, **_of_products(w),
            **shared, TMA=tma, GROUPED=w.groups > 1, num_warps=c.warps, num_stages=c.stages,
        )
    return dq, dk, dv


def _of_products(w: KernelArgs) -> dict[str, Any]:
    """What a kernel is compiled for whose scores are products."""
    return {k: v for k, v in w.kinds.items() if k not in ("HIDDEN", "APPROXIMATE", "SCALES")}


def _laid(tensors: tuple[Tensor | None, ...], w: KernelArgs, sizes: tuple[int, ...]) -> tuple[bool, list[Any]]:
    """Tensors as a kernel takes them, described to the copy engine if all can be; and whether they are."""
    tma = w.described and all(x is None or describable(x) for x in tensors)
    return tma, [x if x is None or not tma else _described(x, size, padded(x.shape[3])) for x, size in zip(tensors, sizes, strict=True)]


def _decode(w: KernelArgs, found: Rows, entropy: bool) -> None:
    L, H, N = w.rows
    E = w.value.shape[3]
    length = split_length(w.m)
    splits = triton.cdiv(w.m, length)
    BM = max(16, 1 << (w.groups * N - 1).bit_length())
    wide = max(w.dims["DP"], w.dims["DVP"])
    BN = 128 if wide <= 128 and w.query.element_size() == 2 else 32
    parts = found.lse.new_empty(L, splits, H, N, E)
    facts = found.lse.new_empty(3, L, splits, H, N)
    k, v = w.key, w.value
    if w.described:
        k, v = (_described(x, BN, p) for x, p in ((k, w.dims["DP"]), (v, w.dims["DVP"])))
    kinds = {k: v for k, v in w.kinds.items() if k not in ("HIDDEN", "APPROXIMATE")}
    shared = {"FAST": w.fast, "ENTROPY": entropy, "DROP": w.drop.keys is not None}
    decode_kernels.split[(splits * L * w.key.shape[1],)](
        w.query, k, v, parts, facts, w.strides(), w.scale, w.scales, w.softcap or 0.0, w.bias, w.block_mask.by_rows(128, 128), w.drop, N,
        w.m, length, facts.stride(0), triton.cdiv(w.m, 128), H, w.groups, **w.dims, BM=BM, BN=BN, **kinds, **shared, TMA=w.described, num_warps=4, num_stages=3,
    )
    decode_kernels.merge[(N * L * H,)](
        parts, facts, *(found.output, found.lse, found.max_logit, found.log_row_sum, found.entropy), w.strides(found.output), w.sink, w.drop, N,
        splits, facts.stride(0), H, DV=E, DVP=w.dims["DVP"], SP=max(2, 1 << (splits - 1).bit_length()), **shared, SINK=w.sink is not None, num_warps=1,
    )


def split_length(keys: int) -> int:
    """The keys of one split: by their number alone, so that no result depends on its batch."""
    return 2048 if keys >= 16384 else 512 if keys >= 4096 else 256


@on_its_device
def prepare(w: KernelArgs, found: Rows, dO: Tensor, g_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """δ = Σ dO ∘ O − g_lse of each row, and lse as the kernels tell exponents from it."""
    L, H, N = w.rows
    delta, level = torch.empty_like(found.lse), torch.empty_like(found.lse)
    backward_kernels.prepare[(triton.cdiv(N, 64) * L * H,)](
        found.output, dO, g_lse, found.max_logit, found.log_row_sum, delta, level, w.strides(found.output), *dO.stride(), N, H,
        DV=w.dims["DV"], DVP=w.dims["DVP"], BM=64, LSE=g_lse is not None, FAST=w.fast,
    )
    return delta, level


class Gradients(NamedTuple):
    """Of queries (in float32 and not yet scaled where there is a tensor of scales), keys, values, and the additive score's vector."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    vector: Tensor | None = None


@on_its_device
def slopes(w: KernelArgs, s: BackwardRows, queries: bool = True, keys: bool = True) -> Gradients:
    """Those of queries and of keys and values that are asked for: by the chip's own kernel, which makes all, or by the portable two."""
    if queries and keys and not INTERPRETED and hopper(w.query.device):
        from .hopper import backward_launch as chip

        if not chip.refuses(w, s):
            return Gradients(*chip.launch_backward(w, s))
    dq, vector = query_slopes(w, s) if queries else (None, None)
    dk, dv = key_slopes(w, s) if keys else (None, None)
    return Gradients(dq, dk, dv, vector)


def key_slopes(w: KernelArgs, s: BackwardRows) -> tuple[Tensor, Tensor]:
    """dK (of what the kernel multiplies with) and dV."""
    L, K, M, D = w.key.shape
    c = w.config("keys")
    dk = w.key.new_empty(L, K, M, D, dtype=torch.float32 if w.vector is not None else w.key.dtype)
    dv = w.value.new_empty(w.value.shape)
    tma = w.described and describable(s.dO)
    q, k, v, do = _blocks_of(w, c, s.dO, tma)
    backward_kernels.keys[(triton.cdiv(M, c.BN) * L * K,)](
        q, k, v, do, dk, dv, s.row_max, s.log_row_sum, s.delta, s.g_entropy, s.mean, w.strides(), *s.dO.stride(), w.scale, w.scales, w.softcap or 0.0, w.bias,
        w.where(c, turned=True), w.drop, w.vector, w.n, M, w.heads, w.groups, **w.dims, BM=c.BM, BN=c.BN, **w.kinds, FAST=w.fast,
        EXACT=w.exact, ENTROPY=s.g_entropy is not None, DROP=w.drop.keys is not None, TMA=tma, GROUPED=w.groups > 1, num_warps=c.warps,
        num_stages=c.stages,
    )
    return dk, dv


def query_slopes(w: KernelArgs, s: BackwardRows) -> tuple[Tensor, Tensor | None]:
    """dQ, in float32 and not yet scaled where there is a tensor of scales; and for the additive score d vector."""
    L, H, N = w.rows
    D = w.query.shape[3]
    c = w.config("queries")
    exact = w.scales is not None or w.vector is not None
    dq = w.query.new_empty(L, H, N, D, dtype=torch.float32 if exact else w.query.dtype)
    dw = torch.empty_like(dq) if w.vector is not None else None
    tma = w.described and describable(s.dO)
    q, k, v, do = _blocks_of(w, c, s.dO, tma)
    blocks = triton.cdiv(N, c.BM)
    backward_kernels.queries[(blocks * L * H,)](
        q, k, v, do, dq, dw, s.row_max, s.log_row_sum, s.delta, s.g_entropy, s.mean, w.strides(), *s.dO.stride(), w.scale, w.scales, w.softcap or 0.0, w.bias,
        w.where(c), w.drop, w.vector, N, w.m, blocks, H, w.groups, **w.dims, BM=c.BM, BN=c.BN, **w.kinds, FAST=w.fast,
        EXACT=w.exact, ENTROPY=s.g_entropy is not None, DROP=w.drop.keys is not None, TMA=tma, num_warps=c.warps, num_stages=c.stages,
    )
    return dq, None if dw is None else dw.sum((0, 1, 2))


@on_its_device
def bias_slopes(w: KernelArgs, s: BackwardRows, shape: tuple[int, ...]) -> Tensor:
    """The gradient of a bias tensor of `shape` (L|1, H|1, N|1, M|1), of slopes (H,), or of a table (H|1, 2R + 1)."""
    L, H, N = w.rows
    rows, keys = triton.cdiv(N, _BLOCK), triton.cdiv(w.m, _BLOCK)
    heads, per = 1, 1  # query heads that share a bias, and row blocks that share one place to add to
    if w.kind == RELATIVE:
        per = max(1, math.ceil(rows * L * H * shape[-1] / 2**24))
        mode, grid, turns = bias_kernels.TABLE, (triton.cdiv(rows, per), L * H), per * keys
        out = s.delta.new_zeros(L, H, grid[0], shape[-1])
    elif w.kind == ALIBI or shape[3] == 1:
        mode, grid, turns = bias_kernels.ROWS, (rows, L * H), keys
        out = s.delta.new_empty(L, H, N)
    elif shape[2] == 1:
        mode, grid, turns = bias_kernels.KEYS, (keys, L * H), rows
        out = s.delta.new_empty(L, H, w.m)
    else:
        heads = H // shape[1]
        mode, grid, turns = bias_kernels.PAIRS, (rows * keys, shape[0] * shape[1]), L // shape[0] * heads
        out = s.delta.new_empty(shape)
    bias_kernels.bias_gradient[(grid[0] * grid[1],)](
        w.query, w.key, w.value, s.dO, out, s.row_max, s.log_row_sum, s.delta, s.g_entropy, s.mean, w.strides(), *s.dO.stride(), w.scale, w.scales,
        w.softcap or 0.0, w.bias, w.block_mask.by_rows(_BLOCK, _BLOCK), w.drop, w.vector, N, w.m, H, w.groups, grid[0],
        triton.cdiv(w.m, 128), heads, turns, per, **w.dims, BLOCK=_BLOCK, **w.kinds, EXACT=w.exact, ENTROPY=s.g_entropy is not None,
        DROP=w.drop.keys is not None, MODE=mode, num_warps=4, num_stages=1,
    )
    if w.kind == RELATIVE:
        total = out.sum((0, 2))  # (H, 2R + 1)
        return total if shape[0] == H else total.sum(0, keepdim=True)
    if w.kind == ALIBI:
        total = out.sum((0, 2))
        return total if shape[0] == H else total.sum(0, keepdim=True)
    if mode == bias_kernels.ROWS:
        return out[..., None].sum_to_size(shape)
    return out[:, :, None].sum_to_size(shape) if mode == bias_kernels.KEYS else out


@on_its_device
def received(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor) -> Tensor:
    """Σ over rows of the weight each key receives: (L, H, M)."""
    if not INTERPRETED and hopper(w.query.device):
        from .hopper import statistics_launch as chip

        if not chip.refuses(w):
            return chip.received(w, row_max, log_row_sum)
    L, H, _ = w.rows
    c = w.config("received")
    out = row_max.new_empty(L, H, w.m)
    q, k, _ = _blocks_of(w, c)
    pass_kernels.received[(triton.cdiv(w.m, c.BN) * L * H,)](
        q, k, *_looking(w, out, row_max, log_row_sum)[2:], w.where(c, turned=True), w.vector, w.n, w.m, H, w.groups, **_sizes(w, c), **w.kinds,
        FAST=w.fast, TMA=w.described, **_how(c),
    )
    return out


@on_its_device
def moments(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p (1 − p) and Σ p |i + M − N − j| of each row: (L, H, N) each."""
    L, H, N = w.rows
    c = w.config("queries")
    health, distance = torch.empty_like(row_max), torch.empty_like(row_max)
    pass_kernels.moments[(triton.cdiv(N, c.BM) * L * H,)](
        w.query, w.key, health, *_looking(w, distance, row_max, log_row_sum)[2:], w.where(c), w.vector, N, w.m, H, w.groups, **_sizes(w, c), **w.kinds, FAST=w.fast, **_how(c),
    )
    return health, distance


@on_its_device
def pooled(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, height: int, width: int) -> Tensor:
    """The mean weight in each cell of a grid: (L, H, height, width)."""
    if not INTERPRETED and hopper(w.query.device):
        from .hopper import statistics_launch as chip

        if not chip.refuses_grid(w, height, width):
            return chip.pooled(w, row_max, log_row_sum, height, width)
    L, H, N = w.rows
    c = w.config("pooled")
    BM, BN = (max(16, 1 << (math.ceil(size) - 1).bit_length()) for size in (N / height, w.m / width))
    c = c._replace(BM=min(c.BM, BM), BN=min(c.BN, BN))
    out = row_max.new_empty(L, H, height, width)
    pass_kernels.pooled[(L * H * height * width,)](
        *_looking(w, out, row_max, log_row_sum), w.where(c), w.vector, N, w.m, H, w.groups, triton.cdiv(w.m, 128), height, width,
        **_sizes(w, c), **w.kinds, FAST=w.fast, **_how(c),
    )
    return out


@on_its_device
def strongest(w: KernelArgs, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and their keys, (L, H, N, k) each; −inf and −1 where fewer are visible."""
    L, H, N = w.rows
    KP = max(16, 1 << (k - 1).bit_length())
    c = w.config("queries")
    c = c._replace(BM=min(c.BM, 32), BN=min(c.BN, 64), warps=4)
    ranks = w.query.new_empty(L, H, N, KP, dtype=torch.int64)
    pass_kernels.strongest[(triton.cdiv(N, c.BM) * L * H,)](
        w.query, w.key, ranks, w.strides(), w.scale, w.scales, w.softcap or 0.0, w.bias, w.where(c), w.vector, N, w.m, H, w.groups, k,
        **_sizes(w, c), KP=KP, **w.kinds, **_how(c),
    )
    ranks = ranks.sort(dim=-1, descending=True).values[..., KP - k :]  # the places that nobody may take come first
    none = ranks == torch.iinfo(torch.int64).min
    bits = (ranks >> 32).to(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    index = 0xFFFFFFFF - (ranks & 0xFFFFFFFF)
    return bits.view(torch.float32).masked_fill(none, -torch.inf), index.masked_fill(none, -1)


def _looking(w: KernelArgs, out: Tensor, row_max: Tensor, log_row_sum: Tensor) -> tuple[Any, ...]:
    return w.query, w.key, out, row_max, log_row_sum, w.strides(), w.scale, w.scales, w.softcap or 0.0, w.bias


def _sizes(w: KernelArgs, c: Config) -> dict[str, int]:
    return {"D": w.dims["D"], "DP": w.dims["DP"], "BM": c.BM, "BN": c.BN}


def _how(c: Config) -> dict[str, int]:
    return {"num_warps": c.warps, "num_stages": c.stages}


def _blocks_of(w: KernelArgs, c: Config, dO: Tensor | None = None, described: bool | None = None) -> tuple[Any, ...]:
    """Query, key, value (and dO) as the kernel takes them: described to the copy engine, or as they are."""
    tensors = (w.query, w.key, w.value, *(() if dO is None else (dO,)))
    if not (w.described if described is None else described):
        return tensors
    sizes = (c.BM, c.BN, c.BN, c.BM)
    return tuple(_described(x, size, padded(x.shape[3])) for x, size in zip(tensors, sizes, strict=False))


def _described(x: Tensor, rows: int, dim: int) -> Any:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, dim])
