"""The backward pass on Hopper for lists of keys that 64 rows share: a program has one list, and takes 64 keys at a time.

It computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, so that Pᵀ and dSᵀ stay in registers for what the list adds to the gradients of its keys,
dV = Pᵀ dO and dK = dSᵀ Q. These leave through the shared memory of the keys and values that are no longer needed.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ...compat.gluon import group_barrier, tma_store
from ..portable.tile_ops import LOG2E
from .chosen_tile import (
    KEYS,
    ROWS,
    fetch_list,
    find_list,
    gathered_layout,
    load_rows,
    next_entries,
    row_index,
    shared_matrix,
    start_copies,
    store_rows,
)
from .online_softmax import exp2
from .register_layouts import mma_layout

__all__ = ["chosen_backward"]


@gluon.jit
def load_gradients(given, strides, scale, item, list_, group, groups, height, n, heads, dO_to, lse_to, delta_to, DV: gl.constexpr):
    """Bring what the backward is given of the rows to shared memory: dO, the lse in log2 units, and the scale times Σ dO ∘ O − g_lse."""
    L: gl.constexpr = gathered_layout(DV)
    dO = load_rows(given.dO, strides.dO, item, list_, group, groups, height, DV, L)
    O = load_rows(given.output, strides.output, item, list_, group, groups, height, DV, L)
    dO_to.store(dO)
    i, head = row_index(list_, group, groups, height, gl.SliceLayout(1, L))
    at = (item.to(gl.int64) * heads + head) * n + i
    delta = gl.sum(dO.to(gl.float32) * O.to(gl.float32), 1)
    if given.g_lse is not None:
        delta -= gl.load(given.g_lse + at)
    row_max = gl.load(given.row_max + at)
    lse_to.store((gl.where(row_max == float("-inf"), 0.0, row_max) + gl.load(given.log_row_sum + at)) * LOG2E)
    delta_to.store(delta * scale)


@gluon.jit(do_not_specialize=["first_list", "n", "heads", "groups", "owners", "height", "count"])
def chosen_backward(
    q, k, v, given, dq, dk_parts, dv_parts, strides, lists, scale, first_list, n, heads, groups, owners, height, count, width, D: gl.constexpr, DV: gl.constexpr
):  # fmt: skip
    """Program (one of `count` lists from `first_list` on, group of heads, batch item). `dk_parts` and `dv_parts` describe where dK and dV go."""
    list_, group, item, kv_head, entries, tiles = find_list(gl.program_id(0), lists, first_list, count, width, heads, groups, owners)
    fetch_list(entries, width)
    LK: gl.constexpr = gathered_layout(D)
    SL: gl.constexpr = mma_layout(ROWS)
    KL: gl.constexpr = mma_layout(D)
    VL: gl.constexpr = mma_layout(DV)
    dtype: gl.constexpr = q.dtype.element_ty
    Q = gl.allocate_shared_memory(dtype, [ROWS, D], shared_matrix(D, dtype))
    dO = gl.allocate_shared_memory(dtype, [ROWS, DV], shared_matrix(DV, dtype))
    K = gl.allocate_shared_memory(dtype, [2, KEYS, D], shared_matrix(D, dtype))
    V = gl.allocate_shared_memory(dtype, [2, KEYS, DV], shared_matrix(DV, dtype))
    dS_smem = gl.allocate_shared_memory(dtype, [KEYS, ROWS], shared_matrix(ROWS, dtype))
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [ROWS], VECTOR)
    delta = gl.allocate_shared_memory(gl.float32, [ROWS], VECTOR)
    k += item.to(gl.int64) * strides.k.item + kv_head.to(gl.int64) * strides.k.head
    v += item.to(gl.int64) * strides.v.item + kv_head.to(gl.int64) * strides.v.head
    start_copies(k, v, strides, next_entries(entries, 0, width, LK), K.index(0), V.index(0), D, DV)
    entry = next_entries(entries, 1, width, LK)
    Q.store(load_rows(q, strides.q, item, list_, group, groups, height, D, LK))
    load_gradients(given, strides, scale, item, list_, group, groups, height, n, heads, dO, lse, delta, DV)

    unit = scale * LOG2E
    to = gl.program_id(0) * width
    dQ = gl.zeros([ROWS, D], gl.float32, KL)
    zero = gl.zeros([KEYS, ROWS], gl.float32, SL)
    for t in range(tiles):
        stage = t % 2
        async_copy.wait_group(0)
        fence_async_shared()
        group_barrier()  # all warps have what they copied
        S = warpgroup_mma(K.index(stage), Q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dP = warpgroup_mma(V.index(stage), dO.permute((1, 0)), zero, use_acc=False, is_async=True)
        tma.store_wait(0)
        group_barrier()  # what the tile before left in the other buffers has been read
        start_copies(k, v, strides, entry, K.index(1 - stage), V.index(1 - stage), D, DV)
        entry = next_entries(entries, t + 2, width, LK)

        S = warpgroup_mma_wait(1, [S])
        # At most 1, also where the key is NONE: its K and V are zeros, and nobody reads its dK and dV.
        P = exp2(gl.minimum(S * unit - lse.load(gl.SliceLayout(0, SL))[None, :], 0.0))  # [KEYS, ROWS]
        dV = warpgroup_mma(gl.convert_layout(P.to(dtype), gl.DotOperandLayout(0, VL, 2)), dO, gl.zeros([KEYS, DV], gl.float32, VL), use_acc=False, is_async=True)
        dP = warpgroup_mma_wait(1, [dP])
        dS = (P * (dP * scale - delta.load(gl.SliceLayout(0, SL))[None, :])).to(dtype)
        dS_smem.store(dS)
        fence_async_shared()
        group_barrier()
        dQ = warpgroup_mma(dS_smem.permute((1, 0)), K.index(stage), dQ, is_async=True)
        dS = gl.convert_layout(dS, gl.DotOperandLayout(0, KL, 2))
        dV = warpgroup_mma_wait(1, [dV])
        V.index(stage).store(dV.to(dtype))
        # dV has left its registers before dK needs some: 100 bytes per thread spill, otherwise 400.
        dK = warpgroup_mma(dS, Q, gl.zeros([KEYS, D], gl.float32, KL), use_acc=False, is_async=True)
        dQ, dK = warpgroup_mma_wait(0, [dQ, dK])
        group_barrier()  # all warps are done with these keys
        K.index(stage).store(dK.to(dtype))
        fence_async_shared()
        group_barrier()
        tma_store(dk_parts, [to + t * KEYS, 0], K.index(stage))
        tma_store(dv_parts, [to + t * KEYS, D], V.index(stage))

    async_copy.wait_group(0)
    store_rows(dq, strides.dq, item, list_, group, groups, height, dQ, LK)
    tma.store_wait(0)
