"""Count the rows of a call by kernels: their statistics, what is added to a tally, and the best of them. Nothing is read back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..compat.torch import is_current_device
from . import launch_cache
from .portable import row_tally as kernels

__all__ = [
    "TRANSFORMS",
    "ChosenRows",
    "RowBuckets",
    "RowLabels",
    "RowProducts",
    "RowRepeats",
    "RowStats",
    "RowSurvey",
    "Tally",
    "TokenTables",
    "best_rows",
    "row_products",
    "row_values",
    "tally_values",
]

TRANSFORMS = ("linear", "log", "asinh")  # the codes of `tally_values`
_VALUES, _SCORES = 12, 6  # statistics and scores of a row
_ROWS = 512  # of a program that finds statistics
_COUNTED, _STEPS = 256, 8  # of one that counts, at once and how often; packed sums hold at most 1024
_CHOICE = 2048  # among which one chooses; more than are chosen
_KEYS = 64  # that one multiplies with a row
_FOUR_WARPS = {"num_warps": 4}
_ONE_WARP = {"num_warps": 1, **({"maxnreg": 128} if torch.version.hip is None else {})}  # 16 programs share a multiprocessor


class RowStats(NamedTuple):
    """What the forward pass found: float32 (L, H, N) each."""

    entropy: Tensor
    lse: Tensor
    row_max: Tensor


class RowSurvey(NamedTuple):
    """The members of a survey that are counted: (L, H, N) each."""

    received: Tensor  # (L, H, M)
    health: Tensor
    distance: Tensor
    first: Tensor
    own: Tensor
    previous: Tensor
    largest: Tensor
    key: Tensor
    visible: Tensor


class RowRepeats(NamedTuple):
    """The weights on repeats of tokens, float32 (L, H, N) each."""

    duplicate: Tensor
    induction: Tensor


class RowLabels(NamedTuple):
    """What is known about the rows of a batch, (L, N) each."""

    seen_from: Tensor  # (L,), the number of keys from the first that receives weight on; 0 if none does
    counted: Tensor | None  # bool, None if all rows count
    column: Tensor | None  # int64, that of the row's token in the tables
    duplicate_back: Tensor | None  # how far back the nearest key is that counts as a repeat; 0 if there is none
    induction_back: Tensor | None


class TokenTables(NamedTuple):
    """What each token receives as a key, and how active heads are where it is the query: int64 (H, columns)."""

    received: Tensor | None  # None where keys are not rows
    active: Tensor


class RowBuckets(NamedTuple):
    """The bucket of each row of a batch, int32 (L · N,) each."""

    position: Tensor
    length: Tensor
    kind: Tensor


class Tally(NamedTuple):
    """The tables that rows are added to: int64 (statistics, H, …), but for the extremes, which are float64."""

    histogram: Tensor  # (…, 2 · bins), of which the second half is not used
    undefined: Tensor
    smallest: Tensor
    largest: Tensor
    position_sum: Tensor
    position_count: Tensor
    length_sum: Tensor
    length_count: Tensor
    class_sum: Tensor
    class_count: Tensor


class ChosenRows(NamedTuple):
    """A call, and some rows of its heads."""

    query: Tensor  # (L, H, N, D)
    key: Tensor  # (L, K, M, D)
    lse: Tensor  # float32 (L, H, N)
    at: Tensor  # int64 (3, chosen): the heads, items and rows; contiguous in its rows


class RowProducts(NamedTuple):
    """Numbers of the chosen rows of several calls, float32."""

    products: Tensor  # (chosen, M), of the row with each key
    lse: Tensor  # (chosen,)


def row_values(
    stats: RowStats,
    survey: RowSurvey,
    repeats: RowRepeats | None,
    labels: RowLabels,
    tables: TokenTables | None,
    sink: Tensor | None,
    unit: float,
) -> tuple[Tensor, Tensor]:
    """Every statistic of every row (statistics, H, L · N), and its scores (behaviours, H, L · N); adds to the tables of tokens.

    A row that does not count has −inf for every statistic, and −1 for every score.
    """
    L, H, N = stats.lse.shape
    values, scores = stats.lse.new_empty(_VALUES, H, L * N), stats.lse.new_empty(_SCORES, H, L * N)
    tensors = {
        "stats": stats, "survey": survey, "repeats": repeats, "labels": labels, "tables": tables, "sink": sink,
        "values": values, "scores": scores,
    }  # fmt: skip
    width = 0 if tables is None else tables.active.shape[1]
    numbers = {"n": N, "m": survey.received.shape[-1], "heads": H, "items": L, "width": width, "unit": 1.0 / unit, "BR": _ROWS}
    _start(kernels.row_values, triton.cdiv(N, _ROWS) * L * H, tensors, numbers, _FOUR_WARPS)
    return values, scores


def tally_values(values: Tensor, scales: Tensor, buckets: RowBuckets, tally: Tally) -> None:
    """Add values (statistics, H, rows) to a tally; `scales` are float64 (statistics, 4): low, bins per unit, transform, units per 1."""
    S, H, rows = values.shape
    tensors = {"values": values, "scales": scales, "buckets": buckets, "tally": tally}
    numbers = {
        "rows": rows, "heads": H, "lengths": tally.position_sum.shape[-1], "classes": tally.class_sum.shape[-1],
        "BINS": tally.histogram.shape[-1] // 2, "BR": _COUNTED, "STEPS": _STEPS,
    }  # fmt: skip
    _start(kernels.tally_values, triton.cdiv(rows, _COUNTED * _STEPS) * S * H, tensors, numbers, _ONE_WARP)


def best_rows(scores: Tensor, floor: Tensor, count: int) -> Tensor:
    """The ranks of the rows with the largest scores (behaviours, H, rows), ties to the first: int64 (behaviours, H, count).

    Scores below `floor`, float32 (behaviours, H), are left out. Blocks of rows choose first, and then what they chose competes.
    """
    found = scores
    while found is scores or found.shape[-1] > count:
        S, H, size = found.shape
        blocks = triton.cdiv(size, _CHOICE)
        ranks = torch.empty(S, H, blocks * count, dtype=torch.int64, device=scores.device)
        numbers = {"size": size, "count": count, "PLACES": triton.next_power_of_2(count), "BR": _CHOICE}
        _start(kernels.best_rows, blocks * S * H, {"given": found, "floor": floor, "out": ranks}, numbers, _FOUR_WARPS)
        found = ranks
    return found


def row_products(calls: Sequence[ChosenRows]) -> RowProducts:
    """The products of single rows of calls with all their keys, and their lse; all have as many keys."""
    (M, D), counts = calls[0].key.shape[2:], [call.at.shape[1] for call in calls]
    new = calls[0].lse.new_empty
    out = RowProducts(new(sum(counts), M), new(sum(counts)))
    for call, *parts in zip(calls, *(x.split(counts) for x in out), strict=True):
        query, key, lse, at = call
        strides = query.stride(), key.stride(), lse.stride()
        with torch.cuda.device_of(query):
            kernels.row_products[(triton.cdiv(M, _KEYS) * at.shape[1],)](
                query, key, lse, at, *parts, strides, M, query.shape[1] // key.shape[1], at.stride(0),
                D=D, DP=triton.next_power_of_2(D), BN=_KEYS, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
    return out


def _start(kernel: Any, programs: int, tensors: dict[str, Any], numbers: dict[str, Any], options: dict[str, int]) -> None:
    """Start a kernel on the device of its tensors, which Triton takes to be the current one."""
    found = list(_flat(tensors.values()))
    addresses = tuple(None if x is None else (x.dtype, x.data_ptr() & 15) for x in found)
    device = next(x.device for x in found if x is not None)
    if device.type == "cuda" and not is_current_device(device):
        with torch.cuda.device(device):
            return _start(kernel, programs, tensors, numbers, options)
    key = (kernel.fn.__name__, device, programs, *numbers.values(), addresses)
    launch = launch_cache.find(key)
    if launch is not None:
        launch.again(**tensors)
    else:
        launch_cache.start(key, kernel, programs, {**tensors, **numbers}, {**options, "enable_fp_fusion": True}, tensors)
    return None


def _flat(given: Iterable[Any]) -> Iterable[Tensor | None]:
    for x in given:
        if isinstance(x, tuple):
            yield from _flat(x)
        else:
            yield x
