"""Ranks that share one CUDA device, over gloo, which carries their tensors through the CPU: `make test-gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from world import World

import regard
from regard import distributed

DEVICE = "cuda"
LONG = 600.0  # seconds: every rank compiles its kernels
NAMES = ["plain", "causal", "window", "padding", "dense per head", "all together", "relative", "Additive", "Cosine"]


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    world = World(3)
    yield world
    world.close()


@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_ranks_on_one_device_give_what_one_process_gives(
    three: World, dtype: torch.dtype, layout: str, backend: str
) -> None:
    how = {"layout": layout, "backend": backend}
    bound = 2e-4 if dtype == torch.float32 else 0.04
    for rank, told in enumerate(three.run("on_device", NAMES, DEVICE, dtype, how, patience=LONG)):
        for name, far in told.items():
            assert {what: gap for what, gap in far.items() if not gap <= bound} == {}, (rank, name)


def test_heads_are_exchanged_on_a_device_too(three: World) -> None:
    for told in three.run("on_device", ["multi-head"], DEVICE, torch.float32, {"strategy": "heads"}, patience=LONG):
        assert all(gap <= 2e-4 for far in told.values() for gap in far.values()), told


def test_runs_on_a_device_repeat_bit_for_bit(three: World) -> None:
    assert three.run("repeats", "zigzag", "ring", DEVICE) == [0, 0, 0]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_one_rank_over_nccl_merges_its_two_pieces(backend: str) -> None:
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = torch.randn(2, 4, 300, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        output = distributed.attention(x, x, x, mask=regard.causal(), layout="zigzag", strategy="ring")
        whole = regard.attention(x, x, x, mask=regard.causal())
        torch.testing.assert_close(output, whole, rtol=2**-7, atol=0.01)  # two roundings of bfloat16
        slopes = [torch.autograd.grad(y.float().square().sum(), x)[0].float() for y in (output, whole)]
        assert (slopes[0] - slopes[1]).norm() < 0.01 * slopes[1].norm()
        assert torch.equal(distributed.gather(distributed.shard(x)), x)
    finally:
        torch.distributed.destroy_process_group()
