"""What every test shares: threads that do not fight over the cores, how hypothesis searches, and groups of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from world import World

settings.register_profile("everyday", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("everyday"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "everyday")

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

collect_ignore = []
if not torch.cuda.is_available():
    collect_ignore.append("gpu")  # `make test-gpu` runs these where there is a device
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("interpreted")  # `make test` runs these in a process of their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests over ranks first: they keep several cores busy, and one worker starts the ranks for all of them."""
    items.sort(key=lambda item: "world" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """Give the world of so many ranks, started when it is first asked for, and anew after a job that failed."""
    started: dict[int, World] = {}

    def of(size: int) -> World:
        if size in started and not started[size].sound:
            started.pop(size).close()
        if size not in started:
            started[size] = World(size)
        return started[size]

    yield of
    for each in started.values():
        each.close()
