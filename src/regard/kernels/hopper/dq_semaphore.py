"""The dQ semaphore: programs wait for one another through memory."""
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...compat.gluon import group_barrier

__all__ = ["acquire", "release"]

# Read a semaphore and see everything that was written before it was set; set it so that others do.
_ACQUIRE = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
_RELEASE = gl.constexpr("{ st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0; }")
# Wait until TMA has written to memory what this thread gave it.
_WRITTEN = gl.constexpr("{ cp.async.bulk.wait_group 0; mov.u32 $0, $1; }")


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
