"""Every result of a rank, and every gradient, is that of one process that has the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_cases import CASES
from world import World

Worlds = Callable[[int], World]
NAMES = [case.name for case in CASES if case.name != "several strips"]
EXACT = 1e-10  # of the size of a result, in float64


def close(found: list[dict[str, Any]], bound: float = EXACT) -> None:
    """Hold every number of every rank to a bound."""
    far = {}
    for rank, told in enumerate(found):
        for name, value in told.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            far |= {f"rank {rank}: {name} {what}": gap for what, gap in parts if not gap <= bound}
    assert not far


@pytest.mark.parametrize(
    ("size", "layout", "strategy"),
    [(3, "contiguous", "ring"), (3, "zigzag", "ring"), (2, "contiguous", "heads"), (2, "zigzag", "heads")],
)
def test_every_case_of_the_contract_is_that_of_one_process(
    world: Worlds, size: int, layout: str, strategy: str
) -> None:
    names = [name for name in NAMES if strategy == "ring" or name != "one head"]
    names = names[::3] if (layout, strategy) == ("zigzag", "heads") else names  # only the order of rows is another
    passes = [] if (layout, strategy) == ("contiguous", "ring") else names[::3]  # 4 ranks look at that one
    close(found := world(size).run("contract", names, {"layout": layout, "strategy": strategy}, passes))
    assert all(set(told) == set(names) for told in found)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_four_ranks_give_what_one_gives(world: Worlds, layout: str) -> None:
    names = ["plain", "several strips", "causal", "window", "documents mixed", "all together", "additive together"]
    close(world(4).run("contract", names, {"layout": layout}, names[::2]))


@pytest.mark.parametrize(
    ("size", "layout", "strategy", "shortest"),
    [(2, "contiguous", "ring", 0), (3, "zigzag", "ring", 7), (2, "contiguous", "heads", 5)],
)
def test_every_mask_means_what_it_means_on_one_process(
    world: Worlds, size: int, layout: str, strategy: str, shortest: int
) -> None:
    close(found := world(size).run("masks", layout, strategy, shortest))
    assert len(found[0]) > {0: 250, 5: 100, 7: 40}[shortest]


@pytest.mark.parametrize("mask", ["causal", "everything"])
def test_parts_may_have_any_sizes_and_even_none(world: Worlds, mask: str) -> None:
    close(world(4).run("sizes", [5, 0, 7, 1], [0, 3, 6, 9], mask))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_inputs_of_any_rank_that_broadcast_work(world: Worlds, layout: str) -> None:
    close(world(2).run("shapes", layout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_lose_no_more_than_on_one_process(world: Worlds, dtype: torch.dtype) -> None:
    for told in world(3).run("precision", dtype, "zigzag"):
        assert {name: errors for name, errors in told.items() if errors[0] > 1.5 * errors[1] + 1e-6} == {}


@pytest.mark.parametrize("tensor", [True, False], ids=["mask tensor", "mask object"])
def test_what_no_rank_may_see_leaves_no_trace_even_if_it_is_nan(world: Worlds, tensor: bool) -> None:
    assert world(3).run("unseen", tensor) == [{"output": True, "gradients": True}] * 3


@pytest.mark.parametrize("strategy", ["ring", "heads"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_dropout_drops_what_one_process_drops(world: Worlds, layout: str, strategy: str) -> None:
    close(world(2).run("dropped", layout, strategy))


@pytest.mark.parametrize("strategy", ["ring", "heads"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_results_repeat_bit_for_bit_however_late_a_rank_is(world: Worlds, layout: str, strategy: str) -> None:
    assert world(2).run("repeats", layout, strategy) == [0, 0]


def test_three_ranks_repeat_bit_for_bit_too(world: Worlds) -> None:
    assert world(3).run("repeats", "zigzag", "ring") == [0, 0, 0]


def test_groups_and_meshes_within_all_ranks_work(world: Worlds) -> None:
    for told in world(4).run("groups"):
        assert all(told.values()), told


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_inside_over_the_plain_calls_take_parts(world: Worlds, layout: str) -> None:
    for told in world(3).run("within", layout):
        assert all(told.values()), told


def test_the_next_keys_travel_while_these_are_computed_with(world: Worlds) -> None:
    for told in world(3).run("steps", "contiguous"):
        assert told["full"] == "pcwpcwc"  # post the next, compute with these, wait for the next


def test_blocks_that_a_mask_hides_are_not_computed(world: Worlds) -> None:
    assert [told["causal"] for told in world(3).run("steps", "contiguous")] == [1, 2, 3]
    assert [told["causal"] for told in world(3).run("steps", "zigzag")] == [7, 7, 7]  # of 12 for each


def test_autocast_checkpointing_inference_mode_and_compile_go_around_it(world: Worlds) -> None:
    for told in world(2).run("around"):
        assert all(told.values()), told


@pytest.mark.parametrize("strategy", ["ring", "heads"])
def test_every_ranks_loss_may_read_another_result(world: Worlds, strategy: str) -> None:
    close(world(2).run("unlike", strategy))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_of_equal_weights_the_keys_with_the_lowest_places_are_the_top(world: Worlds, layout: str) -> None:
    for told in world(3).run("ties", layout):
        assert all(told.values()), told
