"""Every private or version-dependent symbol of Gluon, Triton's language for one chip, that the Hopper kernels use."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["TensorDescriptor", "group_barrier", "tma_add", "tma_load", "tma_store"]

# Triton 3.6 has these under longer names.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def _reduce_add():
    """The bulk reduce-add of the copy engine. Triton 3.6 can emit it but has no function for it, so we build one."""
    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def add(descriptor, coord, block, _semantic=None):
        at = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, block.handle)

    return add


tma_add = _reduce_add()
