"""The survey of a call: every statistic of its weights, from one pass by keys, its sums, and one pass by rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..chunked.stacked_survey import StackedSurvey, SurveySizes
from ..chunked.statistics import Survey, first_keys
from ..compat.torch import cuda_allocator, is_current_device
from ..compat.triton import INTERPRETED
from . import launch_cache
from .arguments import KernelArgs
from .block_mask import BlockMask
from .launch import on_its_device, pooled, received
from .portable import statistics_launch as portable
from .portable.configs import hopper

__all__ = ["survey", "survey_shortcut"]

_MOST_NUMBERS = 2**28  # in (L, H, height, M): a GiB


@on_its_device
def survey(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, entropy: Tensor, height: int, width: int) -> Survey:
    """Every statistic of the weights, with a map of height × width cells; nothing is read back to the host.

    The pass by keys gives what each key receives from each row of cells, whose sums are `received` and the map. Three
    launches do all of it: where many calls are surveyed, the host would need longer for more than the GPU.
    """
    L, H, _ = w.rows
    if L * H * height * w.m > _MOST_NUMBERS:
        total, cells = received(w, row_max, log_row_sum), pooled(w, row_max, log_row_sum, height, width)
        first = w.m - first_keys(total)
        peaks = torch.stack([x.double() for x in (total.sum(-1), *total.max(-1))], -1)[:, :, None]
    else:
        bands = _received_by_bands(w, row_max, log_row_sum, height)  # (L, H, height, M)
        total, cells, peaks, first = portable.fold_bands(w, bands, width)
    return Survey(cells, total, *portable.row_survey(w, row_max, log_row_sum, entropy, first), peaks, first)


def _received_by_bands(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, bands: int) -> Tensor:
    if not INTERPRETED and hopper(w.query.device):
        from .hopper import statistics_launch as chip

        by_chip = launch_cache.find(key := ("route of the bands", bands, w.signature))
        if by_chip is None:
            launch_cache.store(key, by_chip := not chip.refuses_bands(w, bands))
        if by_chip:
            return chip.received_by_bands(w, row_max, log_row_sum, bands)
    return portable.received_by_bands(w, row_max, log_row_sum, bands)


def survey_shortcut(w: KernelArgs, height: int, width: int) -> Callable[[Tensor, Tensor, Tensor, BlockMask], StackedSurvey | None] | None:
    """`survey` for calls whose sizes, strides and numbers are these, by the launches of an earlier one; None where it has none.

    It takes queries, keys, the statistics as `core.rows.StackedRows` has them and a block mask. Two tensors are made per call:
    one for the results, and one for what the launches hand on.
    """
    if INTERPRETED or not hopper(w.query.device):
        return None
    from .hopper import statistics_launch as chip

    (L, H, N), M, device = w.rows, w.m, w.query.device
    by_bands = chip.bands_shortcut(w, height)
    fold = launch_cache.find(("fold bands", device, (L, H, height, M), N, width))
    by_rows = launch_cache.find(("row survey", w.signature))
    if by_bands is None or fold is None or by_rows is None or L * H * N % 4 or (w.query.data_ptr() | w.key.data_ptr() | w.value.data_ptr()) & 15:
        return None
    c = by_rows.about
    start_fold = fold.bound("bands", "received", "cells", "peaks", "first")
    start_rows = by_rows.bound("q", "k", "out", "first", "stats", "args")
    strides, score, _, dropout = w.pass_args(w.block_lists(c), w.strides())
    sizes = SurveySizes(L, H, N, M, height, width, -(-N // c.BM))
    bands = -(-L * H * height * M // 4) * 4  # numbers; the first keys follow at a multiple of 16 bytes
    new_results, new_scratch = cuda_allocator((sizes.words,), torch.int64), cuda_allocator((bands + 2 * L,), torch.float32)
    step, kind, narrow, BM, BN = 4 * L * H * N, w.block_mask.kind, w.block_mask.narrow, c.BM, c.BN
    at_map, at_received, *at_rows, at_totals, at_peaks = (part.begin for part in sizes.parts.values())

    def run(q: Tensor, k: Tensor, statistics: Tensor, block_mask: BlockMask) -> StackedSurvey | None:
        stats = statistics.data_ptr()  # lse, row max, log of the row sum and entropy
        if (q.data_ptr() | k.data_ptr() | stats) & 15 or block_mask.kind != kind or block_mask.narrow != narrow or not is_current_device(device):
            return None
        results, scratch = new_results(), new_scratch().zero_()
        at, received = results.data_ptr(), scratch.data_ptr()
        first = received + 4 * bands
        by_bands(q, k, received, stats + step, stats + 2 * step, block_mask)
        start_fold(received, at + at_received, at + at_map, at + at_peaks, first)
        start_rows(
            q, k, (*[at + begin for begin in at_rows], at + at_totals), first, (stats + step, stats + 2 * step, stats + 3 * step),
            (strides, score, block_mask.for_launch(BM, BN, 0), dropout),
        )  # fmt: skip
        return StackedSurvey(results, sizes)

    return run
