"""Strips of rows and runs of keys: every visible key is in one run, within the budget, and masks are covered once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.backends import Chunked
from regard.core.spec import Spec
from regard.core.tiling import TileSizes, strips

GAPS = {
    "one gap": lambda: regard.prefix(128) | ~regard.prefix(512),
    "two gaps": lambda: regard.prefix(128) | (~regard.prefix(256) & regard.prefix(384)) | ~regard.prefix(512),
    "a partial block, then a gap": lambda: regard.prefix(100) | ~regard.prefix(500),
    "nothing": lambda: ~regard.everything(),
}


@pytest.mark.parametrize("name", GAPS)
def test_hidden_blocks_between_visible_ones_are_in_no_run_and_stay_hidden(name: str) -> None:
    mask, n, m = GAPS[name](), 512, 640
    allowed = mask.dense(n, m)
    for strip in strips(Spec(n, m, mask), (1, 1, 1), TileSizes()):
        seen = torch.zeros(m, dtype=torch.bool)
        for run in strip.runs:
            part = allowed[strip.rows, run.start : run.stop]
            assert part.any()
            assert part.all() or not run.full
            assert not seen[run.start : run.stop].any()
            seen[run.start : run.stop] = True
        blocks = allowed[strip.rows].any(0).unflatten(0, (-1, 128)).any(-1)
        assert torch.equal(seen.unflatten(0, (-1, 128)).any(-1), blocks)
    q, k, v = (torch.randn(1, 1, s, 4, dtype=torch.float64) for s in (n, m, m))
    torch.testing.assert_close(
        regard.attention(q, k, v, mask=mask, backend="chunked"),
        regard.attention(q, k, v, mask=mask, backend="reference"),
    )


def test_a_strip_of_whole_rows_and_a_tile_of_a_costly_score_stay_within_the_budget() -> None:
    for n, m, groups, cost in ((4096, 20000, 1, 1), (4096, 20000, 4, 1), (512, 3000, 2, 64)):
        rule, cut = Spec(n, m, cost=cost), TileSizes()
        for strip in strips(rule, (2, 3, groups), cut, whole=True):
            tile = strip.hull(m)
            rows = tile.rows.stop - tile.rows.start
            assert rows == 1 or 8 * groups * rows * m * cost <= cut.budget
        for strip in strips(rule, (2, 3, groups), cut):
            lead = (strip.batch.stop - strip.batch.start) * (strip.heads.stop - strip.heads.start)
            for run in strip.runs:
                rows = strip.rows.stop - strip.rows.start
                assert run.stop - run.start <= 128 or lead * groups * rows * (run.stop - run.start) * cost <= cut.budget


def test_a_mask_that_all_heads_share_is_read_once() -> None:
    class Counted(type(regard.causal())):
        asked = 0

        def span(self, *args: Any) -> Any:
            Counted.asked += 1
            return super().span(*args)

    x = torch.randn(4, 8, 600, 4)
    regard.attention(x, x, x, mask=Counted(), backend=Chunked(chunk_size=64))
    assert Counted.asked == 1
