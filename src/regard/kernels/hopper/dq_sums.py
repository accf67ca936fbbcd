"""dQ in the Hopper backward: its product, its sums in memory, and the rows that become of them.

dQ is added to memory in the order of registers, part by part. A part is the columns of dQ that one group
computes at a time: half of them in a consumer group (a quarter in `backward_wide.py`), all of them in a
third group. With two chunks it has columns of both, those of the second chunk behind those of the first.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...compat.gluon import group_barrier, tma_add, tma_store
from ..portable.tile_ops import program_tile
from .dq_semaphore import acquire, release
from .forward import flat
from .key_blocks import (
    GROUPS,
    INFO_COUNT,
    buffer_and_phase,
    dq_visit,
    heads_together,
    key_tile,
    next_tile,
    row_block_range,
)
from .register_layouts import mma_layout
from .tile_scheduler import ROWS, read_info

DQ_WARPS = gl.constexpr(2)  # warps that add dQ to memory, each with barriers of its own


@gluon.jit
def key_columns(K, D: gl.constexpr, part: gl.constexpr, fresh_zero, TRAITS: gl.constexpr):
    """The columns of both groups' keys that a part of dQ is computed from, for a chunk of D columns. `fresh_zero` is 0, or `unknown_zero`."""
    C: gl.constexpr = D // TRAITS.PARTS
    gl.static_assert(GROUPS == 2, "two groups have keys")
    first, second = K.index(fresh_zero), K.index(1 + fresh_zero)
    return flat(first, ROWS, D).slice(part * C, C, dim=1), flat(second, ROWS, D).slice(part * C, C, dim=1)


@gluon.jit
def choose_dQ(visit, G):
    """The visit whose dQ a group computes in this one, its buffer, and the phase of its barriers.

    The first group is one visit behind with its part of dQ. So the groups are not at the same place of an iteration at the same
    time, and one computes while the products of the other run. In its first visit of a tile it has no dQ yet. It computes one from whatever
    is in shared memory, and writes it to the buffer of the visit before, but tells no dQ warp; so the loop needs no branch.
    """
    visit_of_dQ = visit - (G ^ 1)
    buffer, phase = buffer_and_phase(visit_of_dQ, DQ_WARPS)
    return visit_of_dQ, buffer, phase


@gluon.jit
def start_dQ(dS, columns, buffer):
    """Start dQ = dS K, a part [BM, C] of its columns: `key_columns`."""
    BM: gl.constexpr = dS.shape[2]
    C: gl.constexpr = columns[0].shape[1]
    zero = gl.zeros([BM, C], gl.float32, mma_layout(C))
    share = warpgroup_mma(dS.index(buffer * GROUPS).permute((1, 0)), columns[0], zero, use_acc=False, is_async=True)
    return warpgroup_mma(dS.index(buffer * GROUPS + 1).permute((1, 0)), columns[1], share, is_async=True)


