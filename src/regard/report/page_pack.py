"""How numbers are packed into a page: square roots quantized to bytes, in base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "MAP_STEPS",
    "WEIGHT_STEPS",
    "cell_edges",
    "index_bytes",
    "merge_cells",
    "pack_floats",
    "pack_maps",
    "pack_strongest",
    "quantize_root",
]

MAP_STEPS = 255  # one byte per cell
WEIGHT_STEPS = 65535  # two bytes per weight

Numbers = npt.NDArray[np.float64]


def quantize_root(values: Numbers, largest: npt.ArrayLike, steps: int) -> npt.NDArray[np.int64]:
    """Quantize √(value / largest) to `steps`: fine where weights are small, and 0 only for exact zeros.

    Decode with largest · (count / steps)²; the error is at most largest / steps, and less for small values.

    >>> quantize_root(np.array([0.0, 1e-9, 0.25, 1.0]), 1.0, 255).tolist()
    [0, 1, 128, 255]
    """
    largest = np.asarray(largest, dtype=np.float64)
    share = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0.0).clip(0.0, 1.0)
    counts = np.rint(np.sqrt(share) * steps).astype(np.int64)
    return np.where((counts == 0) & (values > 0.0), 1, counts)


def cell_edges(length: int, cells: int) -> npt.NDArray[np.int64]:
    """Where each cell of a map begins, and where the last one ends: row i is in cell ⌊i·cells/length⌋.

    >>> cell_edges(10, 4).tolist()
    [0, 3, 5, 8, 10]
    """
    return -(-np.arange(cells + 1, dtype=np.int64) * length // cells)


def merge_cells(cells: Numbers, length: tuple[int, int], merge: tuple[int, int]) -> Numbers:
    """Merge (down, across) cells of (heads, height, width) maps into one, to the exact mean weight.

    >>> merge_cells(np.array([[[1.0, 0.0], [0.0, 0.5]]]), (3, 2), (2, 1)).round(3).tolist()
    [[[0.667, 0.167]]]
    """
    for axis, size, step in ((1, length[0], merge[0]), (2, length[1], merge[1])):
        counts = np.diff(cell_edges(size, cells.shape[axis])).astype(np.float64)
        starts = np.arange(0, cells.shape[axis], step)
        counted = counts[:, None] if axis == 1 else counts
        totals = np.add.reduceat(counts, starts)
        merged = np.add.reduceat(cells * counted, starts, axis=axis)
        cells = merged / (totals[:, None] if axis == 1 else totals)
    return cells


def pack_maps(cells: Sequence[Tensor], length: tuple[int, int], merge: tuple[int, int]) -> tuple[str, str]:
    """Pack a layer's maps: the largest cell of each, and every cell quantized."""
    merged = merge_cells(_finite(torch.stack(list(cells))), length, merge)
    largest = merged.max(axis=(1, 2)).astype(np.float32)
    counts = quantize_root(merged, largest.astype(np.float64)[:, None, None], MAP_STEPS)
    return _base64(largest.astype("<f4")), _base64(counts.astype(np.uint8))


def pack_strongest(
    pairs: Sequence[tuple[Tensor, Tensor]], parts: Sequence[tuple[int, int]], k: int, keys: int
) -> tuple[str, str]:
    """Pack the k strongest keys of each query in `parts`, strongest first: keys and weights; weight 0 means none."""
    rows = np.concatenate([np.arange(start, stop) for start, stop in parts] or [np.arange(0)])
    weights = np.stack([_finite(values) for values, _ in pairs])[:, rows]
    indices = np.stack([found.cpu().numpy().astype(np.int64) for _, found in pairs])[:, rows]
    weights = np.where(indices < 0, 0.0, weights)
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :k]
    weights, indices = np.take_along_axis(weights, order, -1), np.take_along_axis(indices, order, -1)
    counts = quantize_root(weights, 1.0, WEIGHT_STEPS).astype("<u2")
    narrow = np.ascontiguousarray(indices.clip(min=0).astype("<u4")).view(np.uint8)
    narrow = narrow.reshape(*indices.shape, 4)[..., : index_bytes(keys)]
    return _base64(np.ascontiguousarray(narrow)), _base64(counts)


def index_bytes(keys: int) -> int:
    """How many bytes a key's index needs.

    >>> index_bytes(256), index_bytes(257), index_bytes(100_000)
    (1, 2, 3)
    """
    return max(1, ((keys - 1).bit_length() + 7) // 8)


def pack_floats(rows: Sequence[Sequence[float]]) -> str:
    """Pack numbers as float32; NaN and inf are kept."""
    with np.errstate(over="ignore"):
        return _base64(np.array(rows, dtype=np.float64).astype("<f4"))


def _finite(values: Tensor) -> Numbers:
    numbers: Numbers = values.detach().to(device="cpu", dtype=torch.float64).numpy()
    return np.where(np.isfinite(numbers), numbers, 0.0).clip(min=0.0)


def _base64(numbers: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(numbers.tobytes()).decode("ascii")
