"""Every result of a rank, and every gradient, is that of one process with the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from contract_cases import CASES
from world import World

Worlds = Callable[[int], World]
NAMES = [case.name for case in CASES if case.name != "several strips"]
EXACT = 1e-10  # relative to the size of the result, in float64


def close(found: list[dict[str, Any]], bound: float = EXACT) -> None:
    """Check that every number of every rank is within the bound."""
    far = {}
    for rank, result in enumerate(found):
        for name, value in result.items():
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
    names = names[::3] if (layout, strategy) == ("zigzag", "heads") else names  # only the order of rows differs
    passes = [] if (layout, strategy) == ("contiguous", "ring") else names[::3]  # covered with 4 ranks
    close(found := world(size).run("contract", names, {"layout": layout, "strategy": strategy}, passes))
    assert all(set(result) == set(names) for result in found)


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
def test_shards_may_have_any_size_even_zero(world: Worlds, mask: str) -> None:
    close(world(4).run("sizes", [5, 0, 7, 1], [0, 3, 6, 9], mask))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_inputs_with_any_number_of_dimensions_broadcast(world: Worlds, layout: str) -> None:
    close(world(2).run("shapes", layout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_lose_no_more_than_on_one_process(world: Worlds, dtype: torch.dtype) -> None:
    for result in world(3).run("precision", dtype, "zigzag"):
        assert {name: errors for name, errors in result.items() if errors[0] > 1.5 * errors[1] + 1e-6} == {}


@pytest.mark.parametrize("tensor", [True, False], ids=["mask tensor", "mask object"])
def test_what_no_rank_may_see_has_no_effect_even_if_it_is_nan(world: Worlds, tensor: bool) -> None:
    assert world(3).run("unseen", tensor) == [{"output": True, "gradients": True}] * 3


@pytest.mark.parametrize("strategy", ["ring", "heads"])
def test_masks_that_are_tensors_mean_what_they_mean_on_one_process(world: Worlds, strategy: str) -> None:
    for result in world(2).run("tensor_masks", strategy):
        assert all(result.values()), result


@pytest.mark.parametrize("strategy", ["ring", "heads"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_dropout_drops_what_one_process_drops(world: Worlds, layout: str, strategy: str) -> None:
    close(world(2).run("dropped", layout, strategy))


@pytest.mark.parametrize("strategy", ["ring", "heads"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_results_are_bit_identical_however_late_a_rank_is(world: Worlds, layout: str, strategy: str) -> None:
    assert world(2).run("repeats", layout, strategy) == [0, 0]


def test_results_of_three_ranks_are_bit_identical_too(world: Worlds) -> None:
    assert world(3).run("repeats", "zigzag", "ring") == [0, 0, 0]


def test_subgroups_and_meshes_work(world: Worlds) -> None:
    for result in world(4).run("groups"):
        assert all(result.values()), result


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_inside_over_the_plain_calls_take_parts(world: Worlds, layout: str) -> None:
    for result in world(3).run("within", layout):
        assert all(result.values()), result


def test_the_next_keys_are_in_transit_during_the_computation(world: Worlds) -> None:
    for result in world(3).run("steps", "contiguous"):
        assert (
            result["full"] == "pcwpcwc"
        )  # p: post the next keys, c: compute with the current ones, w: wait for the next


def test_blocks_that_a_mask_hides_are_not_computed(world: Worlds) -> None:
    assert [result["causal"] for result in world(3).run("steps", "contiguous")] == [1, 2, 3]
    assert [result["causal"] for result in world(3).run("steps", "zigzag")] == [7, 7, 7]  # of 12 blocks each


def test_it_works_under_autocast_checkpointing_inference_mode_and_compile(world: Worlds) -> None:
    for result in world(2).run("around"):
        assert all(result.values()), result


@pytest.mark.parametrize("strategy", ["ring", "heads"])
def test_each_ranks_loss_may_use_another_result(world: Worlds, strategy: str) -> None:
    close(world(2).run("unlike", strategy))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_top_breaks_ties_by_the_lowest_position(world: Worlds, layout: str) -> None:
    for result in world(3).run("ties", layout):
        assert all(result.values()), result
