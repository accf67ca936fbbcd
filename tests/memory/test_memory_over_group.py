"""Memory over a group: three processes with rows of their own answer as one memory of all rows does."""

from __future__ import annotations

import pytest
import torch

from group_work import once, run
from memory.over_group import CASES, RANKS
from regard.errors import ArgumentError, DtypeError
from regard.memory import Memory

FATAL = ["a_rank_that_dies_before_the_backward_pass", "a_rank_that_does_not_come"]
TOGETHER = [name for name in CASES if name not in FATAL]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What three ranks said of all cases, which they worked through one after the other; once for all test workers."""
    return once("memory.over_group", TOGETHER, RANKS, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", TOGETHER)
def test_a_read_over_a_group_is_that_of_one_memory(name: str, said: dict[str, list[str]]) -> None:
    assert said[name] == [""] * RANKS, "\n".join(said[name])


@pytest.mark.parametrize("name", FATAL)
def test_a_rank_that_is_gone_gives_the_others_one_error(name: str) -> None:
    found = run("memory.over_group", [name], RANKS, timeout=4.0)[name]
    assert found[:2] == ["", ""], "\n".join(found)


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
def test_a_part_is_one_of_so_many(part: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="0 ≤ rank < ranks"):
        Memory.open("nowhere", part=part)


def test_a_part_is_not_written_to() -> None:
    with pytest.raises(ArgumentError, match="read only"):
        Memory.open("nowhere", "a", part=(0, 2))
