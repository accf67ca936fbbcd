"""The survey of a call: every statistic of its weights, from one pass by keys, its sums, and one pass by rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunked.statistics import Survey, first_keys
from ..compat.triton import INTERPRETED
from . import launch_cache
from .arguments import KernelArgs
from .launch import on_its_device, pooled, received
from .portable import launch as portable
from .portable.configs import hopper

__all__ = ["survey"]

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
    return Survey(cells, total, *portable.row_survey(w, row_max, log_row_sum, entropy, first), peaks)


def _received_by_bands(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, bands: int) -> Tensor:
    if not INTERPRETED and hopper(w.query.device):
        from .hopper import statistics_launch as chip

        by_chip = launch_cache.find(key := ("route of the bands", bands, w.signature))
        if by_chip is None:
            launch_cache.store(key, by_chip := not chip.refuses_bands(w, bands))
        if by_chip:
            return chip.received_by_bands(w, row_max, log_row_sum, bands)
    return portable.received_by_bands(w, row_max, log_row_sum, bands)