@gluon.jit
def in_register_order(X):
    """X [64, C] as [2 C, 32]: four numbers of a thread side by side, eight threads in a row. No number moves.

    So a thread stores 16 bytes at a time, and no two threads meet in a bank. `dq_postprocess` reads this order.
    """
    gl.static_assert(X.shape[0] == 64, "a warp group has 64 rows")
    C: gl.constexpr = X.shape[1]
    X = X.reshape([4, 2, 4, 2, C // 8, 4, 2]).permute((4, 0, 2, 3, 5, 1, 6))
    return X.reshape([2 * C, 32])


@gluon.jit
def write_dQ(share, dQ, buffer, phase, params, part, TRAITS: gl.constexpr, pred=True):
    """Write a part of a chunk of dQ to shared memory, once TMA has read the dQ before it in the buffer; without `pred` at once."""
    mbarrier.wait(params.barriers.d_free.index(buffer), phase, pred=pred)
    dQ.index(buffer * TRAITS.PARTS + part).store(in_register_order(share))


@gluon.jit
def pass_dQ(share, dQ, buffer, phase, params, part, TRAITS: gl.constexpr):
    """Write a part of dQ and tell the dQ warp. With two chunks the caller has written the first already."""
    write_dQ(share, dQ, buffer, phase, params, part, TRAITS)
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(params.barriers.d_ready.index(buffer))


@gluon.jit
def dq_of_tile(tile, visit, params, TRAITS: gl.constexpr):
    """Compute dQ = dS K for the visits of a tile, which are counted from `visit`. The result is the number of the visit after them."""
    smem, barriers = params.smem, params.barriers
    DB: gl.constexpr = TRAITS.DB
    MASK: gl.constexpr = TRAITS.MASK
    block, batch, kv_head = key_tile(params, tile)
    count = read_info(params.tile_info, INFO_COUNT, 4)
    mbarrier.arrive(barriers.k_free)  # of the info; consumers arrive once the last dQ has read the keys
    heads = heads_together(params, MASK)
    for u in range(params.heads_per_kv // heads):
        if u > 0:
            _, count = row_block_range(params, batch, kv_head * params.heads_per_kv + u * heads, block, TRAITS.BM, MASK)
        for v in range(visit, visit + count * heads):
            ds_buffer, ds_phase = buffer_and_phase(v, TRAITS.DS_BUFFERS)
            buffer, phase = buffer_and_phase(v, DQ_WARPS)
            mbarrier.wait(barriers.s_ready.index(ds_buffer), ds_phase)
            share = start_dQ(smem.dS, key_columns(smem.K, TRAITS.DA, 0, 0, TRAITS), ds_buffer)
            share = warpgroup_mma_wait(0, deps=[share])
            if DB > 0:  # one chunk after the other: the group has few registers
                write_dQ(share, smem.dQ, buffer, phase ^ 1, params, 0, TRAITS)
                share = start_dQ(smem.dS, key_columns(smem.KB, DB, 0, 0, TRAITS), ds_buffer)
                share = warpgroup_mma_wait(0, deps=[share])
            mbarrier.arrive(barriers.s_free.index(ds_buffer))
            pass_dQ(share, smem.dQB, buffer, phase ^ 1, params, 0, TRAITS)
        visit += count * heads
    return visit


@gluon.jit
def dq_group(params, TRAITS: gl.constexpr):
    """The third group, at dims up to 96: it computes dQ = dS K, so that the consumer groups never wait for one another."""
    tiles = params.key_blocks * params.batch_kv_heads
    taken = 0
    visit = 0
    tile = next_tile(taken, params, 4)
    while tile < tiles:
        visit = dq_of_tile(tile, visit, params, TRAITS)
        taken += 1
        tile = next_tile(taken, params, 4)


@gluon.jit
def store_or_add(descriptor, at, block, position):
    """Let TMA add a block of dQ to memory; the first key block stores its own."""
    if position == 0:
        tma_store(descriptor, [at, 0], block)
    else:
        tma_add(descriptor, [at, 0], block)


@gluon.jit
def add_visits(tile, visits, params, descriptors, W, ADD: gl.constexpr, TRAITS: gl.constexpr):
    """Warp W of two adds dQ of every other visit of a tile to memory by ADD, once the semaphore allows it.

    What a visit needs to know is loaded one visit early. `visits` is the number of visits of earlier tiles; the result adds those of this
    one.
    """
    MASK: gl.constexpr = TRAITS.MASK
    BM: gl.constexpr = TRAITS.BM
    block, batch, kv_head = key_tile(params, tile)
    heads = heads_together(params, MASK)
    for u in range(params.heads_per_kv // heads):
        first_head = kv_head * params.heads_per_kv + u * heads
        first, count = row_block_range(params, batch, first_head, block, BM, MASK)
        own = W + visits & 1  # the first visit of this warp
        gl.static_assert(DQ_WARPS == 2, "every other visit")
        if own < count * heads:
            next_at, next_position = dq_visit(params, own, first, count, batch, first_head, heads, block, BM, MASK)
            for visit in range(own, count * heads, DQ_WARPS):
                at, position = next_at, next_position
                next_at, next_position = dq_visit(params, visit + DQ_WARPS, first, count, batch, first_head, heads, block, BM, MASK)
                acquire(params.semaphores + at, position)
                ADD(params, descriptors, at, position, buffer_and_phase(visits + visit, DQ_WARPS)[1], W, TRAITS)
                release(params.semaphores + at, position)
        visits += count * heads
    return visits


@gluon.jit
def add_columns(params, descriptors, at, position, phase, W, TRAITS: gl.constexpr):
    """Add all columns of a row block, both chunks of every part."""
    dQ, dQB = params.smem.dQ, params.smem.dQB
    buffer = W % TRAITS.DQ_BUFFERS
    SIZE: gl.constexpr = descriptors.sums.block_shape[0]  # rows of a part in memory, of its first chunk
    BOTH: gl.constexpr = SIZE + 2 * TRAITS.DB // TRAITS.PARTS  # of both chunks
    mbarrier.wait(params.barriers.d_ready.index(W), phase)
    for part in gl.static_range(TRAITS.PARTS):
        store_or_add(descriptors.sums, (at * TRAITS.PARTS + part) * BOTH, dQ.index(buffer * TRAITS.PARTS + part), position)
        if TRAITS.DB > 0:
            store_or_add(descriptors.sums_b, (at * TRAITS.PARTS + part) * BOTH + SIZE, dQB.index(buffer * TRAITS.PARTS + part), position)
    tma.store_wait(0)  # shared memory has been read
    mbarrier.arrive(params.barriers.d_free.index(W))


@gluon.jit
def dq_warp(params, descriptors, W: gl.constexpr, TRAITS: gl.constexpr):
    """One of two warps that take turns to add dQ to memory. As a tensor, W makes both one function for Triton."""
    W = gl.to_tensor(W)
    if TRAITS.ONE_TILE:
        add_visits(gl.program_id(0), gl.to_tensor(0), params, descriptors, W, add_columns, TRAITS)
    else:
        tiles = params.key_blocks * params.batch_kv_heads
        taken = 0
        visits = 0
        tile = next_tile(taken, params, 1)
        while tile < tiles:
            mbarrier.arrive(params.barriers.k_free)
            visits = add_visits(tile, visits, params, descriptors, W, add_columns, TRAITS)
            taken += 1
            tile = next_tile(taken, params, 1)


@triton.jit
def dq_columns(sums, out, some, scale, i, n, first: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """Scale and round the sums of C columns, and store them from column `first` on."""
    X = tl.load(sums + tl.arange(0, BM * C))
    X = (tl.where(some, X, 0.0) * scale).to(out.dtype.element_ty)
    X = X.reshape([C // 8, 4, 4, 2, 4, 2, 2]).permute(1, 5, 2, 3, 0, 4, 6).reshape([BM, C])  # undoes `in_register_order`
    c = first + tl.arange(0, C)
    if first + C <= D:
        tl.store(out + c[None, :], X, mask=(i < n)[:, None])
    else:
        tl.store(out + c[None, :], X, mask=(i < n)[:, None] & (c < D)[None, :])


@triton.jit(do_not_specialize=["n"])
def dq_postprocess(dq_sums, semaphores, dq, scale, n, D: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr, CB: tl.constexpr):
    """A row block of dQ from its sums, in PARTS of C columns, and CB of a second chunk; zeros if no key block added to it."""
    block, batch_head = program_tile(tl.cdiv(n, BM))
    at = tl.program_id(0)
    some = tl.load(semaphores + at) > 0
    i = block * BM + tl.arange(0, BM)
    out = dq + (batch_head.to(tl.int64) * n + i)[:, None] * D  # [BM, 1]
    for g in tl.static_range(PARTS):
        part = dq_sums + (at.to(tl.int64) * PARTS + g) * (BM * (C + CB))
        dq_columns(part, out, some, scale, i, n, g * C, D, C, BM)
        if CB > 0:
            dq_columns(part + BM * C, out, some, scale, i, n, PARTS * C + g * CB, D, CB, BM)
