"""Parts of a sequence: cut, found again, and put together, with gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from world import World

from regard import distributed
from regard.errors import ArgumentError

Worlds = Callable[[int], World]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gather_gives_back_what_shard_has_cut_with_the_gradient_of_all_losses(
    world: Worlds, size: int, layout: str
) -> None:
    for told in world(size).run("parts", layout):
        assert all(told.values()), told


def test_without_a_group_the_error_says_what_to_call() -> None:
    x = torch.zeros(1, 4, 8)
    for call in (
        lambda: distributed.attention(x, x, x),
        lambda: distributed.observe(x, x, x),
        lambda: distributed.shard(x),
        lambda: distributed.gather(x),
        lambda: distributed.positions(4),
        lambda: distributed.over().__enter__(),
    ):
        with pytest.raises(ArgumentError, match="init_process_group"):
            call()
