"""The backward pass on Hopper for lists of keys: a program has 64 of the rows that share a list, and takes 64 keys at a time.

It computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, so that Pᵀ and dSᵀ stay in registers for what the rows add to the gradients of their keys,
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
    is_cut,
    listed_keys,
    load_rows,
    load_spans,
    row_index,
    seen_keys,
    shared_matrix,
    start_copies,
    store_rows,
)
from .online_softmax import exp2
from .register_layouts import mma_layout

__all__ = ["chosen_backward"]


@gluon.jit
def load_queries(q, given, strides, item, row_tile, group, groups, n, heads, D: gl.constexpr):
    """The queries of the rows; 0 in a row that sees nothing, whose query may be NaN and multiplies a cotangent of 0."""
    L: gl.constexpr = gathered_layout(D)
    i, head = row_index(row_tile, group, groups, gl.SliceLayout(1, L))
    row_max = gl.load(given.row_max + (item.to(gl.int64) * heads + head) * n + i)
    Q = load_rows(q, strides.q, item, row_tile, group, groups, D, L)
    return gl.where((row_max == float("-inf"))[:, None], 0.0, Q).to(Q.dtype)


@gluon.jit
def load_gradients(given, strides, scale, item, row_tile, group, groups, n, heads, dO_to, lse_to, delta_to, DV: gl.constexpr):
    """Bring what the backward is given of the rows to shared memory: dO, the lse in log2 units, and the scale times Σ dO ∘ O − g_lse."""
    L: gl.constexpr = gathered_layout(DV)
    dO = load_rows(given.dO, strides.dO, item, row_tile, group, groups, DV, L)
    O = load_rows(given.output, strides.output, item, row_tile, group, groups, DV, L)
    dO_to.store(dO)
    i, head = row_index(row_tile, group, groups, gl.SliceLayout(1, L))
    at = (item.to(gl.int64) * heads + head) * n + i
    delta = gl.sum(dO.to(gl.float32) * O.to(gl.float32), 1)
    if given.g_lse is not None:
        delta -= gl.load(given.g_lse + at)
    row_max = gl.load(given.row_max + at)
    lse_to.store((gl.where(row_max == float("-inf"), 0.0, row_max) + gl.load(given.log_row_sum + at)) * LOG2E)
    delta_to.store(delta * scale)


@gluon.jit(do_not_specialize=["first_list", "n", "m", "heads", "groups", "owners", "tiles", "count"])
def chosen_backward(
    q, k, v, given, dq, dk_parts, dv_parts, strides, lists, scale, first_list, n, m, heads, groups, owners, tiles, count, width, SIZE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr
):  # fmt: skip
    """Program (tile of rows, one of `count` lists from `first_list` on, group of heads, batch item).

    `dk_parts` and `dv_parts` describe where dK and dV go: all that first tiles of rows add, then what second ones do, and so on.
    """
    at = gl.program_id(0)
    row_tile, group, item, kv_head, entries, key_tiles = find_list(at, lists, first_list, count, width, heads, groups, owners, tiles, SIZE)
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
    seen = None
    if lists.lo is not None:
        lo, hi = load_spans(lists, item, row_tile, group, groups, gl.SliceLayout(0, SL))
        seen = seen_keys(lo, hi)
        keys = gl.allocate_shared_memory(gl.int32, [2, KEYS], VECTOR)
        spans = gl.allocate_shared_memory(gl.int32, [2, ROWS], VECTOR)
        spans.index(0).store(lo)
        spans.index(1).store(hi)
    j = listed_keys(entries, 0, width, m, seen, SIZE, LK)
    start_copies(k, v, strides, j, K.index(0), V.index(0), D, DV)
    if lists.lo is not None:
        keys.index(0).store(j)
    j = listed_keys(entries, 1, width, m, seen, SIZE, LK)
    Q.store(load_queries(q, given, strides, item, row_tile, group, groups, n, heads, D))
    load_gradients(given, strides, scale, item, row_tile, group, groups, n, heads, dO, lse, delta, DV)

    unit = scale * LOG2E
    to = (at % tiles * (gl.num_programs(0) // tiles) + at // tiles) * width * SIZE
    dQ = gl.zeros([ROWS, D], gl.float32, KL)
    zero = gl.zeros([KEYS, ROWS], gl.float32, SL)
    for t in range(key_tiles):
        stage = t % 2
        async_copy.wait_group(0)
        fence_async_shared()
        group_barrier()  # all warps have what they copied
        S = warpgroup_mma(K.index(stage), Q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dP = warpgroup_mma(V.index(stage), dO.permute((1, 0)), zero, use_acc=False, is_async=True)
        tma.store_wait(0)
        group_barrier()  # what the tile before left in the other buffers has been read
        start_copies(k, v, strides, j, K.index(1 - stage), V.index(1 - stage), D, DV)
        if lists.lo is not None:
            keys.index(1 - stage).store(j)
            cut = is_cut(entries, t, width, seen, SIZE)
        j = listed_keys(entries, t + 2, width, m, seen, SIZE, LK)

        S = warpgroup_mma_wait(1, [S])
        if lists.lo is not None:
            if cut:
                its = keys.index(stage).load(gl.SliceLayout(1, SL))[:, None]
                first, end = spans.index(0).load(gl.SliceLayout(0, SL))[None, :], spans.index(1).load(gl.SliceLayout(0, SL))[None, :]
                S = gl.where((its >= first) & (its < end), S, float("-inf"))
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
    store_rows(dq, strides.dq, item, row_tile, group, groups, dQ, LK)
    tma.store_wait(0)
