"""Hopper kernels for statistics of the weights, without a GPU: they compile for sm_90; no cell of a map is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hopper_compiled
import regard
from hopper_compiled import N, biased, compiles, fits, machine_code, work
from regard.kernels.arguments import BIAS_TENSOR, KernelArgs
from regard.kernels.block_mask import BlockMask, block_mask
from regard.kernels.hopper import statistics_launch

SHARED, REGISTERS = hopper_compiled.SHARED // 2 - 1024, 128  # two programs share a multiprocessor
DIMS = (64, 96, 128, 192, 256)
KINDS = ("plain", "spans", "bits", "bias")
EVERY_DAY = [
    ("received", "spans", 128),
    ("pooled", "plain", 64),
    ("bands", "spans", 128),
]  # what each run compiles, some 5 s each
# Bytes of a thread that find no register, at most, by Triton 3.6 and 3.9; all others have room.
SPILLED = {
    ("received", "spans", 192): 160,
    ("received", "bits", 128): 16, ("received", "bits", 192): 168,
    ("pooled", "plain", 64): 80, ("pooled", "plain", 96): 104, ("pooled", "plain", 128): 144,
    ("pooled", "plain", 192): 296,
    ("pooled", "spans", 64): 104, ("pooled", "spans", 96): 144, ("pooled", "spans", 128): 184,
    ("pooled", "spans", 192): 344,
    ("pooled", "bits", 64): 552, ("pooled", "bits", 96): 584, ("pooled", "bits", 128): 608,
    ("pooled", "bits", 192): 776, ("pooled", "bits", 256): 104,
    ("bands", "spans", 64): 224, ("bands", "spans", 96): 232, ("bands", "spans", 128): 256,
    ("bands", "spans", 192): 368,
    ("bands", "plain", 192): 144,
    ("bands", "bits", 64): 216, ("bands", "bits", 96): 256, ("bands", "bits", 128): 288, ("bands", "bits", 192): 360,
    ("pooled", "bias", 192): 32, ("pooled", "bias", 256): 32,
}  # fmt: skip


hopper = hopper_compiled.hopper


def looked_at(dim: int, kind: str, **more: Any) -> KernelArgs:
    return work(dim, **biased(BIAS_TENSOR), **more) if kind == "bias" else work(dim, kind, **more)


def compiled(which: str, w: KernelArgs, tile: statistics_launch.StatisticsTile | None = None) -> Any:
    """A kernel for a work."""
    tile = tile or statistics_launch.tile_for(w)
    rows = [torch.empty(w.rows) for _ in range(2)]
    if which == "received":
        arguments, options = statistics_launch.received_arguments(w, torch.empty(2, 4, N), *rows, tile)
        return statistics_launch.received_kernel.warmup(**arguments, grid=(1,), **options)
    if which == "bands":
        grid = statistics_launch.bands_for(w, 7, tile)
        arguments, options = statistics_launch.pooled_arguments(w, torch.empty(2, 4, 7, N), *rows, grid, tile, True)
        return statistics_launch.pooled_kernel.warmup(**arguments, grid=(1,), **options)
    grid = statistics_launch.grid_for(w, 7, 5, tile)
    arguments, options = statistics_launch.pooled_arguments(w, torch.empty(2, 4, 7, 5, grid.parts), *rows, grid, tile)
    return statistics_launch.pooled_kernel.warmup(**arguments, grid=(1,), **options)


def every() -> Iterator[Any]:
    yield from EVERY_DAY
    for which in ("received", "pooled", "bands"):
        for kind in KINDS:
            for dim in DIMS:
                if (which, kind, dim) not in EVERY_DAY:
                    yield pytest.param(which, kind, dim, marks=pytest.mark.slow)


@compiles
@pytest.mark.parametrize(("which", "kind", "dim"), every())
def test_a_pass_compiles_for_hopper_and_spills_no_more_than_is_pinned(
    which: str, kind: str, dim: int, hopper: None
) -> None:
    fits(compiled(which, looked_at(dim, kind)), SPILLED.get((which, kind, dim), 0), SHARED, REGISTERS)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("which", ["received", "pooled", "bands"])
def test_all_else_compiles_for_hopper_together(which: str, hopper: None) -> None:
    fits(compiled(which, work(64, "spans", softcap=9.0, scales=torch.ones(4))), 152, SHARED, REGISTERS)


@compiles
def test_a_product_is_computed_while_the_tile_before_it_is_exponentiated(hopper: None) -> None:
    code = machine_code(compiled("received", work(128)))
    waits = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x\d", code)
    assert len(waits) == 3  # one for the first tile, with the second in flight; one for the second
    assert waits[1].count("MUFU.EX2") >= 64


def edge(x: int, cells: int, length: int) -> int:
    return -(-x * length // cells)


def columns(w: KernelArgs, grid: statistics_launch.Grid, tile: statistics_launch.StatisticsTile) -> list[range]:
    """The keys of each column of programs."""
    found = []
    for column in range(grid.columns):
        x = column // grid.parts * grid.cells
        start = edge(x, grid.width, w.m) + column % grid.parts * tile.BN
        found.append(range(start, min(start + tile.BN, edge(min(x + grid.cells, grid.width), grid.width, w.m))))
    return found


@pytest.mark.parametrize(("n", "m"), [(1, 1), (64, 300), (300, 64), (700, 513)])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 3), (64, 64), (7, 100)])
def test_every_key_of_a_map_belongs_to_one_program(n: int, m: int, height: int, width: int) -> None:
    height, width = min(height, n), min(width, m)
    q, k = torch.zeros(1, 2, n, 64), torch.zeros(1, 2, m, 64)
    w, tile = KernelArgs(q, k, k, BlockMask(n, m)), statistics_launch.StatisticsTile(128, 2)
    grid = statistics_launch.grid_for(w, height, width, tile)
    keys = [j for part in columns(w, grid, tile) for j in part]
    assert sorted(keys) == list(range(m))
    assert grid.bands * -(-height // grid.bands) >= height
    for part in columns(w, grid, tile):
        assert len({j * width // m for j in part}) <= grid.cells


@pytest.mark.parametrize(
    "mask", [regard.causal(), regard.window(40), regard.window(3) & regard.causal(), regard.window(0)]
)
@pytest.mark.parametrize(("n", "m"), [(300, 300), (700, 300), (300, 700), (1, 200)])
@pytest.mark.parametrize("width", [1, 3, 64])
def test_the_rows_that_a_column_of_programs_visits_are_all_that_see_it(
    mask: regard.Mask, n: int, m: int, width: int
) -> None:
    q, k = torch.zeros(1, 1, n, 64), torch.zeros(1, 1, m, 64)
    w, tile = KernelArgs(q, k, k, block_mask(mask, n, m, torch.device("cpu"))), statistics_launch.StatisticsTile(128, 2)
    grid = statistics_launch.grid_for(w, 1, width, tile)
    seen = mask.dense(n, m)
    for part, (first, full, until, behind) in zip(
        columns(w, grid, tile), statistics_launch._bounds(w, grid, tile)[0, 0].tolist(), strict=True
    ):
        pairs = seen[:, part.start : part.stop]
        assert not pairs[: first * 128].any()
        assert not pairs[behind * 128 :].any()
        assert pairs[full * 128 : until * 128].all()


def test_rows_are_cut_only_where_programs_are_few() -> None:
    k = torch.zeros(1, 1, 8192, 64)
    tile = statistics_launch.StatisticsTile(128, 2)
    few = statistics_launch.grid_for(KernelArgs(k, k, k, BlockMask(8192, 8192)), 64, 64, tile)
    k = k.expand(1, 32, 8192, 64)
    many = statistics_launch.grid_for(KernelArgs(k, k, k, BlockMask(8192, 8192)), 64, 64, tile)
    assert few.bands < many.bands == 64


def test_a_grid_that_cannot_be_counted_is_refused() -> None:
    k = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 1, 2**20, 64)
    w = KernelArgs(k, k, k, BlockMask(2**20, 2**20))
    assert any("31 bits" in r for r in statistics_launch.refuses_grid(w, 2048, 64))
    assert any("31 bits" in r for r in statistics_launch.refuses_grid(w, 64, 2048))
    assert not any("31 bits" in r for r in statistics_launch.refuses_grid(w, 1024, 1024))
