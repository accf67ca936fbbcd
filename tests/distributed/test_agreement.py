"""Ranks whose calls differ all raise one clear error before anything is exchanged."""

from __future__ import annotations

from collections.abc import Callable

from world import World

Worlds = Callable[[int], World]

NAMED = {  # what differs, the argument that the error names, and a value in it
    "dtype": ("query", "float64"),
    "dim of values": ("value", "6"),
    "batch": ("query", "(1, 4, …, 8)"),
    "mask": ("mask", "window(3)"),
    "mask's contents": ("mask", "padding"),
    "predicate": ("mask", "predicate"),
    "what a predicate captures": ("mask", "predicate(partial(shifted))"),
    "what cannot be read": ("mask", "predicate(partial(shifted)) (pairs"),
    "no mask": ("mask", "None"),
    "kind of mask": ("mask", "bool tensor"),
    "scale": ("scale", "1.5"),
    "scale's numbers": ("scale", "1.5"),
    "softcap": ("softcap", "31.0"),
    "sink": ("sink", "None"),
    "sink's numbers": ("sink", "1.0"),
    "bias": ("bias", "(1, …, 15)"),
    "alibi": ("bias", "alibi"),
    "dropout": ("dropout", "0.1"),
    "score": ("score", "Cosine"),
    "score's numbers": ("score", "Temperature(init=3.0"),
    "layout": ("layout", "zigzag"),
    "strategy": ("strategy", "ring"),
    "backend": ("backend", "chunked"),
    "requires_grad": ("requires_grad", "query"),
    "call": ("the call", "distributed.observe"),
}


def test_every_rank_names_the_argument_that_differs_the_ranks_and_their_values(world: Worlds) -> None:
    found = world(3).run("mismatches")
    assert set(found[0]) == {*NAMED, "nothing"}
    for result in found:
        assert result.pop("nothing") == ""  # and the group still works afterwards
        for what, message in result.items():
            name, value = NAMED[what]
            assert message.startswith("DistributedError: distributed."), what
            assert f"and {name} differs" in message, what
            assert "on ranks 0, 2" in message, what
            assert f"{value}" in message, what
            assert "on rank 1." in message, what


def test_a_rank_that_refuses_its_own_call_tells_the_others(world: Worlds) -> None:
    found = world(2).run("refusals")
    for what, words in (("one rank's dropout", "probability"), ("one rank's mask", "must broadcast")):
        assert words in found[1][what]
        assert found[0][what].startswith("DistributedError: distributed.attention: rank 1 refuses")
        assert words in found[0][what]
        assert not found[1][what].startswith("DistributedError")


def test_what_is_wrong_on_all_ranks_is_one_error_on_each(world: Worlds) -> None:
    expected = {
        "one rank's keys": "and bias differs",
        "everyone's mask": "does not fit 12 queries and 12 keys",
        "everyone's layout": "layout must be 'contiguous' or 'zigzag'",
        "everyone's strategy": "strategy must be one of",
        "everyone's backend": "backend must be 'auto'",
        "a backend that cannot": "the ring computes blocks with",
        "heads": "are not both divisible by 2 ranks",
        "zigzag": "in the zigzag layout of 13 rows, the ranks hold [5, 8] of them. Got [6, 7]",
        "second derivative": "it has first derivatives only",
        "forward mode": "reverse mode only",
        "group and mesh": "group and mesh exclude each other",
        "mesh": "a mesh must have one dimension",
    }
    for result in world(2).run("refusals"):
        assert result["nothing"] == ""
        for what, words in expected.items():
            assert words in result[what], what


def test_ranks_that_ask_an_observation_for_different_things_raise(world: Worlds) -> None:
    found = world(2).run("late_refusals")
    for result in found:
        assert "the call differs" in result["different members"]
        assert "k differs: it is 2 on rank 0; 3 on rank 1" in result["different numbers"]
        assert "height must be a whole number from 1 to 12" in result["too many cells"]
        assert "no rank holds weights" in result["weights"]
    assert found[1]["changed"].startswith("ChangedError")
    assert "rank 1 refuses" in found[0]["changed"]
