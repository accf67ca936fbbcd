"""The forward pass on Hopper for lists of keys: a program has 64 of the rows that share a list, and folds 64 keys at a time."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...compat.gluon import group_barrier
from ...masks.lists import NONE
from ..portable.tile_ops import LN2, LOWEST, clamp_exponent
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

__all__ = ["chosen_forward"]

_NONE = gl.constexpr(NONE)


@gluon.jit
def fold(S, row_max, l, e, unit, ENTROPY: gl.constexpr):
    """Add products S [ROWS, KEYS]: the weights relative to the new max, the new statistics, and what rescales O."""
    m = gl.maximum(row_max, gl.max(S, 1) * unit)  # [ROWS] in log2 units
    T = S * unit - m[:, None]
    shift = row_max - m
    if ENTROPY:
        T = clamp_exponent(T)  # finite, so that P·T is 0 and not NaN
        shift = clamp_exponent(shift)
    P, a = exp2(T), exp2(shift)
    if ENTROPY:
        e = a * (e + shift * l) + gl.sum(P * T, 1)
    return P, m, a * l + gl.sum(P, 1), e, a


@gluon.jit
def store_statistics(out, at, m, l, e, ENTROPY: gl.constexpr):
    """Store the statistics of rows at `at`."""
    empty = l == 0.0
    log_row_sum = gl.log2(gl.where(empty, 1.0, l)) * LN2
    gl.store(out.lse + at, gl.where(empty, float("-inf"), m * LN2 + log_row_sum))
    gl.store(out.max_logit + at, gl.where(empty, float("-inf"), m * LN2))
    gl.store(out.log_row_sum + at, log_row_sum)
    if ENTROPY:
        gl.store(out.entropy + at, log_row_sum - e / gl.where(empty, 1.0, l) * LN2)


@gluon.jit(do_not_specialize=["n", "m", "heads", "groups", "owners", "tiles", "count", "programs"])
def chosen_forward(
    q, k, v, out, strides, lists, unit, n, m, heads, groups, owners, tiles, count, width, programs, SIZE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, ENTROPY: gl.constexpr
):  # fmt: skip
    """Program (tile of rows, list, group of heads, batch item); the last lists first, which often are the longest. `unit` is the scale times log2 e."""
    at = programs - 1 - gl.program_id(0)
    row_tile, group, item, kv_head, entries, key_tiles = find_list(at, lists, 0, count, width, heads, groups, owners, tiles, SIZE)
    fetch_list(entries, width)
    LK: gl.constexpr = gathered_layout(D)
    SL: gl.constexpr = mma_layout(KEYS)
    OL: gl.constexpr = mma_layout(DV)
    VECTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q.dtype.element_ty
    Q = gl.allocate_shared_memory(dtype, [ROWS, D], shared_matrix(D, dtype))
    K = gl.allocate_shared_memory(dtype, [2, KEYS, D], shared_matrix(D, dtype))
    V = gl.allocate_shared_memory(dtype, [2, KEYS, DV], shared_matrix(DV, dtype))
    hidden = gl.allocate_shared_memory(gl.float32, [2, KEYS], VECTORS)  # −inf for NONE, else 0
    k += item.to(gl.int64) * strides.k.item + kv_head.to(gl.int64) * strides.k.head
    v += item.to(gl.int64) * strides.v.item + kv_head.to(gl.int64) * strides.v.head
    seen = None
    if lists.lo is not None:
        lo, hi = load_spans(lists, item, row_tile, group, groups, gl.SliceLayout(1, SL))
        seen = seen_keys(lo, hi)
        keys = gl.allocate_shared_memory(gl.int32, [2, KEYS], VECTORS)
    j = listed_keys(entries, 0, width, m, seen, SIZE, LK)
    start_copies(k, v, strides, j, K.index(0), V.index(0), D, DV)
    hidden.index(0).store(gl.where(j != _NONE, 0.0, float("-inf")))
    if lists.lo is not None:
        keys.index(0).store(j)
    j = listed_keys(entries, 1, width, m, seen, SIZE, LK)
    Q.store(load_rows(q, strides.q, item, row_tile, group, groups, D, LK))

    O = gl.zeros([ROWS, DV], gl.float32, OL)
    row_max = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SL))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SL))
    e = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SL))
    for t in range(key_tiles):
        stage = t % 2
        async_copy.wait_group(0)
        fence_async_shared()
        group_barrier()  # all warps have what they copied, and are done with the tile before
        _, begin = gl.broadcast(gl.zeros([ROWS, KEYS], gl.float32, SL), hidden.index(stage).load(gl.SliceLayout(0, SL))[None, :])
        S = warpgroup_mma(Q, K.index(stage).permute((1, 0)), begin, is_async=True)
        start_copies(k, v, strides, j, K.index(1 - stage), V.index(1 - stage), D, DV)
        hidden.index(1 - stage).store(gl.where(j != _NONE, 0.0, float("-inf")))
        if lists.lo is not None:
            keys.index(1 - stage).store(j)
            cut = is_cut(entries, t, width, seen, SIZE)
        S = warpgroup_mma_wait(0, [S])
        if lists.lo is not None:
            if cut:
                its = keys.index(stage).load(gl.SliceLayout(0, SL))[None, :]
                S = gl.where((its >= lo[:, None]) & (its < hi[:, None]), S, float("-inf"))
        P, row_max, l, e, a = fold(S, row_max, l, e, unit, ENTROPY)
        P = gl.convert_layout(P.to(dtype), gl.DotOperandLayout(0, OL, 2))
        O *= gl.convert_layout(a, gl.SliceLayout(1, OL))[:, None]
        O = warpgroup_mma(P, V.index(stage), O, is_async=True)
        O = warpgroup_mma_wait(0, [O])
        j = listed_keys(entries, t + 2, width, m, seen, SIZE, LK)

    async_copy.wait_group(0)
    O *= gl.convert_layout(1.0 / gl.where(l == 0.0, 1.0, l), gl.SliceLayout(1, OL))[:, None]
    store_rows(out.output, strides.output, item, row_tile, group, groups, O, gathered_layout(DV))
    i, head = row_index(row_tile, group, groups, gl.SliceLayout(1, SL))
    store_statistics(out, (item.to(gl.int64) * heads + head) * n + i, row_max, l, e, ENTROPY)
