"""The cost model and the simulated schedule, against cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.distributed import traffic
from regard.distributed.schedule import H200, Device, Links, Schedule, Span, schedule, tokens_to_hide
from regard.errors import ArgumentError, RegardError

ONE = Device("machine", peak=1.0, forward=1.0, backward=1.0)  # one operation per second
PLAIN: dict[str, Any] = {"heads": 1, "dim": 1, "dtype": torch.float32, "device": ONE}
PAIR = 4  # operations per pair: 2·(dim + value_dim)
TOKEN = 8  # bytes of a token's key and value


def planned(length: int, ranks: int, bandwidth: float = 1e9, **given: Any) -> Schedule:
    return schedule(length, ranks, links=Links(bandwidth, bandwidth), **{**PLAIN, **given})


def test_two_ranks_without_a_mask_compute_two_blocks_each_and_send_one() -> None:
    found = planned(8, 2, bandwidth=1.0)
    assert found.flops == (PAIR * 32, PAIR * 32)
    assert found.bytes == (TOKEN * 4, TOKEN * 4)
    assert found.computes == ((Span(0, 64), Span(64, 128)),) * 2
    assert found.sends == ((Span(0, 32),),) * 2
    assert (found.time, found.exposed, found.busy) == (128, 0, 1)


def test_traffic_that_takes_longer_than_a_step_is_waited_for() -> None:
    found = planned(8, 2, bandwidth=0.25)  # 32 bytes take 128 s
    assert found.computes == ((Span(0, 64), Span(128, 192)),) * 2
    assert (found.time, found.exposed) == (192, 64)
    assert found.busy == pytest.approx(128 / 192)


def test_contiguous_shards_of_a_causal_sequence_leave_the_first_ranks_idle() -> None:
    found = planned(8, 2, mask=regard.causal())
    assert found.flops == (PAIR * 10, PAIR * (10 + 16))
    assert found.bytes == (TOKEN * 4, 0)  # no other rank needs the last keys
    assert found.time == pytest.approx(PAIR * 26)
    assert found.busy == pytest.approx(36 / 52)


def test_zigzag_shards_of_a_causal_sequence_balance_the_work() -> None:
    found = planned(8, 2, mask=regard.causal(), layout="zigzag")
    assert found.flops == (PAIR * 18, PAIR * 18)
    assert found.time == pytest.approx(PAIR * 18)
    assert found.busy == pytest.approx(1)


def test_a_rank_waits_for_keys_that_come_late() -> None:
    found = planned(8, 2, bandwidth=0.4, mask=regard.causal())
    assert found.computes[1] == (Span(0, 40), Span(80, 144))


def test_backward_computes_five_products_and_sends_gradients_home() -> None:
    found = planned(8, 2, bandwidth=1.0, backward=True)
    assert found.flops == (10 * 32, 10 * 32)
    assert found.bytes == (2 * TOKEN * 4, 2 * TOKEN * 4)
    assert found.computes == ((Span(0, 160), Span(160, 320)),) * 2
    assert found.sends == ((Span(0, 32), Span(320, 352)),) * 2  # no computation hides the last gradients
    assert (found.time, found.exposed) == (352, 32)


def test_gradients_and_keys_share_the_links() -> None:
    fast, slow = (planned(12, 3, bandwidth=b, backward=True) for b in (1e9, 0.1))
    assert fast.exposed == pytest.approx(0, abs=1e-5)
    assert slow.time >= sum(slow.bytes) / 3 / 0.1


def test_heads_exchange_first_then_compute_then_exchange() -> None:
    found = planned(8, 2, bandwidth=1.0, heads=2, strategy="heads")
    # There: half of the heads of q, k and v of 4 tokens, 4·(2·3)·4 bytes / 2; back: half of the output.
    assert found.sends == ((Span(0, 48), Span(304, 320)),) * 2
    assert found.computes == ((Span(48, 304),),) * 2  # one head of 8 × 8 pairs
    assert found.bytes == (64, 64)
    assert (found.time, found.exposed) == (320, 64)


def test_backward_of_heads_sends_the_same_the_other_way_round() -> None:
    found = planned(8, 2, bandwidth=1.0, heads=2, strategy="heads", backward=True)
    assert found.sends == ((Span(0, 16), Span(16 + 640, 16 + 640 + 48)),) * 2
    assert found.bytes == (64, 64)


def test_ranks_of_one_node_have_a_faster_link() -> None:
    times = [schedule(16, 4, links=Links(inside=8.0, across=0.125, node=node), **PLAIN).time for node in (4, 2, 1)]
    assert times[0] == PAIR * 64
    assert times[1] == times[2] == 3 * 4 * TOKEN / 0.125 + PAIR * 16  # one slow link slows the whole ring


def test_blocks_that_the_mask_hides_cost_nothing() -> None:
    found = planned(64, 4, mask=regard.blocks(16))
    assert found.bytes == (0, 0, 0, 0)
    assert found.flops == (PAIR * 256,) * 4
    assert found.sends == ((),) * 4


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("strategy", ["ring", "heads"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.window(5, 3)], ids=str)
def test_work_is_that_of_the_pairs_and_bytes_are_those_of_the_traffic(
    mask: regard.Mask | None, backward: bool, strategy: str, layout: str
) -> None:
    given: dict[str, Any] = {"mask": mask, "layout": layout, "strategy": strategy, "backward": backward}
    given |= {"heads": 6, "kv_heads": 3, "dim": 4, "value_dim": 2, "batch": 2, "dtype": torch.bfloat16}
    found = schedule(50, 3, **given)
    pairs = 50 * 50 if mask is None else int(mask.dense(50, 50).sum())
    assert sum(found.flops) == pytest.approx(pairs * 2 * 12 * (3 * 4 + 2 * 2 if backward else 4 + 2))
    assert list(found.bytes) == traffic(50, 3, **given)


def test_work_in_long_blocks_is_counted_on_a_grid() -> None:
    found = planned(1_000_000, 4, mask=regard.causal())
    assert sum(found.flops) == pytest.approx(PAIR * 1e12 / 2, rel=1e-4)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_ring_hides_its_traffic_from_tokens_to_hide_on(causal: bool, backward: bool) -> None:
    given: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 64, "value_dim": 128, "backward": backward}
    enough = tokens_to_hide(causal=causal, bandwidth=50e9, **given)
    how: dict[str, Any] = {"mask": regard.causal(), "layout": "zigzag"} if causal else {}
    few, many = (
        schedule(8 * int(enough * factor), 8, links=Links(50e9, 50e9), **how, **given) for factor in (0.8, 1.01)
    )
    assert few.exposed > 0.01 * few.without_traffic
    last = max(span.stop for some in many.sends for span in some) - max(
        span.stop for some in many.computes for span in some
    )
    assert many.exposed <= max(last, 0.0) + 1e-9 * many.time  # except the gradients of the last step


def test_the_rule_for_hiding_in_numbers() -> None:
    # bf16, as many key heads as query heads: F / W tokens, F = 989e12 · 0.52 and W = 450e9.
    assert tokens_to_hide() == pytest.approx(989e12 * 0.52 / 450e9)
    assert tokens_to_hide(kv_heads=8) == pytest.approx(tokens_to_hide() / 4)
    assert tokens_to_hide(causal=True) == pytest.approx(tokens_to_hide() * 2 * 1.5)
    assert tokens_to_hide(backward=True) == pytest.approx(989e12 * 0.40 / 450e9 * 3 / 2.5)
    assert H200.speed(False) > H200.speed(True)


def test_memory_is_a_ranks_own_tokens_and_two_visiting_shards() -> None:
    # q, k, v, o and 4 statistics of a rank's 4 tokens, and twice 4 visiting keys and values; in the backward pass also
    # the output's cotangent, three gradients, and three times the visitors' gradients.
    assert planned(8, 2).memory == (4 * (4 * 4 + 4 * 4) + 2 * 4 * TOKEN,) * 2
    assert planned(8, 2, backward=True).memory == (4 * (4 * 4 + 4 * 4 + 4 * 4) + 5 * 4 * TOKEN,) * 2
    assert planned(8, 2, mask=regard.causal()).memory[0] == 4 * (4 * 4 + 4 * 4)  # no keys visit the first rank


def test_a_schedule_is_drawn() -> None:
    found = planned(8, 2, bandwidth=0.25)
    assert str(found) == (
        "8 tokens over 2 × machine, ring, contiguous, forward, mask=None\n"
        "a rank computes at most 1.28e-10 TFLOP, sends 3.2e-08 GB, holds 1.92e-07 GB\n"
        "192 s, 64 s of it due to traffic; ranks compute 67%\n"
        "\n"
        f"rank 0  computes {'█' * 21}▌{' ' * 20}▌{'█' * 21}\n"
        f"        sends    {'=' * 42}{'='}\n"
        f"rank 1  computes {'█' * 21}▌{' ' * 20}▌{'█' * 21}\n"
        f"        sends    {'=' * 42}{'='}"
    )
    assert str(planned(40, 20)).endswith("… and 12 more")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"layout": "spiral"}, "layout"),
        ({"strategy": "star"}, "strategy"),
        ({"strategy": "heads", "heads": 3}, "divisible"),
        ({"heads": 0}, "heads"),
        ({"batch": 1.5}, "batch"),
    ],
)
def test_meaningless_arguments_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(RegardError, match=says):
        schedule(8, 2, **wrong)
    with pytest.raises(ArgumentError, match="ranks"):
        schedule(8, 0)
