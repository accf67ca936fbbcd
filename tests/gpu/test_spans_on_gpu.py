"""Masks of one interval per row on a GPU: lists as torch makes them, a host that does not wait, graphs that follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels.block_mask import _compute, block_mask
from regard.kernels.hopper.dq_order import dq_order

pytestmark = pytest.mark.gpu
N = 700


def ints(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cuda")


MASKS: dict[str, Callable[[], regard.Mask]] = {
    "window": lambda: regard.window(99, 3),
    "offsets": lambda: regard.causal(offset=ints(-40, 300)) & regard.prefix(500),
    "padding": lambda: regard.padding(ints(300, 0)) & regard.blocks(64),
    "lengths": lambda: regard.packed(ints(100, 0, 500, 100)) & regard.causal(),
    "many lengths": lambda: regard.packed(ints(*[1] * N)),
    "cumulative lengths": lambda: regard.packed(cu_seqlens=ints(0, 100, 100, N, dtype=torch.int32)),
    "list": lambda: regard.packed([300, 400]) & regard.causal(),
    "sorted ids on the CPU": lambda: regard.documents(torch.arange(N) // 90),
}


@pytest.mark.parametrize("name", [*MASKS, "sorted ids"])
def test_the_lists_are_those_that_torch_makes(name: str) -> None:
    mask = MASKS[name]() if name in MASKS else regard.documents(torch.arange(N, device="cuda") // 90)
    made = block_mask(mask, N, N, torch.device("cuda", 0))
    expected = _compute(mask.changed(Tensor.cpu), N, N, torch.device("cpu"), 1)
    assert made.kind == expected.kind
    for found, wanted in (
        (made.by_rows(192, 128, 64), expected.by_rows(192, 128, 64)),
        (made.by_keys(64, 128), expected.by_keys(64, 128)),
        (dq_order(made, 64, 128), dq_order(expected, 64, 128)),
    ):
        for field, x, y in zip(wanted._fields, found, wanted, strict=True):
            assert torch.equal(x.cpu().flatten()[: y.numel()], y.flatten()) if isinstance(y, Tensor) else x == y, field


@pytest.mark.parametrize("name", MASKS)
def test_the_host_does_not_wait_for_a_new_mask(name: str) -> None:
    q = torch.randn(2, 2, N, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first, second = MASKS[name](), MASKS[name]()  # the copies of the test's own numbers are made here
    regard.attention(q, q, q, mask=first, backend="triton").sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        regard.attention(q, q, q, mask=second, backend="triton").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_waits_once_for_the_ids_of_many_masks() -> None:
    q = torch.randn(2, 2, N, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(N, device="cuda") // 90
    for _ in range(2):
        regard.attention(q, q, q, mask=regard.documents(ids) & regard.causal(), backend="triton").sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        regard.attention(q, q, q, mask=regard.documents(ids) & regard.causal(), backend="triton").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_follows_lengths_that_change() -> None:
    q = torch.randn(1, 2, N, 64, device="cuda", dtype=torch.bfloat16)
    lengths = ints(300, 400)
    mask = regard.packed(lengths) & regard.causal()
    for _ in range(2):
        regard.attention(q, q, q, mask=mask, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = regard.attention(q, q, q, mask=mask, backend="triton")
    lengths.copy_(ints(100, 600))
    graph.replay()
    expected = regard.attention(q, q, q, mask=regard.packed([100, 600]) & regard.causal(), backend="triton")
    assert torch.equal(output, expected)
