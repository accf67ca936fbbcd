"""What ends the Hopper backward: dQ from its sums, which lie in parts of its columns, one block of rows a time."""

from __future__ import annotations

import pytest
import torch

from regard.kernels.arguments import KernelArgs
from regard.kernels.block_lists import BlockMask
from regard.kernels.hopper import backward_launch


@pytest.mark.parametrize(("dim", "n"), [(64, 64), (40, 100), (128, 130), (192, 70), (256, 65)])
@pytest.mark.parametrize("scales", [False, True])
def test_sums_become_rows(dim: int, n: int, scales: bool) -> None:
    q = torch.zeros(2, 3, n, dim, dtype=torch.float16)
    w = KernelArgs(q, q, q, BlockMask(n, n), scale=0.5, scales=torch.ones(3) if scales else None)
    blocks = backward_launch.blocks_for(w)
    memory = backward_launch.memory_for(w, blocks)
    rows, parts, columns = -(-n // blocks.BM), blocks.parts, memory.sums.shape[1]
    memory.sums.copy_(torch.randn(memory.sums.shape, generator=torch.Generator().manual_seed(0)))
    memory.counters.fill_(1)
    memory.counters[: blocks.counters] = 0  # nobody added to the first block of rows of the first head
    dq = backward_launch.finished(w, memory, blocks)
    X = memory.sums.view(2, 3, rows, parts, blocks.BM, columns).transpose(3, 4).reshape(2, 3, rows * blocks.BM, -1)
    X[0, 0, : blocks.BM] = 0.0
    expected = X[:, :, :n, :dim] if scales else (X[:, :, :n, :dim] * 0.5).half()
    assert torch.equal(dq, expected)
