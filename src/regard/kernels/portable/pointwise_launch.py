"""Launch the kernels for gradients of tables that a function of the scores reads."""

from __future__ import annotations

import math

import triton
from torch import Tensor

from .. import launch_cache
from ..arguments import BackwardRows, BackwardStrides, KernelArgs, matrix_strides
from ..pointwise import DIAGONALS, KEYS, TableLoad
from .aggregates import constants
from .launch import options_of, with_smaller_tiles
from .pointwise_gradient import table_gradient_by_keys, table_gradient_by_rows

__all__ = ["table_gradient"]

_MOST = 2**24  # numbers that the sums along diagonals may take


@with_smaller_tiles("bias gradient")
def table_gradient(w: KernelArgs, rows: BackwardRows, load: TableLoad) -> Tensor:
    """Σ dS ∘ ∂value/∂load along rows (L, H, N), keys (L, H, M), or diagonals (L, H, N + M − 1)."""
    if w.pointwise is None:
        raise RuntimeError("a call without a function of the scores has no tables")
    L, H, N = w.rows
    diagonals, by_keys = load.along == DIAGONALS, load.along == KEYS
    c = w.config("bias gradient")
    block = min(c.BM, c.BN)  # tiles are square, as diagonals need
    c = c._replace(BM=block, BN=block, warps=8 if diagonals else 4, stages=2 if w.query.element_size() == 2 else 1)
    strides = BackwardStrides(w.strides(), matrix_strides(rows.dO))
    C = constants(
        BM=c.BM, BN=c.BN, DROP=w.drop.keys is not None, FAST=False, EXACT=w.exact, ENTROPY=rows.g_entropy is not None, TMA=False,
        DIAGONALS=diagonals, PARTIAL=w.pointwise.partial(load.place), **w.dims, **w.kinds,
    )  # fmt: skip
    blocks, lines = triton.cdiv(N, c.BM), N + w.m - 1
    shared = max(1, math.ceil(blocks * L * H * lines / _MOST)) if diagonals else 1
    parts = triton.cdiv(blocks, shared)
    shape = (L, H, parts, lines) if diagonals else (L, H, w.m if by_keys else N)
    out = rows.delta.new_zeros(shape)
    arguments = {
        "q": w.query, "k": w.key, "v": w.value, "do": rows.dO, "out": out, "stats": rows.stats,
        "args": w.pass_args(w.block_lists(c, by_keys=by_keys), strides), **w.sizes, "C": C,
    }  # fmt: skip
    if by_keys:
        launch_cache.start(None, table_gradient_by_keys, triton.cdiv(w.m, c.BN) * L * H, arguments, options_of(c), ())
        return out
    arguments |= {"parts": parts, "shared_rows": shared}
    launch_cache.start(None, table_gradient_by_rows, parts * L * H, arguments, options_of(c), ())
    return out.sum(2) if diagonals else out
