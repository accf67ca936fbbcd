"""From tensors to tensors by the portable kernels: each function allocates results, starts its kernels and returns them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...chunked.statistics import RowTotals
from ...core.rows import Rows
from .. import launch_cache
from ..arguments import (
    BIAS_ALIBI,
    BIAS_NONE,
    BIAS_RELATIVE,
    NO_ENTROPY,
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
from . import statistics as statistics_kernels
from .aggregates import Constants, constants
from .backward import backward_dkdv as backward_dkdv_kernel
from .backward import backward_dq as backward_dq_kernel
from .backward import backward_preprocess as backward_preprocess_kernel
from .configs import Config, padded
from .decode import decode_merge, decode_split
from .double_backward import double_backward_dkdv, double_backward_dq
from .forward import forward as forward_kernel
from .jvp import jvp as jvp_kernel

__all__ = [
    "backward",
    "backward_preprocess",
    "bias_gradient",
    "decodes",
    "double_backward",
    "fold_bands",
    "forward",
    "jvp",
    "moments",
    "pooled",
    "preprocess_key",
    "received",
    "received_by_bands",
    "row_survey",
    "top",
]

_FEW_ROWS = 64  # that share a key head and fit one tile
_MANY_KEYS = 1024  # for which splitting them pays
_TWO_PER_SM = {"maxnreg": 128}  # registers of a thread with which two programs of eight warps share a multiprocessor
_FOLDED = {"BY": 32, "BX": 64}  # bands and keys of a tile
_BIAS_BLOCK = 64  # rows and keys of a tile of the bias's gradient


def decodes(w: KernelArgs) -> bool:
    """Whether rows are few and keys many, so that the keys are split."""
    return w.vector is None and w.groups * w.n <= _FEW_ROWS and w.m >= _MANY_KEYS


def forward(w: KernelArgs, entropy: bool) -> Rows:
    """The forward pass."""
    out = w.new_rows(entropy)
    if decodes(w):
        _decode(w, out, entropy)
        return out
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
    q, k, v = _by_tma(w.by_tma, (w.query, w.key, w.value), (c.BM, c.BN, c.BN))
    C = _constants(w, c, FAST=w.fast, ENTROPY=entropy, SINK=w.sink is not None, TMA=w.by_tma)
    arguments = {**tensors, "q": q, "k": k, "v": v, **w.sizes, "row_blocks": row_blocks, "C": C}
    launch_cache.start(key, forward_kernel, row_blocks * L * H, arguments, _options(c), tensors, c)
    return out


class Partials(NamedTuple):
    """What the splits of the keys leave for each row."""

    output: Tensor  # float32 (L, splits, H, N, E)
    stats: Tensor  # float32 (3, L, splits, H, N): m, l, e


def _decode(w: KernelArgs, out: Rows, entropy: bool) -> None:
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
        return
    widest = max(w.dims["DP"], w.dims["DVP"])
    BN = 128 if widest <= 128 and w.query.element_size() == 2 else 32
    c = Config(max(16, 1 << (w.groups * N - 1).bit_length()), BN, 4, 3)
    count = partials.stats.stride(0)
    k, v = _by_tma(w.by_tma, (w.key, w.value), (BN, BN))
    C = _constants(w, c, FAST=w.fast, ENTROPY=entropy, TMA=w.by_tma)
    arguments = {**split, "k": k, "v": v, **w.sizes, "length": length, "count": count, "key_blocks": triton.cdiv(w.m, 128), "C": C}
    launch_cache.start(split_key, decode_split, splits * L * w.key.shape[1], arguments, _options(c), split)
    sink, largest = w.sink is not None, max(2, 1 << (splits - 1).bit_length())
    C = constants(DV=E, DVP=w.dims["DVP"], SPLITS=largest, FAST=w.fast, ENTROPY=entropy, SINK=sink)
    arguments = {**merge, "n": N, "heads": H, "splits": splits, "count": count, "C": C}
    launch_cache.start(merge_key, decode_merge, N * L * H, arguments, {"num_warps": 1}, merge)


def split_length(keys: int) -> int:
    """The keys of one split: by their number alone, so that no result depends on its batch."""
    return 2048 if keys >= 16384 else 512 if keys >= 4096 else 256


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
        w, c, FAST=w.fast and tangents.scales is None, ENTROPY=entropy, TMA=tma,
        BIAS_DOT=BIAS_NONE if tangents.bias.at is None else w.kind,
    )  # fmt: skip
    jvp_kernel[(row_blocks * L * H,)](
        *_by_tma(tma, tensors, (c.BM, c.BN, c.BN) * 2), out, d_out, w.pass_args(w.block_lists(c), w.strides(out.output)),
        TangentArgs(tangents.strides, tangents.scales, tangents.bias), **w.sizes, row_blocks=row_blocks, C=C, **_options(c),
    )  # fmt: skip
    return out, (d_out.output, d_out.lse, d_out.entropy)


def backward_preprocess(w: KernelArgs, found: Rows, dO: Tensor, g_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """δ = Σ dO ∘ O − g_lse of each row, and lse in the units of the kernels' exponents."""
    L, H, N = w.rows
    delta, lse = torch.empty_like(found.lse), torch.empty_like(found.lse)
    tensors = {"do": dO, "g_lse": g_lse, "out": found._replace(entropy=NO_ENTROPY), "delta": delta, "lse": lse}
    key = preprocess_key(w, dO, found.output, g_lse)
    launch = launch_cache.find(key)
    if launch is not None:
        launch.again(**tensors)
    else:
        C = constants(DV=w.dims["DV"], DVP=w.dims["DVP"], BM=64, FAST=w.fast)
        strides = BackwardStrides(w.strides(found.output), matrix_strides(dO))
        arguments = {**tensors, "strides": strides, "n": N, "heads": H, "C": C}
        launch_cache.start(key, backward_preprocess_kernel, triton.cdiv(N, 64) * L * H, arguments, {}, tensors)
    return delta, lse


