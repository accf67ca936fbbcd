"""Which blocks of keys a block of rows meets in the Hopper forward, and which of them each of its groups leaves out.

The kernel's own functions walk here in Python. A group that left out a key, or took a hidden one for visible, would be
found by the GPU's tests as a wrong number; here it is found as a wrong block.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

import regard
from regard.kernels.blocks import NONE, SPANS, Layout
from regard.kernels.hopper import walk
from regard.kernels.hopper.configs import ROWS
from regard.layout import _words, layout
from walking import MASKS, in_python, pointed

CPU = torch.device("cpu")
walk_of, share_of, entry_at = (in_python(x) for x in (walk.walk_of, walk.share_of, walk.entry_at))


class Part(NamedTuple):
    blocks: list[int]  # that the rows meet, in the order of the kernel
    whole: int  # how many of them, from the first on, a group takes as they are …
    total: int  # … and how many it looks at


def part_of(made: Layout, groups: int, BN: int, item: int, head: int, block: int, group: int) -> Part:
    where = pointed(made.by_rows(groups * ROWS, BN))
    first, full, until, whole, total = walk_of(where, item, head, block, made.m, BN, made.kind)
    row = (block * groups + group) * ROWS
    own = share_of(where, item, head, row, first, whole, total, made.n, BN, made.kind)
    met = [entry_at(where, t, first, full, until, whole, total, made.kind)[0] for t in range(total)]
    return Part(met, *own)


def check(made: Layout, truth: Tensor, groups: int, BN: int) -> None:
    """Hold a layout against its mask (items, heads, n, m)."""
    spotless = made.by_rows(groups * ROWS, BN).spotless
    assert spotless is None if made.kind == NONE else bool(spotless) == bool(truth.any(2).all())
    for item in range(truth.shape[0]):
        for head in range(truth.shape[1]):
            for at in range(-(-made.n // ROWS)):
                blocks, whole, total = part_of(made, groups, BN, item, head, *divmod(at, groups))
                rows = truth[item, head, at * ROWS : (at + 1) * ROWS]
                seen = {b for b, keys in enumerate(rows.split(BN, 1)) if keys.any()}
                assert len(set(blocks)) == len(blocks)
                assert seen <= set(blocks[:total])
                for b in blocks[:whole]:
                    keys = rows[:, b * BN : (b + 1) * BN]
                    assert keys.shape[1] == BN
                    assert keys.all()


@pytest.mark.parametrize(("groups", "BN"), [(3, 128), (2, 128), (2, 64)])
@pytest.mark.parametrize(("mask", "n", "m"), MASKS, ids=lambda x: repr(x)[:60] if isinstance(x, regard.Mask) else None)
def test_a_group_looks_at_all_that_it_sees_and_masks_all_that_is_hidden(
    mask: regard.Mask, n: int, m: int, groups: int, BN: int
) -> None:
    truth = mask.dense(n, m).expand(*mask.lead, n, m)
    check(layout(mask, n, m, CPU), truth, groups, BN)
    check(Layout(n, m, words=_words(mask, n, m, CPU), lead=mask.lead), truth, groups, BN)


def test_a_group_leaves_out_what_only_later_rows_see_and_masks_one_block_of_a_causal_mask() -> None:
    n, BN = 192 * 5, 128
    made = layout(regard.causal(), n, n, CPU)
    assert made.kind == SPANS
    parts = [part_of(made, 3, BN, 0, 0, *divmod(at, 3)) for at in range(n // ROWS)]
    assert [p.total for p in parts] == [at * ROWS // BN + 1 for at in range(n // ROWS)]
    assert [p.total - p.whole for p in parts] == [1] * len(parts)


def test_rows_beyond_the_last_meet_nothing() -> None:
    made = layout(regard.everything(), 200, 500, CPU)
    assert part_of(made, 3, 128, 0, 0, 1, 0)[1:] == (3, 4)
    assert part_of(made, 3, 128, 0, 0, 1, 1)[1:] == (0, 0)
