"""The forward pass on Hopper for lists of keys that 64 rows share: a program has one list, and folds 64 keys at a time."""
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
    gather,
    gathered_layout,
    load_rows,
    next_entries,
    row_index,
    shared_matrix,
    store_rows,
)
from .online_softmax import exp2
from .register_layouts import mma_layout

__all__ = ["chosen_forward"]

_NONE = gl.constexpr(NONE)


@gluon.jit
def start_copies(k, v, strides, entry, stage, D: gl.constexpr, DV: gl.constexpr):
    """Start to copy a tile of keys and values, and say what its logits begin with: −inf for NONE."""
    gather(k, strides.k.row, entry, stage[0], gathered_layout(D))
    gather(v, strides.v.row, gl.convert_layout(entry, gl.SliceLayout(1, gathered_layout(DV))), stage[1], gathered_layout(DV))
    async_copy.commit_group()
    stage[2].store(gl.where(entry != _NONE, 0.0, float("-inf")))


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
def new_stage(dtype: gl.constexpr, D: gl.constexpr, DV: gl.constexpr):
    """Shared memory for keys and values of a tile, and for what its logits begin with."""
    K = gl.allocate_shared_memory(dtype, [KEYS, D], shared_matrix(D, dtype))
    V = gl.allocate_shared_memory(dtype, [KEYS, DV], shared_matrix(DV, dtype))
    return K, V, gl.allocate_shared_memory(gl.float32, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def fold_tile(O, row_max, l, e, Q, here, there, k, v, strides, entry, unit, D: gl.constexpr, DV: gl.constexpr, ENTROPY: gl.constexpr, LEFT: gl.constexpr):
    """Fold the tile that was copied `here`, and start to copy another one `there`; LEFT tiles are still to come."""
    SL: gl.constexpr = mma_layout(KEYS)
    OL: gl.constexpr = mma_layout(DV)
    async_copy.wait_group(LEFT)
    fence_async_shared()
    group_barrier()  # all warps have what they copied, and are done with the tile before
    _, begin = gl.broadcast(gl.zeros([ROWS, KEYS], gl.float32, SL), here[2].load(gl.SliceLayout(0, SL))[None, :])
    S = warpgroup_mma(Q, here[0].permute((1, 0)), begin, is_async=True)
    start_copies(k, v, strides, entry, there, D, DV)
    S = warpgroup_mma_wait(0, [S])
    P, row_max, l, e, a = fold(S, row_max, l, e, unit, ENTROPY)
    P = gl.convert_layout(P.to(Q.dtype), gl.DotOperandLayout(0, OL, 2))
    O *= gl.convert_layout(a, gl.SliceLayout(1, OL))[:, None]
    O = warpgroup_mma(P, here[1], O, is_async=True)
    return warpgroup_mma_wait(0, [O]), row_max, l, e


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


@gluon.jit(do_not_specialize=["n", "heads", "groups", "owners", "height", "count", "programs"])
def chosen_forward(
    q, k, v, out, strides, lists, unit, n, heads, groups, owners, height, count, width, programs, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr, ENTROPY: gl.constexpr
):  # fmt: skip
    """Program (list, group of heads, batch item); the last lists first, which often are the longest. `unit` is the scale times log2 e.

    With PAIRS, a turn of the loop folds two tiles, each in shared memory of its own. Triton then knows that copies to one do not touch
    the other, and leaves out two of four barriers per tile.
    """
    list_, group, item, kv_head, entries, tiles = find_list(programs - 1 - gl.program_id(0), lists, 0, count, width, heads, groups, owners)
    fetch_list(entries, width)
    LK: gl.constexpr = gathered_layout(D)
    LV: gl.constexpr = gathered_layout(DV)
    SL: gl.constexpr = mma_layout(KEYS)
    OL: gl.constexpr = mma_layout(DV)
    dtype: gl.constexpr = q.dtype.element_ty
    Q = gl.allocate_shared_memory(dtype, [ROWS, D], shared_matrix(D, dtype))
    k += item.to(gl.int64) * strides.k.item + kv_head.to(gl.int64) * strides.k.head
    v += item.to(gl.int64) * strides.v.item + kv_head.to(gl.int64) * strides.v.head
    O = gl.zeros([ROWS, DV], gl.float32, OL)
    row_max = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SL))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SL))
    e = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SL))
    if PAIRS:
        a = new_stage(dtype, D, DV)
        b = new_stage(dtype, D, DV)
        start_copies(k, v, strides, next_entries(entries, 0, width, LK), a, D, DV)
        entry = next_entries(entries, 1, width, LK)
        Q.store(load_rows(q, strides.q, item, list_, group, groups, height, D, LK))
        for t in range(0, tiles, 2):  # the second tile may be after the end of the list: all NONE
            O, row_max, l, e = fold_tile(O, row_max, l, e, Q, a, b, k, v, strides, entry, unit, D, DV, ENTROPY, 0)
            entry = next_entries(entries, t + 2, width, LK)
            O, row_max, l, e = fold_tile(O, row_max, l, e, Q, b, a, k, v, strides, entry, unit, D, DV, ENTROPY, 0)
            entry = next_entries(entries, t + 3, width, LK)
    else:
        K = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], shared_matrix(D, dtype))
        V = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DV], shared_matrix(DV, dtype))
        hidden = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        for s in gl.static_range(STAGES - 1):
            start_copies(k, v, strides, next_entries(entries, s, width, LK), (K.index(s), V.index(s), hidden.index(s)), D, DV)
        entry = next_entries(entries, STAGES - 1, width, LK)
        Q.store(load_rows(q, strides.q, item, list_, group, groups, height, D, LK))
        stage = 0
        for t in range(tiles):
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            here = (K.index(stage), V.index(stage), hidden.index(stage))
            there = (K.index(free), V.index(free), hidden.index(free))
            O, row_max, l, e = fold_tile(O, row_max, l, e, Q, here, there, k, v, strides, entry, unit, D, DV, ENTROPY, STAGES - 2)
            entry = next_entries(entries, t + STAGES, width, LK)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)

    async_copy.wait_group(0)
    O *= gl.convert_layout(1.0 / gl.where(l == 0.0, 1.0, l), gl.SliceLayout(1, OL))[:, None]
    store_rows(out.output, strides.output, item, list_, group, groups, height, O, LV)
    i, head = row_index(list_, group, groups, height, gl.SliceLayout(1, SL))
    store_statistics(out, (item.to(gl.int64) * heads + head) * n + i, row_max, l, e, ENTROPY)
