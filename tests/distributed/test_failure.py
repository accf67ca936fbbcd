"""A rank that dies or hangs gives every other rank one clear error within the group's timeout, never a result."""

from __future__ import annotations

import pytest

from world import Failed, World

TIMEOUT = 4.0
ENDS = {
    "killed": ("dies", "killed"),
    "hanging": ("dies", "hanging"),
    "hanging in the backward pass": ("dies", "hanging backward"),
    "killed while heads are exchanged": ("dies", "killed heads"),
    "absent": ("absent",),
}


@pytest.fixture(scope="module")
def ends() -> dict[str, list[object]]:
    """What three ranks return if the second one fails; all cases at once, because each waits for its timeout."""
    worlds = {name: World(3) for name in ENDS}
    for name, each in worlds.items():
        each.send(*ENDS[name], TIMEOUT)
    found = {name: each.answers(4 * TIMEOUT + 120, awaited=(0, 2)) for name, each in worlds.items()}
    for each in worlds.values():
        each.close()
    return found


@pytest.mark.parametrize("name", ENDS)
def test_every_other_rank_gets_one_clear_error_in_time(ends: dict[str, list[object]], name: str) -> None:
    for rank in (0, 2):
        answer = ends[name][rank]
        assert not isinstance(answer, Failed), str(answer)
        said, took = answer
        assert said.startswith(f"DistributedError: distributed.attention: rank {rank} of 3 got no answer from")
        assert "has exited, hangs, or did not call" in said
        assert took < 2 * TIMEOUT + 3


@pytest.mark.parametrize("name", [name for name in ENDS if "killed" in name])
def test_the_killed_rank_does_not_answer(ends: dict[str, list[object]], name: str) -> None:
    assert isinstance(ends[name][1], Failed)
