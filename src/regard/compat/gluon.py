"""Every private or version-dependent symbol of Gluon, Triton's language for one chip, that the Hopper kernels use."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language._semantic import GluonCallerContext
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "KEYS_IN_REGISTERS",
    "TensorDescriptor",
    "group_barrier",
    "row_blocks",
    "start_copy",
    "tma_add",
    "tma_load",
    "tma_store",
    "warp_specialize",
]

# Triton 3.6 has these under longer names.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
start_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Whether registers are left for the keys of a backward group with up to 64 dims. The code of Triton 3.9 has some 20 too
# few for them, and spills in each iteration.
KEYS_IN_REGISTERS = gl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6))


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


@builtin
def row_blocks(X, rows, _semantic=None):
    """Shared memory X [R, C] that TMA fills, by so many rows: [C / P · R / rows, rows, P], of 16-bit numbers.

    A vector X [R] becomes [R / rows, rows]. A number of the program may index these; `slice` takes constants alone. TMA
    swizzles at most 128 bytes of a row, so every P = 64 columns are a panel, which lies before the next.
    """
    rows = getattr(rows, "value", rows)
    if len(X.shape) == 1:
        return _semantic.memdesc_reinterpret(X, X.dtype, [X.shape[0] // rows, rows], X.layout)
    R, C = X.shape
    panel = min(C, 64)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * panel, element_bitwidth=16, rank=2)
    return _semantic.memdesc_reinterpret(X, X.dtype, [C // panel * (R // rows), rows, panel], layout)


class _OneContext:
    """A code generator for which the default partition is called like a worker with as many warps."""

    def __init__(self, generator, num_warps):
        self._generator, self._default = generator, GluonCallerContext(num_warps=num_warps)

    def call_JitFunction(self, fn, args, kwargs, caller_context=None):
        return self._generator.call_JitFunction(fn, args, kwargs, caller_context=caller_context or self._default)


@builtin
def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs, _semantic=None, _generator=None):
    """`gl.warp_specialize`, but a function that the default partition and a worker call is generated once.

    Triton generates a function once for each number of warps, and again for the default partition.
    """
    generator = _OneContext(_generator, _semantic.num_warps(_generator).value)
    warps, registers = ([getattr(x, "value", x) for x in given] for given in (worker_num_warps, worker_num_regs))
    return _semantic.warp_specialize(functions_and_args, warps, registers, generator)
