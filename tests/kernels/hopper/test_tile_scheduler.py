"""Which blocks of keys a block of rows meets in the Hopper forward, and which of them each of its groups leaves out.

The kernel's own functions walk here in Python. A group that left out a key, or took a hidden one for visible, would be
found by the GPU's tests as a wrong number; here it is found as a wrong block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

import regard
from gluon_in_python import MASKS, in_python, pointed
from regard.kernels.block_lists import NONE, SPANS, BlockMask
from regard.kernels.block_mask import _mask_bits, block_mask
from regard.kernels.hopper import tile_scheduler
from regard.kernels.hopper.configs import ROWS, Tile

CPU = torch.device("cpu")
walk_of, share_of, entry_at, row_of, blind_from, leap_often = (
    in_python(x)
    for x in (
        tile_scheduler.walk_of,
        tile_scheduler.share_of,
        tile_scheduler.entry_at,
        tile_scheduler.row_of,
        tile_scheduler.blind_from,
        tile_scheduler.leap_often,
    )
)


class Part(NamedTuple):
    row: int  # the first of a group
    blocks: list[int]  # that the rows of its block meet, in the order of the kernel
    start: int  # from which of them on the group looks at them …
    entire: int  # … and takes them as they are
    blind: int  # … and folds them without a look at their largest logit


def part_of(made: BlockMask, groups: int, BN: int, item: int, head: int, block: int, group: int) -> Part:
    tile = Tile(groups, BN, 2, 240)
    where = pointed(made.by_rows(tile.BM, BN, tile.before(made.n)))
    first, full, until, whole, total = walk_of(where, item, head, block, made.m, BN, made.kind)
    row = row_of(block, made.n, -(-made.n // tile.BM), group, groups)
    own = share_of(where, item, head, row, first, full, whole, total, made.n, BN, made.kind)
    met = [entry_at(where, t, first, full, until, whole, total, made.kind)[0] for t in range(total)]
    count = max(total, 1)
    clear = max(min(own[0], count - 1) + 1, own[1])
    assert blind_from(clear, count, whole, total, 1) == count  # with care, none
    return Part(row, met, *own, blind_from(clear, count, whole, total, 0))


def parts_of(made: BlockMask, groups: int, BN: int, item: int = 0, head: int = 0) -> list[Part]:
    """Of all groups of all blocks, in the order of their rows."""
    blocks = range(-(-made.n // (groups * ROWS)))
    return sorted(part_of(made, groups, BN, item, head, block, group) for block in blocks for group in range(groups))


def turns(blocks: list[int]) -> int:
    """How often the order, which falls over the partial blocks and rises over the full ones, is another one."""
    rises = [a < b for a, b in pairwise(blocks)]
    return sum(a != b for a, b in pairwise(rises))


def check(made: BlockMask, truth: Tensor, groups: int, BN: int) -> list[list[int]]:
    """Hold a layout against its mask (items, heads, n, m): what each group of rows sees, in the order of the kernel."""
    every = []
    spotless = made.by_rows(groups * ROWS, BN).all_keys_visible
    assert spotless is None if made.kind == NONE else bool(spotless) == bool(truth.any(2).all())
    for item in range(truth.shape[0]):
        for head in range(truth.shape[1]):
            parts = parts_of(made, groups, BN, item, head)
            assert [part.row for part in parts] == [at * ROWS for at in range(len(parts))]
            for row, blocks, start, entire, blind in parts:
                rows = truth[item, head, row : row + ROWS]
                seen = {b for b, keys in enumerate(rows.split(BN, 1)) if keys.any()}
                assert len(set(blocks)) == len(blocks)
                assert turns(blocks) <= 1
                assert 0 <= start <= entire <= blind <= max(len(blocks), 1)
                assert seen <= set(blocks[start:])
                assert len(rows) or start == max(len(blocks), 1)
                for b in blocks[entire:]:
                    keys = rows[:, b * BN : (b + 1) * BN]
                    assert keys.shape[1] == BN
                    assert keys.all()
                told = [rows[:, b * BN : (b + 1) * BN].any(1) for b in blocks[start:blind]]  # who has a level
                assert not rows.any() or torch.stack(told).any(0).equal(rows.any(1))
                every.append([b for b in blocks if b in seen])
    return every


@pytest.mark.parametrize(("groups", "BN"), [(3, 128), (2, 128), (2, 64)])
@pytest.mark.parametrize(("mask", "n", "m"), MASKS, ids=lambda x: repr(x)[:60] if isinstance(x, regard.Mask) else None)
def test_a_group_looks_at_all_that_it_sees_and_masks_all_that_is_hidden(
    mask: regard.Mask, n: int, m: int, groups: int, BN: int
) -> None:
    truth = mask.dense(n, m).expand(*mask.lead, n, m)
    by_spans = check(block_mask(mask, n, m, CPU), truth, groups, BN)
    by_lists = check(BlockMask(n, m, mask_bits=_mask_bits(mask, n, m, CPU), lead=mask.lead), truth, groups, BN)
    assert by_spans == by_lists  # so that the results have the same bits


@pytest.mark.parametrize("n", [192 * 5, 192 * 5 + 64, 192 * 5 + 100])
def test_a_group_leaves_out_what_only_later_rows_see_and_masks_one_block_of_a_causal_mask(n: int) -> None:
    BN = 128
    made = block_mask(regard.causal(), n, n, CPU)
    assert made.kind == SPANS
    parts = [part for part in parts_of(made, 3, BN) if part.row < n]
    looked = [(min(at * ROWS + ROWS, n) - 1) // BN + 1 for at in range(-(-n // ROWS))]
    assert [len(p.blocks) - p.start for p in parts] == looked
    assert [p.blocks[p.start] for p in parts] == [count - 1 for count in looked]
    assert [p.entire - p.start for p in parts] == [1] * len(parts)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(("n", "m"), [(4096, 4096), (1000, 1064), (500, 3000)])
def test_the_first_block_of_a_causal_mask_is_never_folded_blindly(n: int, m: int, groups: int) -> None:
    parts = parts_of(block_mask(regard.causal(m - n), n, m, CPU), groups, 128)
    assert any(part.blocks[part.blind :] for part in parts)
    assert not any(0 in part.blocks[part.blind :] for part in parts)


@pytest.mark.parametrize("n", [64, 200, 4096])
def test_all_groups_of_the_last_block_have_rows_if_there_are_enough(n: int) -> None:
    made = block_mask(regard.causal(), n, n, CPU)
    blocks = -(-n // 192)
    rows = [part_of(made, 3, 128, 0, 0, blocks - 1, group).row for group in range(3)]
    assert rows[-1] == (n - 1) // ROWS * ROWS
    assert rows == sorted(rows) or blocks == 1
    longest = [max(len(part_of(made, 3, 128, 0, 0, block, g).blocks) for g in range(3)) for block in range(blocks)]
    assert longest == sorted(longest)


def test_rows_beyond_the_last_meet_nothing() -> None:
    made = block_mask(regard.everything(), 200, 500, CPU)
    assert part_of(made, 3, 128, 0, 0, 0, 2) == (0, [3, 0, 1, 2], 0, 1, 2)  # the last rows have no level before
    assert part_of(made, 3, 128, 0, 0, 0, 0) == (256, [3, 0, 1, 2], 4, 4, 4)
    assert part_of(made, 2, 128, 0, 0, 1, 1) == (192, [3, 0, 1, 2], 0, 1, 2)


@pytest.mark.parametrize("blocks", [1, 7, 100])
def test_a_head_leaps_often_if_more_than_a_quarter_of_its_blocks_so_far_did(blocks: int) -> None:
    for begun in range(1, blocks + 1):
        block = blocks - begun  # the last rows come first
        assert [leap_often(leaps, block, blocks) for leaps in range(begun + 1)] == [
            int(leaps > begun / 4) for leaps in range(begun + 1)
        ]
