"""Blocks of rows in shared memory are where the copy engine puts them."""

from __future__ import annotations

from typing import Any

import pytest

import hopper_compiled
from hopper_compiled import RECENT, compiles

gluon = pytest.importorskip("triton.experimental.gluon")
gl = pytest.importorskip("triton.experimental.gluon.language")

from regard.compat.gluon import row_blocks  # noqa: E402

hopper = hopper_compiled.hopper
ROWS = gl.constexpr(16)  # of a block


@gluon.constexpr_function
def continues(whole: Any, block: Any, R: int, C: int) -> bool:
    """Whether a tile begins with a block, which the rows that follow come after, and then the panels."""
    others = [[ROWS << bit, 0] for bit in range(R.bit_length() - 5)]
    others += [[0, 64 << bit] for bit in range(C.bit_length() - 7)]
    return bool(whole.offset_bases == [*block.offset_bases, *others])


@gluon.jit
def compare(layout: gl.constexpr, R: gl.constexpr, C: gl.constexpr):  # type: ignore[no-untyped-def]
    """Compare where the numbers of a tile are with where those of one of its blocks of rows are."""
    X = gl.allocate_shared_memory(gl.bfloat16, [R, C], layout)
    blocks = row_blocks(X, ROWS)
    block = blocks.index(0)
    panel: gl.constexpr = 64 if C > 64 else C
    gl.static_assert(blocks.shape[0] * ROWS * panel == R * C and block.shape[0] == ROWS and block.shape[1] == panel)
    whole: gl.constexpr = gl.to_linear_layout(X.layout, X.shape)
    gl.static_assert(continues(whole, gl.to_linear_layout(block.layout, block.shape), R, C))


@compiles
@pytest.mark.skipif(not RECENT, reason="Triton 3.6 crashes when it is asked for the layout of shared memory")
@pytest.mark.parametrize("columns", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [64, 128])
def test_blocks_of_rows_are_where_tma_puts_the_rows_of_a_tile(rows: int, columns: int, hopper: None) -> None:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    compare.warmup(layout, rows, columns, grid=(1,), enable_fp_fusion=True)


@gluon.jit
def compare_vector(layout: gl.constexpr, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same for a vector of numbers."""
    X = gl.allocate_shared_memory(gl.float32, [R], layout)
    blocks = row_blocks(X, ROWS)
    block = blocks.index(0)
    gl.static_assert(blocks.shape[0] * ROWS == R and block.shape[0] == ROWS and len(block.shape) == 1)
    whole: gl.constexpr = gl.to_linear_layout(X.layout, X.shape)
    gl.static_assert(follows(whole, gl.to_linear_layout(block.layout, block.shape), R))


@gluon.constexpr_function
def follows(whole: Any, block: Any, R: int) -> bool:
    """Whether a vector begins with a block, which the others come after."""
    return bool(whole.offset_bases == [*block.offset_bases, *([ROWS << bit] for bit in range(R.bit_length() - 5))])


@compiles
@pytest.mark.skipif(not RECENT, reason="Triton 3.6 crashes when it is asked for the layout of shared memory")
def test_blocks_of_a_vector_are_where_tma_puts_its_numbers(hopper: None) -> None:
    compare_vector.warmup(gl.NVMMASharedLayout.get_default_for([64], gl.float32), 64, grid=(1,), enable_fp_fusion=True)
