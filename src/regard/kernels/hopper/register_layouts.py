"""How tiles lie in a warp group's registers."""
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["product", "turned"]


@gluon.constexpr_function
def product(columns):
    """What a warp group multiplies, [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def turned(rows):
    """A transposed product [64, rows] of a warp group, read as [rows, 64]: who has which number stays as it is."""
    wide = [[1 << b, 0] for b in range(3, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1, 0], [0, 8], *wide], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32]], [], [rows, 64]
    )
