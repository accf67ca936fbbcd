"""Modules inside `regard.distributed.over`: four processes with parts of a sequence do what one does with all of it."""

from __future__ import annotations

import pytest

from group_work import once
from nn.over_group import CASES, RANKS


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What four ranks said of all cases."""
    return once("nn.over_group", list(CASES), RANKS, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", CASES)
def test_a_module_over_a_group_is_that_of_one_process(name: str, said: dict[str, list[str]]) -> None:
    assert said[name] == [""] * RANKS, "\n".join(said[name])
