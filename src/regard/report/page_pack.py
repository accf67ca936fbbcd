"""How numbers are packed into a page: square roots quantized to bytes, compressed, in base64."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "LEAST_WEIGHT",
    "MAP_STEPS",
    "WEIGHT_STEPS",
    "cell_edges",
    "index_bytes",
    "merge_cells",
    "pack_floats",
    "pack_maps",
    "pack_strongest",
    "quantize_maps",
    "quantize_root",
]

MAP_STEPS = (255, 127, 63)  # one byte per cell; the fewer, the smaller once compressed
WEIGHT_STEPS = (65535, 4095)  # of a single weight: two bytes; the fewer, the smaller once compressed
LEAST_WEIGHT = 0.001  # a page lists no single weight below this

Numbers = npt.NDArray[np.floating[Any]]
Lengths = tuple[int, int]


def quantize_root(values: Numbers, largest: npt.ArrayLike, steps: int) -> npt.NDArray[np.int64]:
    """Quantize √(value / largest) to `steps`: fine where weights are small, and 0 only for exact zeros.

    Decode with largest · (count / steps)²; the error is at most largest / steps, and less for small values.

    >>> quantize_root(np.array([0.0, 1e-9, 0.25, 1.0]), 1.0, 255).tolist()
    [0, 1, 128, 255]
    """
    largest = np.asarray(largest, dtype=values.dtype)
    share = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0.0).clip(0.0, 1.0)
    counts: npt.NDArray[np.int64] = np.rint(np.sqrt(share, out=share) * steps).astype(np.int64)
    counts[(counts == 0) & (values > 0.0)] = 1
    return counts


def cell_edges(length: int, cells: int) -> npt.NDArray[np.int64]:
    """Where each cell of a map begins, and where the last one ends: row i is in cell ⌊i·cells/length⌋.

    >>> cell_edges(10, 4).tolist()
    [0, 3, 5, 8, 10]
    """
    return -(-np.arange(cells + 1, dtype=np.int64) * length // cells)


def merge_cells(cells: Numbers, length: Lengths, merge: tuple[int, int]) -> Numbers:
    """Merge (down, across) cells of (heads, height, width) maps into one, to the exact mean weight.

    >>> merge_cells(np.array([[[1.0, 0.0], [0.0, 0.5]]]), (3, 2), (2, 1)).round(3).tolist()
    [[[0.667, 0.167]]]
    """
    for axis, size, step in ((1, length[0], merge[0]), (2, length[1], merge[1])):
        if step == 1:
            continue
        counts = np.diff(cell_edges(size, cells.shape[axis])).astype(cells.dtype)
        starts = np.arange(0, cells.shape[axis], step)
        counted = counts[:, None] if axis == 1 else counts
        totals = np.add.reduceat(counts, starts)
        merged = np.add.reduceat(cells * counted, starts, axis=axis)
        cells = merged / (totals[:, None] if axis == 1 else totals)
    return cells


def quantize_maps(
    cells: Sequence[Tensor], length: Lengths, merge: tuple[int, int], steps: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """The largest cell of each map, and every cell quantized: (heads,) and (heads, height, width)."""
    merged = merge_cells(_finite(torch.stack(list(cells))), length, merge)
    largest = merged.max(axis=(1, 2)).astype(np.float32)
    return largest, quantize_root(merged, largest[:, None, None], steps).astype(np.uint8)


def pack_maps(cells: Sequence[Tensor], length: Lengths, merge: tuple[int, int], steps: int) -> tuple[str, str]:
    """Pack a layer's maps: the largest cell of each, and every cell quantized."""
    largest, counts = quantize_maps(cells, length, merge, steps)
    return _base64(largest.astype("<f4").tobytes()), _compressed(counts)


def pack_strongest(
    pairs: Sequence[tuple[Tensor, Tensor]], parts: Sequence[tuple[int, int]], k: int, keys: int, steps: int
) -> tuple[str, str]:
    """Pack the k strongest keys of each query in `parts`, strongest first: keys and weights; weight 0 means none.

    Both are (bytes of a number, heads, k, queries): numbers that are alike are neighbours, and compress well.
    """
    values, found = (torch.stack(list(each)) for each in zip(*pairs, strict=True))  # (heads, queries, keys)
    values, found = (torch.cat([x[:, start:stop] for start, stop in (*parts, (0, 0))], 1) for x in (values, found))
    weights, indices = _finite(values), found.cpu().numpy().astype(np.int64)
    weights[(indices < 0) | (weights < LEAST_WEIGHT)] = 0.0
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :k]
    weights, indices = np.take_along_axis(weights, order, -1), np.take_along_axis(indices, order, -1)
    indices = np.where(weights > 0.0, indices, 0)
    counts = quantize_root(weights, 1.0, steps)
    return _compressed(_planes(indices, index_bytes(keys))), _compressed(_planes(counts, 2))


def _planes(numbers: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint8]:
    """Numbers (heads, queries, k) as `size` bytes each, the lowest first: (size, heads, k, queries)."""
    by_key = numbers.transpose(0, 2, 1)
    return np.stack([(by_key >> 8 * place & 255).astype(np.uint8) for place in range(size)])


def index_bytes(keys: int) -> int:
    """How many bytes a key's index needs.

    >>> index_bytes(256), index_bytes(257), index_bytes(100_000)
    (1, 2, 3)
    """
    return max(1, ((keys - 1).bit_length() + 7) // 8)


def pack_floats(rows: Sequence[Sequence[float]]) -> str:
    """Pack numbers as float32; NaN and inf are kept."""
    with np.errstate(over="ignore"):
        return _base64(np.array(rows, dtype=np.float64).astype("<f4").tobytes())


def _finite(values: Tensor) -> npt.NDArray[np.float32]:
    found = values.detach().to(device="cpu", dtype=torch.float32)
    numbers: npt.NDArray[np.float32] = torch.where(found.isfinite(), found, 0.0).clamp_(min=0.0).numpy()
    return numbers


def _compressed(numbers: npt.NDArray[np.uint8]) -> str:
    return _base64(zlib.compress(numbers.tobytes(), 6))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
