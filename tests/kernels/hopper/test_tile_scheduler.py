"""Which key blocks a row block visits in the Hopper forward, and which of them each of its consumer groups skips.

The kernel's own scheduler runs here in Python. The GPU tests would show a group that skips a visible key, or reads a
hidden one, as a wrong number; here it is a wrong block.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

import regard
from gluon_in_python import MASKS, in_python, pointed
from regard.kernels.block_lists import NONE, SPANS
from regard.kernels.block_mask import BlockMask, _mask_bits, block_mask
from regard.kernels.hopper import tile_scheduler
from regard.kernels.hopper.aggregates import KeyBlocks
from regard.kernels.hopper.configs import ROWS, Tile

CPU = torch.device("cpu")
key_block_range, group_range, entry_at, first_row, fixed_max_from, retries_often, work_tile = (
    in_python(x)
    for x in (
        tile_scheduler.key_block_range,
        tile_scheduler.group_range,
        tile_scheduler.entry_at,
        tile_scheduler.first_row,
        tile_scheduler.fixed_max_from,
        tile_scheduler.retries_often,
        tile_scheduler.work_tile,
    )
)


class Part(NamedTuple):
    row: int  # the first of a group
    blocks: list[int]  # key blocks that its row block visits, in the kernel's order
    start: int  # the first of them that the group does not skip …
    unmasked: int  # … the first without a mask …
    fixed: int  # … and the first with a fixed row max


def part_of(made: BlockMask, groups: int, BN: int, item: int, head: int, block: int, group: int) -> Part:
    tile = Tile(groups, BN, 2, 240)
    lists = pointed(made.by_rows(tile.BM, BN, tile.rows_before(made.n)))
    key_blocks = KeyBlocks(*key_block_range(lists, item, head, block, made.m, BN, made.kind))
    row = first_row(block, made.n, -(-made.n // tile.BM), group, groups)
    start, unmasked = group_range(lists, item, head, row, key_blocks, made.n, BN, made.kind)
    visited = [entry_at(lists, t, key_blocks, made.kind)[0] for t in range(key_blocks.total)]
    count = max(key_blocks.total, 1)
    clear = max(min(start, count - 1) + 1, unmasked)
    assert fixed_max_from(clear, count, key_blocks.num_full, key_blocks.total, 1) == count  # the safe loop takes all
    return Part(row, visited, start, unmasked, fixed_max_from(clear, count, key_blocks.num_full, key_blocks.total, 0))


def parts_of(made: BlockMask, groups: int, BN: int, item: int = 0, head: int = 0) -> list[Part]:
    """The parts of all groups of all row blocks, in the order of their rows."""
    blocks = range(-(-made.n // (groups * ROWS)))
    return sorted(part_of(made, groups, BN, item, head, block, group) for block in blocks for group in range(groups))


def changes(blocks: list[int]) -> int:
    """How often the order changes direction: it falls over the partial blocks and rises over the full ones."""
    rises = [a < b for a, b in pairwise(blocks)]
    return sum(a != b for a, b in pairwise(rises))


def check(made: BlockMask, truth: Tensor, groups: int, BN: int) -> list[list[int]]:
    """Check a block mask against its mask (items, heads, n, m): what each group of rows sees, in the kernel's order."""
    every = []
    spotless = made.by_rows(groups * ROWS, BN).all_keys_visible
    assert spotless is None if made.kind == NONE else bool(spotless) == bool(truth.any(2).all())
    for item in range(truth.shape[0]):
        for head in range(truth.shape[1]):
            parts = parts_of(made, groups, BN, item, head)
            assert [part.row for part in parts] == [at * ROWS for at in range(len(parts))]
            for row, blocks, start, unmasked, fixed in parts:
                rows = truth[item, head, row : row + ROWS]
                seen = {b for b, keys in enumerate(rows.split(BN, 1)) if keys.any()}
                assert len(set(blocks)) == len(blocks)
                assert changes(blocks) <= 1
                assert 0 <= start <= unmasked <= fixed <= max(len(blocks), 1)
                assert seen <= set(blocks[start:])
                assert len(rows) or start == max(len(blocks), 1)
                for b in blocks[unmasked:]:
                    keys = rows[:, b * BN : (b + 1) * BN]
                    assert keys.shape[1] == BN
                    assert keys.all()
                safe = [rows[:, b * BN : (b + 1) * BN].any(1) for b in blocks[start:fixed]]  # rows that have a row max
                assert not rows.any() or torch.stack(safe).any(0).equal(rows.any(1))
                every.append([b for b in blocks if b in seen])
    return every


@pytest.mark.parametrize(("groups", "BN"), [(3, 128), (2, 128), (2, 64)])
@pytest.mark.parametrize(("mask", "n", "m"), MASKS, ids=lambda x: repr(x)[:60] if isinstance(x, regard.Mask) else None)
def test_a_group_visits_every_block_it_sees_and_masks_every_hidden_pair(
    mask: regard.Mask, n: int, m: int, groups: int, BN: int
) -> None:
    truth = mask.dense(n, m).expand(*mask.lead, n, m)
    by_spans = check(block_mask(mask, n, m, CPU), truth, groups, BN)
    by_lists = check(BlockMask(n, m, mask_bits=_mask_bits(mask, n, m, CPU), lead=mask.lead), truth, groups, BN)
    assert by_spans == by_lists  # so that the results have the same bits


