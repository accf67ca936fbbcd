"""Blocks of rows in shared memory are where the copy engine puts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hopper_compiled
from hopper_compiled import RECENT, compiles

gluon = pytest.importorskip("triton.experimental.gluon")
gl = pytest.importorskip("triton.experimental.gluon.language")

from regard.compat.gluon import row_blocks  # noqa: E402

hopper = hopper_compiled.hopper
found: list[Any] = []


@gluon.constexpr_function
def note(x: Any) -> int:
    found[len(found) :] = [x]  # Triton knows no methods
    return 0


@gluon.jit
def layouts(out, layout: gl.constexpr, rows: gl.constexpr, R: gl.constexpr, C: gl.constexpr):  # type: ignore[no-untyped-def]
    """Tell where the numbers of a tile are, and those of one of its blocks of rows."""
    X = gl.allocate_shared_memory(gl.bfloat16, [R, C], layout)
    block = row_blocks(X, rows).index(0)
    first: gl.constexpr = note(gl.to_linear_layout(X.layout, X.shape))
    second: gl.constexpr = note(gl.to_linear_layout(block.layout, block.shape))
    shape: gl.constexpr = note(row_blocks(X, rows).shape)
    gl.store(out, first + second + shape)


@compiles
@pytest.mark.skipif(not RECENT, reason="Triton 3.6 crashes when it is asked for the layout of shared memory")
@pytest.mark.parametrize("columns", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [64, 128])
def test_blocks_of_rows_are_where_tma_puts_the_rows_of_a_tile(rows: int, columns: int, hopper: None) -> None:
    found.clear()
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    layouts.warmup(torch.empty(1, dtype=torch.int32), layout, 16, rows, columns, grid=(1,), enable_fp_fusion=True)
    whole, block, shape = (getattr(x, "value", x) for x in found)
    panel = min(columns, 64)
    assert [int(getattr(n, "value", n)) for n in shape] == [columns // panel * (rows // 16), 16, panel]
    others = [[16 << bit, 0] for bit in range(rows.bit_length() - 5)]  # then rows that follow, and then panels
    others += [[0, 64 << bit] for bit in range(columns.bit_length() - 7)]
    assert whole.offset_bases == [*block.offset_bases, *others]
