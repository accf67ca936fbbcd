"""Register layouts of the tiles of a warp group."""
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["mma_layout", "transposed_layout"]


@gluon.constexpr_function
def mma_layout(columns):
    """The layout of a warp group's product, [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def transposed_layout(rows):
    """The layout of a warp group's product [64, rows], read as its transpose [rows, 64]: every number stays in its register."""
    wide = [[1 << b, 0] for b in range(3, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1, 0], [0, 8], *wide], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32]], [], [rows, 64]
    )