def preprocess_key(w: KernelArgs, dO: Tensor, output: Tensor, g_lse: Tensor | None) -> tuple[Any, ...]:
    """The key of this launch in the cache."""
    return "preprocess", g_lse is None, dO.dtype, dO.data_ptr() & 15, dO.stride(), output.stride(), w.signature


def backward(w: KernelArgs, rows: BackwardRows, queries: bool, keys: bool) -> Gradients:
    """The wanted gradients, of queries or of keys and values."""
    dq, vector = _backward_dq(w, rows) if queries else (None, None)
    dk, dv = _backward_dkdv(w, rows) if keys else (None, None)
    return Gradients(dq, dk, dv, vector)


def _backward_dkdv(w: KernelArgs, rows: BackwardRows) -> tuple[Tensor, Tensor]:
    """dK (of what the kernel multiplies with) and dV."""
    L, K, M, D = w.key.shape
    dk = w.key.new_empty(L, K, M, D, dtype=torch.float32 if w.vector is not None else w.key.dtype)
    dv = w.value.new_empty(w.value.shape)
    key, launch, c, tensors = _backward_launch(w, rows, "dkdv", Gradients(dk=dk, dv=dv))
    if launch is None:
        arguments, tma = _backward_arguments(w, rows, c, tensors)
        C = _constants(w, c, FAST=w.fast, EXACT=w.exact, ENTROPY=rows.g_entropy is not None, TMA=tma, GROUPED=w.groups > 1)
        arguments |= {**w.sizes, "C": C}
        launch_cache.start(key, backward_dkdv_kernel, triton.cdiv(M, c.BN) * L * K, arguments, _options(c), tensors, c)
    else:
        launch.again(**tensors)
    return dk, dv


def _backward_launch(w: KernelArgs, rows: BackwardRows, direction: str, grads: Gradients) -> tuple[Any, Any, Config, dict[str, Any]]:
    """A backward kernel's key, its launch if it was started before, its config, and the arguments that hold tensors."""
    key = (direction, rows.g_entropy is None, rows.dO.dtype, rows.dO.stride(), rows.dO.data_ptr() & 15, w.signature)
    launch = launch_cache.find(key)
    c = w.config(direction) if launch is None else launch.about
    args = w.pass_args(w.block_lists(c, by_keys=direction == "dkdv"), _backward_strides(w, rows))
    tensors = {"q": w.query, "k": w.key, "v": w.value, "do": rows.dO, "out": grads, "stats": rows.stats, "args": args}
    return key, launch, c, tensors


