"""DTensors in, DTensors out; no other argument is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from world import World

from .test_attention import close

Worlds = Callable[[int], World]


@pytest.mark.parametrize("kind", ["one", "replicated"])
def test_dtensors_give_what_plain_tensors_give(world: Worlds, kind: str) -> None:
    close(world(2).run("dtensors", kind, []))


@pytest.mark.parametrize("kind", ["batch rows", "rows heads", "replicated rows", "batch heads"])
def test_dtensors_may_use_two_mesh_dimensions(world: Worlds, kind: str) -> None:
    close(world(4).run("dtensors", kind, ["padding", "dense", "alibi", "sink", "dropout"]))


def test_dtensors_with_unusable_placements_are_refused(world: Worlds) -> None:
    expected = {
        "mixed": "must all be DTensors",
        "different placements": "must have the same placements",
        "dim": "batch, heads and length may be sharded",
        "partial": "must be sharded or replicated",
        "heads": "must both be divisible by the 2",
    }
    for result in world(2).run("odd_dtensors"):
        for what, words in expected.items():
            assert words in result[what], what
