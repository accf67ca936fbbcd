"""Modules inside `regard.distributed.over`: four processes with parts of a sequence give what one gives with all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from modules_over_group import CASES, RANKS
from world import World


@pytest.mark.parametrize("name", CASES)
def test_a_module_over_a_group_equals_one_process(name: str, world: Callable[[int], World], tmp_path: Path) -> None:
    world(RANKS).run(f"modules_over_group:{name}", tmp_path)
