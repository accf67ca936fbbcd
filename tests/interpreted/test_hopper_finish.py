"""The postprocess of the Hopper backward: dQ from its sums, by row block and part, in the order of registers."""

from __future__ import annotations

import pytest
import torch

from gluon_in_python import in_python
from regard.kernels.arguments import KernelArgs
from regard.kernels.block_mask import BlockMask
from regard.kernels.hopper import backward_launch, dq_sums

in_register_order = in_python(dq_sums.in_register_order, static_assert=lambda holds, message: None, constexpr=int)


@pytest.mark.parametrize(("dim", "n"), [(64, 64), (40, 100), (96, 70), (72, 64), (128, 130), (192, 70), (256, 65)])
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("dq_group", [False, True])
def test_sums_become_rows(dim: int, n: int, scales: bool, dq_group: bool) -> None:
    q = torch.zeros(2, 3, n, dim, dtype=torch.float16)
    w = KernelArgs(q, q, q, BlockMask(n, n), scale=0.5, scales=torch.ones(3) if scales else None)
    tile = backward_launch.tile_for(w)
    tile = tile._replace(dq_group=dq_group and not tile.wide)
    workspace = backward_launch.workspace_for(w, tile)
    row_blocks, second = 6 * -(-n // tile.BM), tile.second_chunk
    chunks = [width // tile.parts for width in (tile.widths(w)[0] - second, second) if width]  # columns of a part
    g = torch.Generator().manual_seed(0)
    sums = [[torch.randn(row_blocks, tile.BM, C, generator=g) for _ in range(tile.parts)] for C in chunks]
    in_memory = [
        in_register_order(x[block]) for block in range(row_blocks) for part in zip(*sums, strict=True) for x in part
    ]
    workspace.dq_sums.copy_(torch.cat(in_memory))
    workspace.semaphores.fill_(1)
    workspace.semaphores[0] = 0  # no key block added to the first row block of the first head
    dq = backward_launch.postprocess_dq(w, workspace, tile)
    X = torch.cat([part for chunk in sums for part in chunk], dim=2).view(2, 3, row_blocks // 6 * tile.BM, -1)
    X[0, 0, : tile.BM] = 0.0
    expected = X[:, :, :n, :dim] if scales else (X[:, :, :n, :dim] * 0.5).half()
    assert torch.equal(dq, expected)
