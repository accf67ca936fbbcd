"""What programs hand to one another through memory: a counter that is passed on, and a block that is added."""
# mypy: ignore-errors

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from .forward import group_barrier

__all__ = ["await_turn", "next_turn", "tma_add"]

# Read a counter, and see what was written before it was set; set it, so that others see the same.
_ACQUIRE = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
_RELEASE = gl.constexpr("{ st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0; }")
# Wait until what this thread gave the copy engine has been written to memory.
_SETTLED = gl.constexpr("{ cp.async.bulk.wait_group 0; mov.u32 $0, $1; }")


@builtin
def _add(described, coord, block, _semantic=None):
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, described.handle, at, block.handle)


# Newer Gluons have it; that of Triton 3.6 has its parts.
tma_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _add


@gluon.jit
def await_turn(counter, turn):
    """Wait until a counter shows a turn; then what those before it have added is there."""
    now = gl.inline_asm_elementwise(_ACQUIRE, "=r,l", [counter], gl.int32, False, 1)
    while now != turn:
        now = gl.inline_asm_elementwise(_ACQUIRE, "=r,l", [counter], gl.int32, False, 1)


@gluon.jit
def next_turn(counter, turn):
    """Wait until what this warp added is in memory, and show the turn after its own."""
    gl.inline_asm_elementwise(_SETTLED, "=r,r", [turn], gl.int32, False, 1)
    group_barrier()
    gl.inline_asm_elementwise(_RELEASE, "=r,l,r", [counter, turn + 1], gl.int32, False, 1)
