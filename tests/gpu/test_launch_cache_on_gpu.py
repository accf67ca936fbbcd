"""The launch cache of the Hopper forward on its chip: cached launches give the bits of a first one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from gpu import test_hopper_on_gpu as hopper
from gpu.test_hopper_on_gpu import FORWARD, M, N, pytestmark  # noqa: F401
from gpu.test_kernels_on_gpu import ROWS, captured, inputs, random, same_bits
from regard.backends import remembered
from regard.kernels import launch_cache

started = hopper.started

LIKE: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": regard.causal()},
    "bits": {"mask": regard.strided(5)},
    "cap": {"mask": regard.window(170, 9), "softcap": 9.0, "scale": 0.2},
}


def seen_by(tensors: list[Tensor], look: bool, **kwargs: Any) -> list[Tensor]:
    if not look:
        return [regard.attention(*tensors, **kwargs, backend="triton")]
    seen = regard.observe(*tensors, **kwargs, backend="triton")
    return [getattr(seen, row) for row in ROWS]


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("name", LIKE)
def test_cached_launches_have_the_bits_of_a_first_one(name: str, d: int, look: bool, started: list[str]) -> None:
    remembered._CALLS.clear()
    tensors = [random(2, 8, size, d, seed=seed) for size, seed in ((N, 1), (M, 2), (M, 3))]
    others = [random(*x.shape, seed=seed) for x, seed in zip(tensors, (4, 5, 6), strict=True)]
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    expected = seen_by(tensors, look, **LIKE[name])
    found = [seen_by(x, look, **LIKE[name]) for x in (others, tensors, apart, apart, tensors)]
    assert [name for name in started if name == FORWARD] == [FORWARD] * 2  # one of them for other strides
    assert not same_bits(found[0], expected)
    assert all(same_bits(x, expected) for x in found[1:])
    launch_cache.clear()
    assert same_bits(seen_by(others, look, **LIKE[name]), found[0])


def test_a_graph_captures_a_cached_launch() -> None:
    tensors = [x.detach() for x in inputs(N, M, 128, heads=8)]
    expected = seen_by(tensors, True, mask=regard.causal())
    graph, static = captured(lambda: seen_by(tensors, True, mask=regard.causal()))
    for x in static:
        x.fill_(math.nan)
    graph.replay()
    assert same_bits(static, expected)


def test_another_stream_waits_for_the_block_mask_of_a_cached_launch() -> None:
    tensors = [x.detach() for x in inputs(N, M, 128, heads=8)]
    expected = seen_by(tensors, True, mask=regard.window(170, 9))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = seen_by(tensors, True, mask=regard.window(170, 9))
    torch.cuda.current_stream().wait_stream(side)
    assert same_bits(found, expected)
