"""An attention map at every zoom level: level 0 holds the weights, a cell of level z the mean of 2^z × 2^z of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.chunked.tile_ops import Workspace, weights
from regard.compat.torch import without_autocast
from regard.core.tiling import KeyRun, Tile
from regard.errors import ArgumentError, DtypeError
from regard.masks.base import FULL, HIDDEN
from regard.observation import Observation
from regard.report.atlas_head import one_head

__all__ = ["MAX_DIRECT_LEVEL", "SIDE", "Pyramid", "levels"]

SIDE = 256
"""Cells along each side of a tile."""
MAX_DIRECT_LEVEL = 3
"""Up to this level a tile is computed on demand: 2,048 × 2,048 pairs take about 20 ms on two cores, d 64."""
_MAX_BASE_CELLS = 2**26  # with more, the base level is a coarser one
_BLOCK = 512  # rows and keys per block of the mask
_MAX_KEYS = 4096  # keys computed at once
_ONE = slice(0, 1)


def levels(rows: int, keys: int) -> tuple[int, int]:
    """The first level that needs sums over the whole map (base), and the level at which the map is one tile (top).

    >>> levels(100_000, 100_000), levels(2000, 2000)
    ((4, 9), (4, 3))
    """
    top = max((max(rows, keys, 1) - 1).bit_length() - (SIDE - 1).bit_length(), 0)
    base = MAX_DIRECT_LEVEL + 1
    while base < top and _cell_count(rows, base) * _cell_count(keys, base) > _MAX_BASE_CELLS:
        base += 1
    return base, top


class Pyramid:
    """One head of an observation as a map with levels; tiles are computed exactly, from q and k, on demand.

    Levels below `base` need only the tile itself. From `base` on they need sums over the whole map, which `advance`
    computes strip by strip, from the top; cells it has not reached are NaN. At level `top` the whole map is one tile.

    >>> import torch, regard
    >>> x = torch.zeros(1, 300, 8)
    >>> pyramid = Pyramid(regard.observe(x, x, x, mask=regard.causal()))
    >>> pyramid.top, pyramid.tile(0, 0, 0).shape, pyramid.tile(0, 1, 1).shape
    (1, torch.Size([256, 256]), torch.Size([44, 44]))
    >>> pyramid.tile(1, 0, 0)[0, :2]  # (1 + 0 + 1/2 + 1/2) / 4
    tensor([0.5000, 0.0000])
    """

    def __init__(self, observation: Observation, item: int = 0, head: int = 0) -> None:
        if not isinstance(observation, Observation):
            raise DtypeError(f"Pyramid: observation must come from regard.observe. Got {type(observation).__name__}.")
        self._seen = observation
        self._x, self._row_stats = one_head(observation, item, head)
        self.rows, self.keys = self._x.spec.n, self._x.spec.m
        self.base, self.top = levels(self.rows, self.keys)
        self._strip = max(_BLOCK, 1 << self.top)  # rows: a whole number of cells at every level
        self._sums: dict[int, Tensor] = {}
        self._next_row = 0  # the first row that is missing at the base level
        self._row_blocks: list[tuple[range, list[KeyRun]]] = []
        self._pairs_in_strips = self._pairs_done = self._pairs_total = 0  # in finished strips, so far, overall

    def __repr__(self) -> str:
        return f"Pyramid({self.rows} queries × {self.keys} keys, {self.top + 1} levels, {self.progress:.0%} known)"

    @property
    def progress(self) -> float:
        """The share of the coarse levels that is known, 0 to 1."""
        if self.known == self.rows:
            return 1.0
        return self._pairs_done / self._pairs_total if self._pairs_total else 0.0

    @property
    def known(self) -> int:
        """How many rows of the map, counted from the top, are known at every level."""
        return self.rows if self.top < self.base else self._next_row

    @property
    def bytes(self) -> int:
        """Memory held, at most: folded queries and keys, and the sums."""
        held = sum(x.numel() * x.element_size() for x in (self._x.query, self._x.key))
        return held + sum(4 * x.numel() for x in self._sums.values())

    def shape(self, level: int) -> tuple[int, int]:
        """How many cells the level has: (down, across)."""
        return _cell_count(self.rows, level), _cell_count(self.keys, level)

    @torch.no_grad()
    @without_autocast
    def tile(self, level: int, row: int, col: int) -> Tensor:
        """The mean weights of tile (row, col): float32, at most 256 × 256; NaN where `advance` has not been."""
        self._seen.problem_for("tile")
        down, across = self._tile_cells(level, row, col)
        if level < self.base:
            found = self._compute_cells(level, down, across)
        else:
            found = torch.full((len(down), len(across)), torch.nan, device="cpu")
            until = down.stop if self.known == self.rows else min(down.stop, self.known >> level)
            if until > down.start:
                found[: until - down.start] = self._sums[level][down.start : until, across.start : across.stop]
        height, width = _cell_sizes(down, level, self.rows), _cell_sizes(across, level, self.keys)
        return (found.cpu() / (height[:, None] * width)).float()

    @torch.no_grad()
    @without_autocast
    def advance(self, between_blocks: Callable[[], object] = lambda: None) -> bool:
        """Compute the next strip of the coarse levels, and return whether there was one.

        `between_blocks` is called before each block; if it raises, the next call starts the strip again.
        """
        if self.known == self.rows:
            return False
        self._seen.problem_for("advance")
        if not self._row_blocks:
            self._prepare()
        rows = range(self._next_row, min(self._next_row + self._strip, self.rows))
        workspace, self._pairs_done = Workspace(), self._pairs_in_strips
        for block, run in ((block, run) for block, runs in self._row_blocks if block.start in rows for run in runs):
            between_blocks()
            down = slice(block.start >> self.base, _cell_count(block.stop, self.base))
            across = slice(run.start >> self.base, _cell_count(run.stop, self.base))
            self._sums[self.base][down, across] = self._block_sums(block, run, self.base, workspace).float().cpu()
            self._pairs_done += len(block) * (run.stop - run.start)
        for level in range(self.base + 1, self.top + 1):
            finer = self._sums[level - 1][rows.start >> level - 1 : _cell_count(rows.stop, level - 1)]
            self._sums[level][rows.start >> level : _cell_count(rows.stop, level)] = _pool(finer, 1)
        self._next_row, self._pairs_in_strips = rows.stop, self._pairs_done
        return True

    def _prepare(self) -> None:
        """Allocate the sums, and find the blocks that are not hidden."""
        coarse = range(self.base, self.top + 1)  # NumPy's zeros commit memory only when written
        self._sums = {level: torch.from_numpy(np.zeros(self.shape(level), np.float32)) for level in coarse}
        self._row_blocks = list(self._visible_blocks(range(self.rows), range(self.keys), self.base))
        self._pairs_total = sum(len(block) * (run.stop - run.start) for block, runs in self._row_blocks for run in runs)

    def _compute_cells(self, level: int, down: range, across: range) -> Tensor:
        """The sums over cells, computed from q and k."""
        rows = range(down.start << level, min(down.stop << level, self.rows))
        keys = range(across.start << level, min(across.stop << level, self.keys))
        found, workspace = self._row_stats.row_max.new_zeros(len(down), len(across)), Workspace()
        for block, runs in self._visible_blocks(rows, keys, level):
            top = (block.start >> level) - down.start
            for run in runs:
                left = (run.start >> level) - across.start
                sums = self._block_sums(block, run, level, workspace)
                found[top : top + sums.shape[0], left : left + sums.shape[1]] = sums
        return found

    def _visible_blocks(self, rows: range, keys: range, level: int) -> Iterator[tuple[range, list[KeyRun]]]:
        """Blocks of rows, each with its runs of keys that some row sees; both in whole cells."""
        cost = self._x.spec.cost  # temporaries per pair
        step = max(_BLOCK >> cost.bit_length() // 2, 1 << level)
        down, across = [*rows[::step], rows.stop], [*keys[::step], keys.stop]
        mask = self._x.spec.mask
        states = [[FULL] * (len(across) - 1)] * (len(down) - 1)
        if mask is not None:
            row_edges, key_edges = (torch.tensor(each, device="cpu") for each in (down, across))
            states = mask.cover(row_edges, key_edges, self.rows, self.keys).tolist()
        for top, bottom, line in zip(down, down[1:], states, strict=False):
            runs = []
            for state, group in groupby(range(len(line)), key=line.__getitem__):
                if state != HIDDEN:
                    blocks = list(group)
                    edges = range(across[blocks[0]], across[blocks[-1] + 1])
                    starts = edges[:: max(_MAX_KEYS // cost, step)]
                    runs += [KeyRun(j, min(j + starts.step, edges.stop), state == FULL) for j in starts]
            yield range(top, bottom), runs

    def _block_sums(self, rows: range, run: KeyRun, level: int, workspace: Workspace) -> Tensor:
        """The sums over the cells of one block."""
        tile = Tile(_ONE, _ONE, slice(rows.start, rows.stop), slice(run.start, run.stop))
        return _pool(weights(self._x, tile, run, self._row_stats, workspace)[0, 0, 0], level)

    def _tile_cells(self, level: int, row: int, col: int) -> tuple[range, range]:
        """The cells of a tile: (down, across)."""
        if not _is_int(level) or not 0 <= level <= self.top:
            raise ArgumentError(f"tile: level must be a whole number from 0 to {self.top}. Got {level!r}.")
        height, width = self.shape(level)
        for name, at, size in (("row", row, height), ("col", col, width)):
            if not _is_int(at) or not 0 <= at * SIDE < size:
                raise ArgumentError(
                    f"tile: {name} must be a whole number from 0 to {(size - 1) // SIDE} at level {level}. Got {at!r}."
                )
        down = range(row * SIDE, min((row + 1) * SIDE, height))
        return down, range(col * SIDE, min((col + 1) * SIDE, width))


def _cell_count(size: int, level: int) -> int:
    """How many cells of a level cover `size` rows or keys."""
    return -(-size >> level)


def _cell_sizes(cells: range, level: int, size: int) -> Tensor:
    """How many rows or keys each cell covers: fewer in the last one."""
    starts = torch.arange(cells.start, cells.stop, device="cpu") << level
    return (size - starts).clamp(max=1 << level).float()


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _pool(x: Tensor, level: int) -> Tensor:
    """Sums over cells of 2^level × 2^level, smaller at the lower and right edges."""
    cell = 1 << level
    if cell == 1:
        return x
    if x.shape[0] % cell or x.shape[1] % cell:
        x = pad(x, (0, -x.shape[1] % cell, 0, -x.shape[0] % cell))
    down = x.view(-1, cell, x.shape[1]).sum(1)
    return down.view(len(down), -1, cell).sum(-1)
