"""DTensors that are spread over a mesh go in, and such come out; nothing else has to be said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from world import World

from .test_attention import close

Worlds = Callable[[int], World]


@pytest.mark.parametrize("kind", ["one", "replicated"])
def test_dtensors_give_what_plain_tensors_give(world: Worlds, kind: str) -> None:
    close(world(2).run("dtensors", kind, []))


@pytest.mark.parametrize("kind", ["batch rows", "rows heads", "alike rows", "batch heads"])
def test_dtensors_may_be_spread_over_two_dimensions_of_a_mesh(world: Worlds, kind: str) -> None:
    close(world(4).run("dtensors", kind, ["padding", "dense", "alibi", "sink", "dropout"]))


def test_dtensors_that_are_spread_without_meaning_are_refused(world: Worlds) -> None:
    said = {
        "mixed": "must all be DTensors",
        "not alike": "must be spread alike",
        "dim": "batch, heads and length may be sharded",
        "partial": "must be sharded or replicated",
        "heads": "must both divide by the 2",
    }
    for told in world(2).run("odd_dtensors"):
        for what, words in said.items():
            assert words in told[what], what
