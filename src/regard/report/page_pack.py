"""How numbers travel in a page: counted in steps of their square root, as bytes, in base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["MAP_STEPS", "WEIGHT_STEPS", "coarser", "edges", "floats", "in_steps", "maps", "strongest", "width_of"]

MAP_STEPS = 255  # one byte a cell
WEIGHT_STEPS = 65535  # two bytes a weight

Numbers = npt.NDArray[np.float64]


def in_steps(values: Numbers, largest: npt.ArrayLike, steps: int) -> npt.NDArray[np.int64]:
    """Count √(value / largest) in `steps`: fine where weights are small, and 0 only for what is exactly 0.

    The way back is largest · (count / steps)²; it errs by at most largest / steps, and by less for small values.

    >>> in_steps(np.array([0.0, 1e-9, 0.25, 1.0]), 1.0, 255).tolist()
    [0, 1, 128, 255]
    """
    largest = np.asarray(largest, dtype=np.float64)
    share = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0.0).clip(0.0, 1.0)
    counts = np.rint(np.sqrt(share) * steps).astype(np.int64)
    return np.where((counts == 0) & (values > 0.0), 1, counts)


def edges(length: int, cells: int) -> npt.NDArray[np.int64]:
    """Where each cell of a map begins, and where the last one ends: row i is in cell ⌊i·cells/length⌋.

    >>> edges(10, 4).tolist()
    [0, 3, 5, 8, 10]
    """
    return -(-np.arange(cells + 1, dtype=np.int64) * length // cells)


def coarser(cells: Numbers, length: tuple[int, int], every: tuple[int, int]) -> Numbers:
    """Merge `every` cells of each side of (heads, height, width) maps into one, to the exact mean weight.

    >>> coarser(np.array([[[1.0, 0.0], [0.0, 0.5]]]), (3, 2), (2, 1)).round(3).tolist()
    [[[0.667, 0.167]]]
    """
    for axis, size, step in ((1, length[0], every[0]), (2, length[1], every[1])):
        counts = np.diff(edges(size, cells.shape[axis])).astype(np.float64)
        starts = np.arange(0, cells.shape[axis], step)
        counted = counts[:, None] if axis == 1 else counts
        totals = np.add.reduceat(counts, starts)
        merged = np.add.reduceat(cells * counted, starts, axis=axis)
        cells = merged / (totals[:, None] if axis == 1 else totals)
    return cells


def maps(cells: Sequence[Tensor], length: tuple[int, int], every: tuple[int, int]) -> tuple[str, str]:
    """Pack a layer's maps: the largest cell of each, and every cell in steps of its root."""
    merged = coarser(_plain(torch.stack(list(cells))), length, every)
    largest = merged.max(axis=(1, 2)).astype(np.float32)
    counts = in_steps(merged, largest.astype(np.float64)[:, None, None], MAP_STEPS)
    return _base64(largest.astype("<f4")), _base64(counts.astype(np.uint8))


def strongest(
    pairs: Sequence[tuple[Tensor, Tensor]], parts: Sequence[tuple[int, int]], k: int, keys: int
) -> tuple[str, str]:
    """Pack the k strongest keys of each query in `parts`, the strongest first: keys, and weights; 0 stands for none."""
    rows = np.concatenate([np.arange(start, stop) for start, stop in parts] or [np.arange(0)])
    weights = np.stack([_plain(values) for values, _ in pairs])[:, rows]
    indices = np.stack([found.cpu().numpy().astype(np.int64) for _, found in pairs])[:, rows]
    weights = np.where(indices < 0, 0.0, weights)
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :k]
    weights, indices = np.take_along_axis(weights, order, -1), np.take_along_axis(indices, order, -1)
    counts = in_steps(weights, 1.0, WEIGHT_STEPS).astype("<u2")
    narrow = np.ascontiguousarray(indices.clip(min=0).astype("<u4")).view(np.uint8)
    narrow = narrow.reshape(*indices.shape, 4)[..., : width_of(keys)]
    return _base64(np.ascontiguousarray(narrow)), _base64(counts)


def width_of(keys: int) -> int:
    """How many bytes a key's index needs.

    >>> width_of(256), width_of(257), width_of(100_000)
    (1, 2, 3)
    """
    return max(1, ((keys - 1).bit_length() + 7) // 8)


def floats(rows: Sequence[Sequence[float]]) -> str:
    """Pack numbers in single precision; NaN and inf stay what they are."""
    with np.errstate(over="ignore"):
        return _base64(np.array(rows, dtype=np.float64).astype("<f4"))


def _plain(values: Tensor) -> Numbers:
    numbers: Numbers = values.detach().to(device="cpu", dtype=torch.float64).numpy()
    return np.where(np.isfinite(numbers), numbers, 0.0).clip(min=0.0)


def _base64(numbers: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(numbers.tobytes()).decode("ascii")
