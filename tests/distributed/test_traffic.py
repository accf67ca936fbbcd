"""What is sent: only what a rank needs, once, and as many bytes as the formula says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from mask_cases import CASES, Case, for_each_mask, written_out
from regard.distributed import traffic
from regard.distributed.layout import Sharding, shard_sizes, sharding_of, split_sequence
from regard.distributed.ring_plan import plan_ring
from regard.errors import ArgumentError
from regard.masks import Mask
from world import World

Worlds = Callable[[int], World]
MASKS = [None, regard.causal(), regard.window(5), regard.documents(torch.arange(23) // 6), regard.strided(7)]


@pytest.mark.parametrize("strategy", ["ring", "heads"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_bytes_sent_are_those_of_the_formula(world: Worlds, size: int, layout: str, strategy: str) -> None:
    for mask, dtype in zip(
        MASKS, [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16], strict=True
    ):
        for result in world(size).run("sends", 23, 23, mask, layout, strategy, dtype):
            for name, (counted, formula) in result.items():
                assert counted == formula, (mask, name)
                assert counted > 0 or mask is not None, name


def test_the_formula_by_hand() -> None:
    # Eight tokens on four ranks: two keys and two values of one float per rank, 16 bytes.
    assert traffic(8, 4, dim=1) == [3 * 16] * 4
    assert traffic(8, 4, dim=1, backward=True) == [3 * 16 + 3 * 16] * 4
    # Causal and contiguous, rank r passes on the keys of ranks 0 … r; the last one passes on none.
    assert traffic(8, 4, dim=1, mask=regard.causal()) == [16, 32, 48, 0]
    # Zigzag: the front half of a rank's keys goes to all others, the back half to those before it.
    assert sum(traffic(8, 4, dim=1, mask=regard.causal(), layout="zigzag")) == 4 * 3 * 8 + (0 + 1 + 2 + 3) * 8
    # A window that reaches only the neighbour, and documents that end where a rank's tokens end.
    assert traffic(8, 4, dim=1, mask=regard.window(2)) == [16, 16, 16, 0]
    assert traffic(8, 4, dim=1, mask=regard.blocks(2)) == [0, 0, 0, 0]
    # Heads: three quarters of a rank's queries, keys and values, and as much output.
    assert traffic(8, 4, heads=4, dim=1, strategy="heads") == [3 * (2 * 4) * 4] * 4
    assert traffic(8, 4, heads=4, dim=1, strategy="heads", dtype=torch.bfloat16) == [3 * (2 * 4) * 2] * 4


def test_meaningless_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="divisible"):
        traffic(8, 4, heads=2, strategy="heads")
    with pytest.raises(ArgumentError, match="strategy"):
        traffic(8, 4, strategy="auto")
    with pytest.raises(ArgumentError, match="layout"):
        traffic(8, 4, layout="spiral")


def sharding(length: int, ranks: int, layout: str) -> Sharding:
    return sharding_of("test", "tokens", shard_sizes(length, ranks, layout), layout)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_key_range_goes_once_to_each_rank_that_needs_it_from_one_that_has_it(
    mask: Mask | None, ranks: int, layout: str
) -> None:
    plan = plan_ring(sharding(23, ranks, layout), sharding(23, ranks, layout), mask, 23, 23)
    for rank in range(ranks):
        received = [key for step in range(ranks) for _, key in plan.receives(rank, step)]
        assert len(set(received)) == len(received)
        assert set(received) == {key for key in plan.needed[rank] if key.owner != rank}
        for step in range(1, ranks):
            for source, key in plan.receives(rank, step):
                assert key.owner == source or key in plan.keys_at(source, step - 1)
            sent = [(to, key) for to, key in plan.sends(rank, step)]
            assert sent == [
                (to, key) for to in range(ranks) for source, key in plan.receives(to, step) if source == rank
            ]
    total = sum(plan.keys_sent(rank) for rank in range(ranks))
    assert total == sum(plan.gradients_sent(rank) for rank in range(ranks))


@for_each_mask(CASES)
def test_a_rank_gets_every_key_range_that_a_mask_shows_it(case: Case) -> None:
    mask, n, m = case
    if 0 in mask.lead:
        return
    allowed = written_out(case)
    plan = plan_ring(sharding(n, 3, "zigzag"), sharding(m, 3, "zigzag"), mask, n, m)
    for rows in (tokens for of_rank in plan.rows for tokens in of_rank):
        for keys in (tokens for of_rank in plan.keys for tokens in of_rank):
            seen = bool(allowed[..., rows.start : rows.stop, keys.start : keys.stop].any())
            assert not seen or (rows, keys) in plan.blocks


def test_under_a_causal_mask_no_rank_gets_keys_of_the_future() -> None:
    plan = plan_ring(sharding(32, 4, "contiguous"), sharding(32, 4, "contiguous"), regard.causal(), 32, 32)
    assert [sorted(key.owner for key in needed) for needed in plan.needed] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


@given(st.integers(0, 100), st.integers(1, 9), st.sampled_from(["contiguous", "zigzag"]))
def test_token_ranges_cover_the_sequence_each_token_once(length: int, ranks: int, layout: str) -> None:
    ranges = [tokens for of_rank in split_sequence(length, ranks, layout) for tokens in of_rank]
    covered = sorted(token for tokens in ranges for token in range(tokens.start, tokens.stop))
    assert covered == list(range(length))
    for rank, mine in enumerate(split_sequence(length, ranks, layout)):
        assert [tokens.owner for tokens in mine] == [rank] * len(mine)
        assert [tokens.local_start for tokens in mine] == [sum(t.size for t in mine[:at]) for at in range(len(mine))]


@given(st.integers(1, 12), st.integers(1, 8))
def test_zigzag_gives_every_rank_the_same_causal_work(part: int, ranks: int) -> None:
    length = 2 * ranks * part
    work = [
        sum(token + 1 for tokens in mine for token in range(tokens.start, tokens.stop))
        for mine in split_sequence(length, ranks, "zigzag")
    ]
    assert len(set(work)) == 1
