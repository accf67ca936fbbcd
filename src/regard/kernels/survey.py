"""The survey of a call: every statistic of its weights, from one pass by keys and one by rows."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..chunked.statistics import Survey, first_keys
from ..compat.triton import INTERPRETED
from .arguments import KernelArgs
from .launch import on_its_device, pooled, received
from .portable import launch as portable
from .portable.configs import hopper

__all__ = ["survey"]

_MOST_NUMBERS = 2**28  # in (L, H, height, M): a GiB


@on_its_device
def survey(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, height: int, width: int) -> Survey:
    """Every statistic of the weights, with a map of height × width cells; nothing is read back to the host.

    The pass by keys gives what each key receives from each row of cells, whose sums are `received` and the map.
    """
    L, H, N = w.rows
    if L * H * height * w.m > _MOST_NUMBERS:
        total, cells = received(w, row_max, log_row_sum), pooled(w, row_max, log_row_sum, height, width)
    else:
        bands = _received_by_bands(w, row_max, log_row_sum, height)  # (L, H, height, M)
        total, cells = bands.sum(2), _cells(bands, N, width)
    rows = portable.row_survey(w, row_max, log_row_sum, first_keys(total))
    return Survey(cells, total, *rows)


def _received_by_bands(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, bands: int) -> Tensor:
    if not INTERPRETED and hopper(w.query.device):
        from .hopper import statistics_launch as chip

        if not chip.refuses_bands(w, bands):
            return chip.received_by_bands(w, row_max, log_row_sum, bands)
    return portable.received_by_bands(w, row_max, log_row_sum, bands)


def _cells(bands: Tensor, n: int, width: int) -> Tensor:
    """The mean weight in each cell, from what each key receives from each row of cells: (L, H, height, width)."""
    height, m = bands.shape[2:]
    if n % height == 0 and m % width == 0:
        sums: Tensor = bands.unflatten(-1, (width, m // width)).sum(-1)
        return sums / (n // height * (m // width))
    keys, area = _columns(n, m, height, width, bands.device)
    padded = torch.nn.functional.pad(bands, (0, 1))  # key M, which is 0, fills the narrower columns
    uneven: Tensor = padded.index_select(-1, keys).unflatten(-1, (width, -1)).sum(-1)
    return uneven / area


@lru_cache(maxsize=64)
def _columns(n: int, m: int, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The keys of each column of cells, filled up with key m; and the number of pairs in each cell."""
    down, across = (torch.arange(cells + 1, device="cpu") * size for cells, size in ((height, n), (width, m)))
    tops, lefts = -(-down // height), -(-across // width)  # row i is in cell ⌊i·height/n⌋
    tall, wide = tops.diff(), lefts.diff()
    keys = lefts[:-1, None] + torch.arange(int(wide.max()), device="cpu")
    keys = torch.where(keys < lefts[1:, None], keys, m)
    return keys.flatten().to(device), (tall[:, None] * wide).float().to(device)
