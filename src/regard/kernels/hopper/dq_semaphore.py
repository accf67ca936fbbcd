"""The dQ semaphore, which programs hand to one another through memory, and TMA's add to memory."""
# mypy: ignore-errors

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from .forward import group_barrier

__all__ = ["acquire", "release", "tma_add"]

# Read a semaphore and see everything that was written before it was set; set it so that others do.
_ACQUIRE = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
_RELEASE = gl.constexpr("{ st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0; }")
# Wait until TMA has written to memory what this thread gave it.
_WRITTEN = gl.constexpr("{ cp.async.bulk.wait_group 0; mov.u32 $0, $1; }")


@builtin
def _add(descriptor, coord, block, _semantic=None):
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, block.handle)


# Newer Gluons have it; that of Triton 3.6 has its parts.
tma_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _add


@gluon.jit
def acquire(semaphore, position):
    """Wait until a semaphore has counted `position` key blocks; their sums are then visible."""
    count = gl.inline_asm_elementwise(_ACQUIRE, "=r,l", [semaphore], gl.int32, False, 1)
    while count != position:
        count = gl.inline_asm_elementwise(_ACQUIRE, "=r,l", [semaphore], gl.int32, False, 1)


@gluon.jit
def release(semaphore, position):
    """Wait until this warp's sum is in memory, then count it."""
    gl.inline_asm_elementwise(_WRITTEN, "=r,r", [position], gl.int32, False, 1)
    group_barrier()
    gl.inline_asm_elementwise(_RELEASE, "=r,l,r", [semaphore, position + 1], gl.int32, False, 1)
