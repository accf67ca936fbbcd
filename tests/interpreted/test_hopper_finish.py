"""The postprocess of the Hopper backward: dQ from its sums, by row block and part, in the order of registers."""

from __future__ import annotations

import pytest
import torch

from gluon_in_python import in_python
from regard.kernels.arguments import KernelArgs
from regard.kernels.block_mask import BlockMask
from regard.kernels.hopper import backward, backward_launch

in_register_order = in_python(backward.in_register_order, static_assert=lambda holds, message: None, constexpr=int)


@pytest.mark.parametrize(("dim", "n"), [(64, 64), (40, 100), (128, 130), (192, 70), (256, 65)])
@pytest.mark.parametrize("scales", [False, True])
def test_sums_become_rows(dim: int, n: int, scales: bool) -> None:
    q = torch.zeros(2, 3, n, dim, dtype=torch.float16)
    w = KernelArgs(q, q, q, BlockMask(n, n), scale=0.5, scales=torch.ones(3) if scales else None)
    tile = backward_launch.tile_for(w)
    workspace = backward_launch.workspace_for(w, tile)
    rows, parts, columns = -(-n // tile.BM), tile.parts, tile.widths(w)[0] // tile.parts
    sums = torch.randn(6 * rows * parts, tile.BM, columns, generator=torch.Generator().manual_seed(0))
    workspace.dq_sums.copy_(torch.cat([in_register_order(part) for part in sums]))
    workspace.semaphores.fill_(1)
    workspace.semaphores[: tile.semaphores] = 0  # no key block added to the first row block of the first head
    dq = backward_launch.postprocess_dq(w, workspace, tile)
    X = sums.view(2, 3, rows, parts, tile.BM, columns).transpose(3, 4).reshape(2, 3, rows * tile.BM, -1)
    X[0, 0, : tile.BM] = 0.0
    expected = X[:, :, :n, :dim] if scales else (X[:, :, :n, :dim] * 0.5).half()
    assert torch.equal(dq, expected)