def _backward_arguments(w: KernelArgs, rows: BackwardRows, c: Config, tensors: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """These arguments with TMA descriptors where TMA can load, and whether it can."""
    matrices = (w.query, w.key, w.value, rows.dO)
    tma = _all_take_tma(w, matrices)
    described = _by_tma(tma, matrices, (c.BM, c.BN, c.BN, c.BM))
    return {**tensors, **dict(zip(("q", "k", "v", "do"), described, strict=True))}, tma


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
        C = _constants(w, c, FAST=w.fast, EXACT=w.exact, ENTROPY=rows.g_entropy is not None, TMA=tma)
        arguments |= {**w.sizes, "row_blocks": row_blocks, "C": C}
        launch_cache.start(key, backward_dq_kernel, row_blocks * L * H, arguments, _options(c), tensors, c)
    else:
        launch.again(**tensors)
    return dq, None if dw is None else dw.sum((0, 1, 2))


def double_backward(
    w: KernelArgs, tangents: Tangents, dO: Tensor, dO_dot: Tensor | None, rows: DoubleBackwardRows, needs: tuple[bool, ...]
) -> Gradients:
    """The tangents of dQ, dK and dV, the last two together. Scales are numbers, biases have no tangent, no sink."""
    L, H, N = w.rows
    K, M = w.key.shape[1:3]
    strides = DoubleBackwardStrides(w.strides(), tangents.strides, matrix_strides(dO), matrix_strides(dO_dot))
    tensors = (w.query, w.key, w.value, dO, *tangents[:3], dO_dot)
    tma = _all_take_tma(w, tensors)
    more = {"FAST": w.fast, "EXACT": w.exact, "ENTROPY": rows.g_entropy is not None, "TMA": tma}
    dq, dk, dv = None, None, None
    if needs[0]:
        c = w.config("double dq" if dO_dot is None else "double dq, all")
        dq = w.query.new_empty(w.query.shape)
        row_blocks = triton.cdiv(N, c.BM)
        double_backward_dq[(row_blocks * L * H,)](
            *_by_tma(tma, tensors, (c.BM, c.BN, c.BN, c.BM) * 2), Gradients(dq=dq), rows, w.pass_args(w.block_lists(c), strides),
            **w.sizes, row_blocks=row_blocks, C=_constants(w, c, **more), **_options(c),
        )  # fmt: skip
    if needs[1] or needs[2]:
        c = w.config("double dkdv")
        dk, dv = w.key.new_empty(w.key.shape), w.value.new_empty(w.value.shape)
        double_backward_dkdv[(triton.cdiv(M, c.BN) * L * K,)](
            *_by_tma(tma, tensors, (c.BM, c.BN, c.BN, c.BM) * 2), Gradients(dk=dk, dv=dv), rows,
            w.pass_args(w.block_lists(c, by_keys=True), strides), **w.sizes, C=_constants(w, c, GROUPED=w.groups > 1, **more), **_options(c),
        )  # fmt: skip
    return Gradients(dq, dk, dv)


def bias_gradient(w: KernelArgs, rows: BackwardRows, shape: tuple[int, ...]) -> Tensor:
    """The gradient of a bias tensor of `shape` (L|1, H|1, N|1, M|1), of slopes (H,), or of a table (H|1, 2R + 1)."""
    L, H, N = w.rows
    row_blocks, key_blocks = triton.cdiv(N, _BIAS_BLOCK), triton.cdiv(w.m, _BIAS_BLOCK)
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
    c = Config(_BIAS_BLOCK, _BIAS_BLOCK, 4, 1)
    C = _constants(w, c, FAST=False, EXACT=w.exact, ENTROPY=rows.g_entropy is not None, TMA=False, MODE=mode)
    bias_kernels.bias_gradient[(parts * owners,)](
        w.query, w.key, w.value, rows.dO, out, rows.stats, w.pass_args(w.block_lists(c), _backward_strides(w, rows)), **w.sizes,
        parts=parts, tiles=tiles, shared_heads=shared_heads, shared_rows=shared_rows, C=C, **_options(c),
    )  # fmt: skip
    if w.kind in (BIAS_RELATIVE, BIAS_ALIBI):
        total = out.sum((0, 2))  # (H, 2R + 1), (H,)
        return total if shape[0] == H else total.sum(0, keepdim=True)
    if mode == bias_kernels.ROWS:
        return out[..., None].sum_to_size(shape)
    return out[:, :, None].sum_to_size(shape) if mode == bias_kernels.KEYS else out


class WeightStats(NamedTuple):
    """What the forward pass found, as the statistics need it: float32 (L, H, N) each."""

    row_max: Tensor
    log_row_sum: Tensor
    entropy: Tensor | None = None


def received(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor) -> Tensor:
    """Σ over rows of the weight each key receives: (L, H, M)."""
    L, H, _ = w.rows
    c = w.config("received")
    out = row_max.new_empty(L, H, w.m)
    q, k = _by_tma(w.by_tma, (w.query, w.key), (c.BM, c.BN))
    statistics_kernels.received[(triton.cdiv(w.m, c.BN) * L * H,)](
        q, k, out, WeightStats(row_max, log_row_sum), w.pass_args(w.block_lists(c, by_keys=True), w.strides()), **w.sizes,
        C=_statistics_constants(w, c, FAST=w.fast, TMA=w.by_tma), **_options(c),
    )  # fmt: skip
    return out


def moments(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p (1 − p) and Σ p |i + M − N − j| of each row: (L, H, N) each."""
    L, H, N = w.rows
    c = w.config("dq")
    health, distance = torch.empty_like(row_max), torch.empty_like(row_max)
    statistics_kernels.moments[(triton.cdiv(N, c.BM) * L * H,)](
        w.query, w.key, health, distance, WeightStats(row_max, log_row_sum), w.pass_args(w.block_lists(c), w.strides()), **w.sizes,
        C=_statistics_constants(w, c, FAST=w.fast, TMA=False), **_options(c),
    )  # fmt: skip
    return health, distance


def pooled(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, height: int, width: int) -> Tensor:
    """The mean weight in each cell of a grid: (L, H, height, width)."""
    L, H, N = w.rows
    c = w.config("pooled")
    BM, BN = (max(16, 1 << (math.ceil(size) - 1).bit_length()) for size in (N / height, w.m / width))
    c = c._replace(BM=min(c.BM, BM), BN=min(c.BN, BN))
    out = row_max.new_empty(L, H, height, width)
    statistics_kernels.pooled[(L * H * height * width,)](
        w.query, w.key, out, WeightStats(row_max, log_row_sum), w.pass_args(w.block_lists(c), w.strides()), **w.sizes,
        height=height, width=width, key_blocks=triton.cdiv(w.m, 128), C=_statistics_constants(w, c, FAST=w.fast, TMA=False), **_options(c),
    )  # fmt: skip
    return out


class RowSurvey(NamedTuple):
    """What one pass over the keys gives for each row: (L, H, N) each, float32 but for the keys."""

    health: Tensor  # Σ p(1 − p)
    distance: Tensor  # Σ p |i + M − N − j|
    first: Tensor  # the weight on a key that is given for each batch item
    own: Tensor  # on the row's own position
    previous: Tensor  # on the position before
    largest: Tensor  # the largest weight
    key: Tensor  # int64, the key that has it; −1 in a row without weights
    visible: Tensor  # int64, how many keys the row may attend to
    totals: Tensor  # (L, H, blocks of rows, len(RowTotals._fields))


def received_by_bands(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, bands: int) -> Tensor:
    """The weight each key receives from each band of rows; row i is in band ⌊i·bands/N⌋: (L, H, bands, M)."""
    L, H, N = w.rows
    out = row_max.new_empty(L, H, bands, w.m)
    launch = launch_cache.find(key := ("received by bands", bands, w.signature))
    if launch is None:
        c = w.config("pooled")
        c = c._replace(BM=min(c.BM, max(16, 1 << (math.ceil(N / bands) - 1).bit_length())))
    else:
        c = launch.about
    tensors = {"q": w.query, "k": w.key, "out": out, **_late_arguments(w, row_max, log_row_sum, c)}
    if launch is not None:
        launch.again(**tensors)
        return out
    C = _statistics_constants(w, c, FAST=w.fast, TMA=False)
    arguments = {**tensors, **w.sizes, "bands": bands, "key_blocks": triton.cdiv(w.m, 128), "C": C}
    programs = triton.cdiv(w.m, c.BN) * bands * L * H
    launch_cache.start(key, statistics_kernels.received_by_bands, programs, arguments, _options(c), tensors, c)
    return out


class FoldedBands(NamedTuple):
    """What follows from the weight that each key receives from each band of rows."""

    received: Tensor  # (L, H, M), from all bands
    cells: Tensor  # (L, H, height, width), the mean weight in each cell
    peaks: Tensor  # as in Survey: float64 (L, H, width, 3)
    first: Tensor  # int64 (L,), M less the first key that receives weight in any head; 0 for none


def fold_bands(w: KernelArgs, bands: Tensor, width: int) -> FoldedBands:
    """What each key receives, the map with one row of cells per band, and the first key, from (L, H, height, M)."""
    L, H, N = w.rows
    height = bands.shape[2]
    received, cells = bands.new_empty(L, H, w.m), bands.new_empty(L, H, height, width)
    peaks = bands.new_empty(L, H, width, 3, dtype=torch.float64)
    # Triton 3.6 keeps the loop of `row_survey` in registers if the key is a 64-bit number, and spills if it is not.
    out = FoldedBands(received, cells, peaks, launch_cache.zeros(2 * L, bands.device).view(torch.int64))
    tensors = {"bands": bands, **out._asdict()}
    launch = launch_cache.find(key := ("fold bands", bands.device, bands.shape, N, width))
    if launch is not None:
        launch.again(**tensors)
    else:
        sizes = {"n": N, "m": w.m, "heads": H, "height": height, "width": width}
        launch_cache.start(key, statistics_kernels.fold_bands, width * L * H, {**tensors, **sizes, **_FOLDED}, {"num_warps": 4}, tensors)
    return out


def row_survey(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, entropy: Tensor, first: Tensor) -> RowSurvey:
    """Every statistic of each row, in one pass; `first` chooses the key of `RowSurvey.first`, as in `FoldedBands`."""
    L, H, N = w.rows
    launch = launch_cache.find(key := ("row survey", w.signature))
    c = w.config("dq") if launch is None else launch.about
    row_blocks = triton.cdiv(N, c.BM)
    health, distance, on_first, own, previous, largest = row_max.new_empty(6, L, H, N).unbind()
    strongest, visible = row_max.new_empty(2, L, H, N, dtype=torch.int64).unbind()
    totals = row_max.new_empty(L, H, row_blocks, len(RowTotals._fields))
    out = RowSurvey(health, distance, on_first, own, previous, largest, strongest, visible, totals)
    late = _late_arguments(w, row_max, log_row_sum, c, entropy)
    tensors = {"q": w.query, "k": w.key, "out": out, "first": first, **late}
    if launch is not None:
        launch.again(**tensors)
        return out
    arguments = {**tensors, **w.sizes, "C": _statistics_constants(w, c, FAST=w.fast, TMA=False)}
    options = {**_options(c), **(_TWO_PER_SM if torch.version.hip is None else {})}
    launch_cache.start(key, statistics_kernels.row_survey, row_blocks * L * H, arguments, options, tensors, c)
    return out


def _late_arguments(
    w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, c: Config, entropy: Tensor | None = None
) -> dict[str, Any]:
    """What a late pass reads apart from q and k."""
    return {"stats": WeightStats(row_max, log_row_sum, entropy), "args": w.pass_args(w.block_lists(c), w.strides())}


def top(w: KernelArgs, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and their keys, (L, H, N, k) each; −inf and −1 where fewer are visible."""
    L, H, N = w.rows
    KP = max(16, 1 << (k - 1).bit_length())
    c = w.config("dq")
    c = c._replace(BM=min(c.BM, 32), BN=min(c.BN, 64), warps=4)
    ranks = w.query.new_empty(L, H, N, KP, dtype=torch.int64)
    statistics_kernels.top[(triton.cdiv(N, c.BM) * L * H,)](
        w.query, w.key, ranks, w.pass_args(w.block_lists(c), w.strides()), **w.sizes, k_best=k,
        C=_statistics_constants(w, c, FAST=False, TMA=False, KP=KP), **_options(c),
    )  # fmt: skip
    ranks = ranks.sort(dim=-1, descending=True).values[..., KP - k :]  # the places that stay empty come first
    none = ranks == torch.iinfo(torch.int64).min
    bits = (ranks >> 32).to(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    index = 0xFFFFFFFF - (ranks & 0xFFFFFFFF)
    return bits.view(torch.float32).masked_fill(none, -torch.inf), index.masked_fill(none, -1)


def _backward_strides(w: KernelArgs, rows: BackwardRows) -> BackwardStrides:
    return BackwardStrides(w.strides(), matrix_strides(rows.dO))


def _constants(w: KernelArgs, c: Config, **more: Any) -> Constants:
    """What a kernel that reads values is compiled for."""
    return constants(BM=c.BM, BN=c.BN, DROP=w.drop.keys is not None, **w.dims, **{**w.kinds, **more})


def _statistics_constants(w: KernelArgs, c: Config, **more: Any) -> Constants:
    """What a kernel that reads no values is compiled for."""
    return constants(BM=c.BM, BN=c.BN, DROP=False, D=w.dims["D"], DP=w.dims["DP"], **w.kinds, **more)


def _options(c: Config) -> dict[str, int]:
    return {"num_warps": c.warps, "num_stages": c.stages}


def _all_take_tma(w: KernelArgs, tensors: tuple[Tensor | None, ...]) -> bool:
    return w.by_tma and all(x is None or takes_tma(x) for x in tensors)


def _by_tma(tma: bool, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> list[Any]:
    """Tensors as a kernel takes them: as TMA descriptors of blocks of so many rows, or as they are."""
    if not tma:
        return list(tensors)
    return [None if x is None else _descriptor(x, size) for x, size in zip(tensors, sizes, strict=True)]


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, padded(x.shape[3])])
