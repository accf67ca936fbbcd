"""Memory over a group: three processes, each with its own rows, read as one memory of all rows does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memory_over_group import CASES, RANKS
from regard.errors import ArgumentError, DtypeError
from regard.memory import Memory
from world import World

FATAL = ["a_rank_that_dies_before_the_backward_pass", "a_rank_that_does_not_call"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in FATAL])
def test_a_read_over_a_group_equals_that_of_one_memory(
    name: str, world: Callable[[int], World], tmp_path: Path
) -> None:
    world(RANKS).run(f"memory_over_group:{name}", tmp_path)


@pytest.mark.parametrize("name", FATAL)
def test_a_lost_rank_gives_the_others_one_error(name: str, tmp_path: Path) -> None:
    lost = World(RANKS, timeout=4.0)
    lost.send(f"memory_over_group:{name}", tmp_path)
    said = lost.answers(awaited=(0, 1))
    lost.close()
    assert list(map(str, said[:2])) == ["None", "None"]


def test_a_group_needs_a_process_group() -> None:
    memory = Memory(2, 1)
    memory.write(torch.ones(1, 2), torch.ones(1, 1))
    with pytest.raises(ArgumentError, match="init_process_group"):
        memory.read(torch.ones(1, 2), group="all")  # type: ignore[call-overload]


@pytest.mark.parametrize("part", [3, (1,), (1.0, 2), (True, 2), "ab"])
def test_a_part_is_two_whole_numbers(part: object) -> None:
    with pytest.raises(DtypeError, match="two whole numbers"):
        Memory.open("nowhere", part=part)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [(-1, 2), (2, 2), (0, 0)])
def test_the_rank_of_a_part_is_below_the_number_of_ranks(part: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="0 ≤ rank < ranks"):
        Memory.open("nowhere", part=part)


def test_a_part_is_read_only() -> None:
    with pytest.raises(ArgumentError, match="read only"):
        Memory.open("nowhere", "a", part=(0, 2))
