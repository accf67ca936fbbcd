"""Statistics of the weights by the portable kernels, from tensors to tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...chunked.statistics import RowTotals
from .. import launch_cache
from ..arguments import KernelArgs
from . import statistics as statistics_kernels
from .aggregates import Constants, constants
from .configs import Config
from .launch import by_tma, options_of, with_smaller_tiles

__all__ = [
    "FoldedBands", "RowSurvey", "WeightStats", "fold_bands", "moments", "pooled", "ranked", "received", "received_by_bands", "row_survey", "top",
]  # fmt: skip

_TWO_PER_SM = {"maxnreg": 128}  # registers of a thread with which two programs of eight warps share a multiprocessor
_FOLDED = {"BY": 32, "BX": 64}  # bands and keys of a tile


class WeightStats(NamedTuple):
    """What the forward pass found, as the statistics need it: float32 (L, H, N) each."""

    row_max: Tensor
    log_row_sum: Tensor
    entropy: Tensor | None = None


@with_smaller_tiles("received")
def received(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor) -> Tensor:
    """Σ over rows of the weight each key receives: (L, H, M)."""
    L, H, _ = w.rows
    c = w.config("received")
    out = row_max.new_empty(L, H, w.m)
    q, k = by_tma(w.by_tma, (w.query, w.key), (c.BM, c.BN))
    statistics_kernels.received[(triton.cdiv(w.m, c.BN) * L * H,)](
        q, k, out, WeightStats(row_max, log_row_sum), w.pass_args(w.block_lists(c, by_keys=True), w.strides()), **w.sizes,
        C=_statistics_constants(w, c, FAST=w.fast, TMA=w.by_tma), **options_of(c),
    )  # fmt: skip
    return out


@with_smaller_tiles("dq")
def moments(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p (1 − p) and Σ p |i + M − N − j| of each row: (L, H, N) each."""
    L, H, N = w.rows
    c = w.config("dq")
    health, distance = torch.empty_like(row_max), torch.empty_like(row_max)
    statistics_kernels.moments[(triton.cdiv(N, c.BM) * L * H,)](
        w.query, w.key, health, distance, WeightStats(row_max, log_row_sum), w.pass_args(w.block_lists(c), w.strides()), **w.sizes,
        C=_statistics_constants(w, c, FAST=w.fast, TMA=False), **options_of(c),
    )  # fmt: skip
    return health, distance


@with_smaller_tiles("pooled")
def pooled(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, height: int, width: int) -> Tensor:
    """The mean weight in each cell of a grid: (L, H, height, width)."""
    L, H, N = w.rows
    c = w.config("pooled")
    BM, BN = (max(16, 1 << (math.ceil(size) - 1).bit_length()) for size in (N / height, w.m / width))
    c = c._replace(BM=min(c.BM, BM), BN=min(c.BN, BN))
    out = row_max.new_empty(L, H, height, width)
    statistics_kernels.pooled[(L * H * height * width,)](
        w.query, w.key, out, WeightStats(row_max, log_row_sum), w.pass_args(w.block_lists(c), w.strides()), **w.sizes,
        height=height, width=width, key_blocks=triton.cdiv(w.m, 128), C=_statistics_constants(w, c, FAST=w.fast, TMA=False), **options_of(c),
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


@with_smaller_tiles("pooled")
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
    launch_cache.start(key, statistics_kernels.received_by_bands, programs, arguments, options_of(c), tensors, c)
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
        launch_cache.start(key, statistics_kernels.fold_bands, width * L * H, {**tensors, **sizes, **_FOLDED}, {"num_warps": 4, "enable_fp_fusion": True}, tensors)
    return out


@with_smaller_tiles("dq")
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
    options = {**options_of(c), **(_TWO_PER_SM if torch.version.hip is None else {})}
    launch_cache.start(key, statistics_kernels.row_survey, row_blocks * L * H, arguments, options, tensors, c)
    return out


def _late_arguments(
    w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, c: Config, entropy: Tensor | None = None
) -> dict[str, Any]:
    """What a late pass reads apart from q and k."""
    return {"stats": WeightStats(row_max, log_row_sum, entropy), "args": w.pass_args(w.block_lists(c), w.strides())}


@with_smaller_tiles("dq")
def top(w: KernelArgs, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and their keys, (L, H, N, k) each; −inf and −1 where fewer are visible."""
    L, H, N = w.rows
    KP = max(16, 1 << (k - 1).bit_length())
    c = w.config("dq")
    c = c._replace(BM=min(c.BM, 32), BN=min(c.BN, 64), warps=4)
    ranks = w.query.new_empty(L, H, N, KP, dtype=torch.int64)
    statistics_kernels.top[(triton.cdiv(N, c.BM) * L * H,)](
        w.query, w.key, ranks, w.pass_args(w.block_lists(c), w.strides()), **w.sizes, k_best=k,
        C=_statistics_constants(w, c, FAST=False, TMA=False, KP=KP), **options_of(c),
    )  # fmt: skip
    return ranked(ranks, k)


def ranked(ranks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The logits and keys of ranks (…, KP), of which k count: (…, k) each, the strongest first; −inf and −1 for none."""
    ranks = ranks.sort(dim=-1, descending=True).values[..., ranks.shape[-1] - k :]  # the places that stay empty come first
    none = ranks == torch.iinfo(torch.int64).min
    bits = (ranks >> 32).to(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    index = 0xFFFFFFFF - (ranks & 0xFFFFFFFF)
    return bits.view(torch.float32).masked_fill(none, -torch.inf), index.masked_fill(none, -1)


def _statistics_constants(w: KernelArgs, c: Config, **more: Any) -> Constants:
    """What a kernel that reads no values is compiled for."""
    return constants(BM=c.BM, BN=c.BN, DROP=False, D=w.dims["D"], DP=w.dims["DP"], DR=w.dims["DR"], **w.kinds, **more)
