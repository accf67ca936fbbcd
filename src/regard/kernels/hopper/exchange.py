"""What programs hand to one another through memory: a counter that is passed on, and a block that is added."""
# mypy: ignore-errors

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["ACQUIRE", "RELEASE", "SETTLED", "tma_add"]

# Read a counter, and see what was written before it was set; set it, so that others see the same.
ACQUIRE = "ld.acquire.gpu.global.b32 $0, [$1];"
RELEASE = "{ st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0; }"
# Wait until what this thread gave the copy engine has been written to memory.
SETTLED = "{ cp.async.bulk.wait_group 0; mov.u32 $0, $1; }"


@builtin
def _add(described, coord, block, _semantic=None):
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, described.handle, at, block.handle)


# Newer Gluons have it; that of Triton 3.6 has its parts.
tma_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _add
