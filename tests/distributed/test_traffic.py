"""What is sent: only what is needed, once to each, and as many bytes as the formula says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from masks.cases import CASES, Case, written_out
from regard.distributed import traffic
from regard.distributed.layout import cut, pieces, sizes
from regard.distributed.ring_plan import routes
from regard.errors import ArgumentError
from regard.masks import Mask
from world import World

Worlds = Callable[[int], World]
MASKS = [None, regard.causal(), regard.window(5), regard.documents(torch.arange(23) // 6), regard.strided(7)]


@pytest.mark.parametrize("strategy", ["ring", "heads"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 3])
def test_bytes_that_are_sent_are_those_of_the_formula(world: Worlds, size: int, layout: str, strategy: str) -> None:
    for mask, dtype in zip(
        MASKS, [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16], strict=True
    ):
        for told in world(size).run("sends", 23, 23, mask, layout, strategy, dtype):
            for name, (counted, formula) in told.items():
                assert counted == formula, (mask, name)
                assert counted > 0 or mask is not None, name


def test_the_formula_by_hand() -> None:
    # Eight tokens on four ranks: two keys and two values of one float each a rank, 16 bytes.
    assert traffic(8, 4, dim=1) == [3 * 16] * 4
    assert traffic(8, 4, dim=1, backward=True) == [3 * 16 + 3 * 16] * 4
    # Causal and contiguous, rank r hands on the keys of ranks 0 … r; the last one hands on none.
    assert traffic(8, 4, dim=1, mask=regard.causal()) == [16, 32, 48, 0]
    # Zigzag: the front half of a rank's keys goes to all others, the back half to those before it.
    assert sum(traffic(8, 4, dim=1, mask=regard.causal(), layout="zigzag")) == 4 * 3 * 8 + (0 + 1 + 2 + 3) * 8
    # A window that reaches into the neighbour alone, and documents that end with a rank's tokens.
    assert traffic(8, 4, dim=1, mask=regard.window(2)) == [16, 16, 16, 0]
    assert traffic(8, 4, dim=1, mask=regard.blocks(2)) == [0, 0, 0, 0]
    # Heads: three quarters of a rank's queries, keys and values, and as much output.
    assert traffic(8, 4, heads=4, dim=1, strategy="heads") == [3 * (2 * 4) * 4] * 4
    assert traffic(8, 4, heads=4, dim=1, strategy="heads", dtype=torch.bfloat16) == [3 * (2 * 4) * 2] * 4


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ArgumentError, match="divide"):
        traffic(8, 4, heads=2, strategy="heads")
    with pytest.raises(ArgumentError, match="strategy"):
        traffic(8, 4, strategy="auto")
    with pytest.raises(ArgumentError, match="layout"):
        traffic(8, 4, layout="spiral")


def held(length: int, ranks: int, layout: str) -> tuple[tuple[object, ...], ...]:
    return pieces("test", "tokens", sizes(length, ranks, layout), layout)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_piece_goes_once_to_each_rank_that_needs_it_from_one_that_has_it(
    mask: Mask | None, ranks: int, layout: str
) -> None:
    found = routes(held(23, ranks, layout), held(23, ranks, layout), mask, 23, 23)
    for rank in range(ranks):
        arrived = [key for step in range(ranks) for _, key in found.arrivals(rank, step)]
        assert len(set(arrived)) == len(arrived)
        assert set(arrived) == {key for key in found.needed[rank] if key.owner != rank}
        for step in range(1, ranks):
            for source, key in found.arrivals(rank, step):
                assert key.owner == source or key in found.wanted(source, step - 1)
            sent = [(to, key) for to, key in found.departures(rank, step)]
            assert sent == [
                (to, key) for to in range(ranks) for source, key in found.arrivals(to, step) if source == rank
            ]
    total = sum(found.outward(rank) for rank in range(ranks))
    assert total == sum(found.homeward(rank) for rank in range(ranks))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.mask!r} {c.n} {c.m}")
def test_pieces_that_a_mask_hides_from_a_rank_are_all_that_it_does_not_get(case: Case) -> None:
    mask, n, m = case
    if 0 in mask.lead:
        return
    allowed = written_out(case)
    found = routes(held(n, 3, "zigzag"), held(m, 3, "zigzag"), mask, n, m)
    for row in (piece for some in found.rows for piece in some):
        for key in (piece for some in found.keys for piece in some):
            seen = bool(allowed[..., row.start : row.stop, key.start : key.stop].any())
            assert not seen or (row, key) in found.seen


def test_under_a_causal_mask_no_rank_gets_keys_of_the_future() -> None:
    found = routes(held(32, 4, "contiguous"), held(32, 4, "contiguous"), regard.causal(), 32, 32)
    assert [sorted(key.owner for key in needed) for needed in found.needed] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


@given(st.integers(0, 100), st.integers(1, 9), st.sampled_from(["contiguous", "zigzag"]))
def test_pieces_are_the_whole_sequence_each_token_once(length: int, ranks: int, layout: str) -> None:
    found = [piece for some in cut(length, ranks, layout) for piece in some]
    tokens = sorted(token for piece in found for token in range(piece.start, piece.stop))
    assert tokens == list(range(length))
    for rank, some in enumerate(cut(length, ranks, layout)):
        assert [piece.owner for piece in some] == [rank] * len(some)
        assert [piece.here for piece in some] == [sum(p.size for p in some[:at]) for at in range(len(some))]


@given(st.integers(1, 12), st.integers(1, 8))
def test_zigzag_gives_every_rank_the_same_causal_work(part: int, ranks: int) -> None:
    length = 2 * ranks * part
    work = [
        sum(token + 1 for piece in some for token in range(piece.start, piece.stop))
        for some in cut(length, ranks, "zigzag")
    ]
    assert len(set(work)) == 1