@pytest.mark.parametrize("n", [192 * 5, 192 * 5 + 64, 192 * 5 + 100])
def test_a_group_skips_what_only_later_rows_see_and_masks_one_block_of_a_causal_mask(n: int) -> None:
    BN = 128
    made = block_mask(regard.causal(), n, n, CPU)
    assert made.kind == SPANS
    parts = [part for part in parts_of(made, 3, BN) if part.row < n]
    visited = [(min(at * ROWS + ROWS, n) - 1) // BN + 1 for at in range(-(-n // ROWS))]
    assert [len(p.blocks) - p.start for p in parts] == visited
    assert [p.blocks[p.start] for p in parts] == [count - 1 for count in visited]
    assert [p.unmasked - p.start for p in parts] == [1] * len(parts)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(("n", "m"), [(4096, 4096), (1000, 1064), (500, 3000)])
def test_the_first_block_of_a_causal_mask_never_has_a_fixed_row_max(n: int, m: int, groups: int) -> None:
    parts = parts_of(block_mask(regard.causal(m - n), n, m, CPU), groups, 128)
    assert any(part.blocks[part.fixed :] for part in parts)
    assert not any(0 in part.blocks[part.fixed :] for part in parts)


@pytest.mark.parametrize("n", [64, 200, 4096])
def test_all_groups_of_the_last_block_have_rows_if_there_are_enough(n: int) -> None:
    made = block_mask(regard.causal(), n, n, CPU)
    blocks = -(-n // 192)
    rows = [part_of(made, 3, 128, 0, 0, blocks - 1, group).row for group in range(3)]
    assert rows[-1] == (n - 1) // ROWS * ROWS
    assert rows == sorted(rows) or blocks == 1
    longest = [max(len(part_of(made, 3, 128, 0, 0, block, g).blocks) for g in range(3)) for block in range(blocks)]
    assert longest == sorted(longest)


def test_groups_past_the_end_skip_all_blocks() -> None:
    made = block_mask(regard.everything(), 200, 500, CPU)
    assert part_of(made, 3, 128, 0, 0, 0, 2) == (0, [3, 0, 1, 2], 0, 1, 2)  # the last rows have no row max before
    assert part_of(made, 3, 128, 0, 0, 0, 0) == (256, [3, 0, 1, 2], 4, 4, 4)
    assert part_of(made, 2, 128, 0, 0, 1, 1) == (192, [3, 0, 1, 2], 0, 1, 2)


def longest_program(
    heads: int, together: int, n: int, BM: int, BN: int, left: int | None, programs: int = 132
) -> float:
    """How long causal passes take relative to even work, in key blocks; a tile costs one more than it visits.

    A program takes its next tile when so many key blocks are left of the current one; None: at its start.
    """
    blocks = -(-n // BM)
    tiles = (work_tile(t, blocks, heads, together)[0] for t in range(blocks * heads))
    lengths = [1 + -(-(block + 1) * BM // BN) for block in tiles]
    begun = [(0.0 if left is None else max(0.0, x - left), x, p) for p, x in enumerate(lengths[:programs])]
    heapify(begun)  # when a program takes its next tile, and when it is done with the current one
    waiting, ends = deque(lengths[programs:]), list(map(float, lengths[:programs]))
    while waiting:
        _, end, program = heappop(begun)
        length = waiting.popleft()
        ends[program] = end + length
        heappush(begun, (end if left is None else end + max(0, length - left), end + length, program))
    return max(ends) * programs / sum(lengths)


@pytest.mark.parametrize(
    ("heads", "together", "n", "BM", "BN", "early", "late"),
    [
        (8, 4, 8192, 128, 64, 1.246, 1.004),
        (16, 6, 8192, 128, 128, 1.120, 1.000),
        (16, 4, 16384, 128, 128, 1.024, 1.001),
        (64, 21, 4096, 192, 64, 1.143, 1.154),
        (64, 16, 4096, 192, 64, 1.051, 1.017),
    ],
)
def test_tiles_that_are_taken_late_and_heads_in_equal_shares_keep_all_programs_busy(
    heads: int, together: int, n: int, BM: int, BN: int, early: float, late: float
) -> None:
    """The table in `docs/kernels/hopper_forward.md`."""
    found = (longest_program(heads, together, n, BM, BN, left) for left in (None, 6))
    assert [round(x, 3) for x in found] == [early, late]


@pytest.mark.parametrize("blocks", [1, 7, 100])
def test_a_head_takes_the_safe_loop_if_more_than_a_quarter_of_its_blocks_so_far_needed_a_retry(blocks: int) -> None:
    for begun in range(1, blocks + 1):
        block = blocks - begun  # the last rows come first
        assert [retries_often(retries, block, blocks) for retries in range(begun + 1)] == [
            int(retries > begun / 4) for retries in range(begun + 1)
        ]
