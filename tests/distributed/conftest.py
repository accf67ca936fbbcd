"""Groups of processes that many tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from world import World


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """Give the world of so many ranks, started when it is first asked for."""
    started: dict[int, World] = {}

    def of(size: int) -> World:
        if size not in started:
            started[size] = World(size)
        return started[size]

    yield of
    for each in started.values():
        each.close()
