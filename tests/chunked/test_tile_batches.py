"""Batches of equal tiles: every visible pair is in one tile, rows meet their keys in order, overlaps add in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import regard
from attention_inputs import inputs
from batched_cases import MASKS, N, problem
from regard.chunked import tile_batches
from regard.chunked.tile_batches import TileBatch
from regard.chunked.tile_ops import Workspace
from regard.core.folded import FoldedProblem
from regard.core.spec import Spec
from regard.core.tiling import TileSizes


def cells(tiles: TileBatch) -> Iterator[tuple[int, int, slice, slice]]:
    """The item, head, rows and keys of each tile."""
    for i in range(tiles.count):
        row, key = tiles.row + i * tiles.row_step, tiles.key + i * tiles.key_step
        for head in range(tiles.heads.start, tiles.heads.stop):
            yield tiles.batch.start, head, slice(row, row + tiles.height), slice(key, key + tiles.width)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("name", MASKS)
def test_every_visible_pair_is_in_one_tile_and_rows_meet_keys_in_order(name: str, threads: int) -> None:
    mask = MASKS[name]()
    allowed = torch.ones(N, N, dtype=torch.bool) if mask is None else mask.dense(N, N).expand(1, 1, N, N)[0, 0]
    x = problem(mask)
    seen = torch.zeros(1, 2, N, N, dtype=torch.bool)
    opened = torch.zeros(2, N, dtype=torch.bool)
    found = tile_batches.tile_batches(x, TileSizes(32, threads=threads), Workspace())
    assert found is not None
    for tiles in found:
        for item, head, rows, keys in cells(tiles):
            visible = torch.ones(tiles.height, tiles.width, dtype=torch.bool)
            if tiles.hidden is not None:
                visible = tiles.hidden.keep.bool()
            last, first = last_key(seen[item, head, rows]), first_key(visible) + keys.start
            assert bool((last < first).all())
            assert tiles.opens == bool((~opened[head, rows]).all())
            seen[item, head, rows, keys] |= visible
            opened[head, rows] = True
    assert torch.equal(seen, allowed.expand_as(seen))


def last_key(visible: Tensor) -> Tensor:
    """The last visible key of each row, −1 where there is none."""
    return torch.where(visible, torch.arange(visible.shape[1]), -1).amax(1)


def first_key(visible: Tensor) -> Tensor:
    """The first visible key of each row, N where there is none."""
    return torch.where(visible, torch.arange(visible.shape[1]), N).amin(1)


def test_strips_of_a_window_are_one_batch_per_head() -> None:
    query = torch.zeros(1, 1, 1, 128 * 64, 4)
    x = FoldedProblem(query, query[:, :, 0], query[:, :, 0], None, (), Spec(128 * 64, 128 * 64, regard.window(256)))
    found = list(tile_batches.tile_batches(x, TileSizes(128, threads=32), Workspace()) or ())
    assert [tiles.count for tiles in found] == [1, 1, 62]


@pytest.mark.parametrize("step", [0, 3, 5, 8, 11])
def test_tiles_that_overlap_add_to_their_keys_in_the_order_of_their_rows(step: int) -> None:
    count, width = 4, 8
    part = torch.randn(2 * count, width, 3) * 10.0 ** torch.randint(-4, 5, (2 * count, 1, 1))
    total = torch.randn(1, 2, 60, 3)
    expected = total.clone()
    for head in range(2):
        for i in range(count):
            expected[0, head, 5 + i * step :][:width] += part[head * count + i]
    tiles = TileBatch(slice(0, 1), slice(0, 2), 0, 5, 4, step, count, 4, width, True, None)
    tiles.add_keys(total, part)
    assert torch.equal(total, expected)


def test_other_problems_are_left_to_the_strips() -> None:
    def batched(x: FoldedProblem) -> bool:
        return tile_batches.tile_batches(x, TileSizes(64), Workspace()) is not None

    x = problem(regard.causal())
    assert batched(x)
    assert not batched(x._replace(bias=torch.zeros(1, 1, 1, N, N)))
    assert not batched(x._replace(spec=Spec(N, N, regard.causal(), dropout=0.5)))
    assert not batched(x._replace(spec=Spec(N, N, regard.dense(torch.ones(N, N, dtype=torch.bool)))))
    half: Tensor = x.query[..., :50, :]
    assert not batched(x._replace(query=half, spec=Spec(50, N, regard.causal())))


def test_the_tiles_of_a_mask_without_tensors_are_found_once() -> None:
    q, k, v = inputs(1, 1, n=300, m=300, d=8)
    tile_batches._remembered.cache_clear()
    for _ in range(3):
        regard.attention(q, k, v, mask=regard.window(17), backend="chunked")
    assert tile_batches._remembered.cache_info().misses == 1
