"""The backward pass on Hopper for dims above 128, where one consumer group cannot hold both dK and dV of its keys.

A program has ROWS keys. One group computes S, P and dV, the other dP, dS and dK, for which it reads P from shared memory. Each
computes half of dQ = dS K, in two parts. Two dQ warps add these to memory, and take turns by row block. dP starts at −δ, masks are
loaded before the products. A program has one tile, that of its number. The rest is as in `backward.py`.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...compat.gluon import group_barrier, tma_load, warp_specialize
from ..portable.tile_ops import LOG2E
from .aggregates import (
    BackwardBarriers,
    BackwardDescriptors,
    BackwardParams,
    BackwardSmem,
    DQDescriptors,
    GradientDescriptors,
    RowStats,
    TileIndex,
    traits_of,
)
from .backward import compute_dS, compute_P, start_product, store_gradient, transposed
from .dq_sums import DQ_WARPS, add_visits, in_register_order, store_or_add
from .dropout import dropout_backward, keep_bits, keep_mask
from .forward import flat
from .key_blocks import (
    common_rows,
    heads_together,
    is_partial,
    key_tile,
    load_mask,
    next_visit,
    row_block_at,
    row_block_range,
)
from .nonfinite import clean_queries, some_empty, some_unseen, zero_unseen_keys
from .register_layouts import mma_layout, transposed_layout
from .tile_scheduler import ROWS, advance, new_barriers

HALVES = gl.constexpr(2)  # of dQ, one per group
PARTS = gl.constexpr(2)  # of each half, which are computed one after the other
PART = gl.constexpr(64)  # columns of a part


@gluon.jit
def producer(params, descriptors, TRAITS: gl.constexpr):
    """The producer warp: it loads K and V once, then Q of each row block, and dO as soon as the previous one is free."""
    smem, barriers, row_stats = params.smem, params.barriers, params.row_stats
    k_ready, o_ready = barriers.k_ready, barriers.o_ready
    DA: gl.constexpr = TRAITS.DA
    EA: gl.constexpr = TRAITS.EA
    BM: gl.constexpr = TRAITS.BM
    block, batch, kv_head = key_tile(params, gl.program_id(0))
    mbarrier.expect(k_ready, ROWS * (DA + EA) * 2)
    tma_load(descriptors.k, [batch, kv_head, block * ROWS, 0], k_ready, smem.K)
    tma_load(descriptors.v, [batch, kv_head, block * ROWS, 0], k_ready, smem.V)
    stage = 0
    phase = 1
    o_phase = 1
    heads = heads_together(params, TRAITS.MASK)
    for u in range(params.heads_per_kv // heads):
        first_head = kv_head * params.heads_per_kv + u * heads
        first, count = row_block_range(params, batch, first_head, block, BM, TRAITS.MASK)
        t, h = first + count - 1, first_head
        for _ in range(count * heads):
            b, slot = row_block_at(params, t, TRAITS.MASK)
            at = (batch * params.num_heads + h) * params.padded_n
            empty = some_empty(b, batch, h, params, TRAITS)
            q_loaded = barriers.q_ready.index(gl.where(empty > 0, TRAITS.STAGES, stage))
            mbarrier.wait(barriers.q_free.index(stage), phase)
            mbarrier.expect(q_loaded, BM * DA * 2 + BM * 4)
            tma_load(descriptors.q, [batch, h, b * BM, 0], q_loaded, smem.Q.index(stage))
            tma_load(descriptors.lse, [at + b * BM], q_loaded, row_stats.lse.index(stage))
            if empty > 0:
                clean_queries(stage, params, TRAITS)
            mbarrier.wait(barriers.o_free, o_phase)
            mbarrier.expect(o_ready, BM * EA * 2 + BM * 4 * (2 if TRAITS.ENTROPY else 1))
            tma_load(descriptors.do, [batch, h, b * BM, 0], o_ready, smem.dO)
            tma_load(descriptors.delta, [at + b * BM], o_ready, row_stats.delta)
            if TRAITS.ENTROPY:
                tma_load(descriptors.g_entropy, [at + b * BM], o_ready, row_stats.g_entropy)
            o_phase ^= 1
            stage, phase = advance(stage, phase, TRAITS.STAGES)
            t, h = next_visit(t, h, first_head, heads)


@gluon.jit
def add_halves(params, descriptors, at, position, phase, W, TRAITS: gl.constexpr):
    """Add both halves of a row block, part by part, as the groups compute them."""
    dq_sums, dQ = descriptors.sums, params.smem.dQ
    SIZE: gl.constexpr = dq_sums.block_shape[0]  # rows of a part in memory
    for part in gl.static_range(PARTS):
        for g in gl.static_range(HALVES):
            mbarrier.wait(params.barriers.d_ready.index(W * HALVES + g), part)
            store_or_add(dq_sums, ((at * HALVES + g) * PARTS + part) * SIZE, dQ.index(g), position)
            tma.store_wait(0)  # shared memory has been read
            mbarrier.arrive(params.barriers.d_free.index(g))


@gluon.jit
def dq_warp(params, descriptors, W: gl.constexpr, TRAITS: gl.constexpr):
    """One of two warps that add dQ to memory: they take turns by row block, and add both halves."""
    add_visits(gl.program_id(0), gl.to_tensor(0), params, descriptors, gl.to_tensor(W), add_halves, TRAITS)


@gluon.jit
def start_dP(V, dO, delta, zero, TRAITS: gl.constexpr):
    """Start dPᵀ − δ = V dOᵀ − δ [ROWS, BM]; without δ if dropout comes between."""
    if TRAITS.DROP:
        dP = start_product(V, dO, zero)
    else:
        dP = warpgroup_mma(V, dO.permute((1, 0)), zero - delta.load(gl.SliceLayout(0, mma_layout(TRAITS.BM)))[None, :], is_async=True)
    return dP


@gluon.jit
def start_part(smem, zero, G: gl.constexpr, part: gl.constexpr, DA: gl.constexpr):
    """Start dQ = dS K [BM, PART], a part of a group's columns."""
    return warpgroup_mma(smem.dS.permute((1, 0)), flat(smem.K, ROWS, DA).slice((G * PARTS + part) * PART, PART, dim=1), zero, use_acc=False,
                         is_async=True)


@gluon.jit
def pass_part(share, W, params, G: gl.constexpr, part: gl.constexpr):
    """Pass a part of dQ to dQ warp W, whose turn it is. There are two parts per block, so barriers have the same phase each time."""
    mbarrier.wait(params.barriers.d_free.index(G), part ^ 1)
    params.smem.dQ.index(G).store(in_register_order(share))
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(params.barriers.d_ready.index(W * HALVES + G))


@gluon.jit
def p_consumer(params, descriptors, TRAITS: gl.constexpr):
    """The group that computes P and dV, and the first half of dQ."""
    smem, barriers, row_stats = params.smem, params.barriers, params.row_stats
    q_ready, q_free, o_ready, o_free = barriers.q_ready, barriers.q_free, barriers.o_ready, barriers.o_free
    DA: gl.constexpr = TRAITS.DA
    EA: gl.constexpr = TRAITS.EA
    BM: gl.constexpr = TRAITS.BM
    MASK: gl.constexpr = TRAITS.MASK
    DROP: gl.constexpr = TRAITS.DROP
    SL: gl.constexpr = mma_layout(BM)
    VL: gl.constexpr = mma_layout(EA)
    QL: gl.constexpr = mma_layout(PART)
    TL: gl.constexpr = transposed_layout(BM)
    block, batch, kv_head = key_tile(params, gl.program_id(0))
    key = block * ROWS
    dV = gl.zeros([ROWS, EA], gl.float32, VL)
    zero = gl.zeros([ROWS, BM], gl.float32, SL)
    zero_dQ = gl.zeros([BM, PART], gl.float32, QL)
    unseen = some_unseen(batch, kv_head, key, params, TRAITS)
    mbarrier.wait(barriers.k_ready, 0)
    zero_unseen_keys(flat(smem.K, ROWS, DA), unseen, batch, kv_head, key, params, TRAITS)
    stage = 0
    phase = 0
    ds_phase = 1  # of the previous dS
    o_phase = 0
    late = False  # whether there is a previous dS
    scale = params.scale
    heads = heads_together(params, MASK)
    for u in range(params.heads_per_kv // heads):
        first_head = kv_head * params.heads_per_kv + u * heads
        first, count = row_block_range(params, batch, first_head, block, BM, MASK)
        begin, end = common_rows(params, batch, first_head, key, MASK)
        t, h = first + count - 1, first_head
        for _ in range(count * heads):
            if TRAITS.SCALES:
                scale = gl.load(params.scales + h)
            unit = scale * LOG2E
            b, slot = row_block_at(params, t, MASK)
            partial = is_partial(b, slot, begin, end, params.n, BM, MASK)
            j = key + gl.arange(0, ROWS, gl.SliceLayout(0, TL))  # [ROWS]
            low, high = load_mask(batch, h, b, j, slot, partial, params, TRAITS)
            tile = TileIndex(batch, h, b, j, low, high)
            if DROP:
                bits = keep_bits(tile, params, BM)
            mbarrier.wait(barriers.s_ready, ds_phase, pred=late)
            share = start_part(smem, zero_dQ, 0, 0, DA)
            mbarrier.wait(q_ready.index(stage), phase)
            S = start_product(flat(smem.K, ROWS, DA), flat(smem.Q.index(stage), BM, DA), zero)
            share = warpgroup_mma_wait(1, deps=[share])
            if late:
                pass_part(share, ds_phase, params, 0, 0)
            share = start_part(smem, zero_dQ, 0, 1, DA)
            lse = row_stats.lse.index(stage).load(gl.SliceLayout(1, TL))  # [BM]
            S = transposed(warpgroup_mma_wait(1, deps=[S]), BM)
            P = compute_P(S, lse, tile, scale, unit, partial, params, TRAITS)
            share = warpgroup_mma_wait(0, deps=[share])
            if late:
                pass_part(share, ds_phase, params, 0, 1)
            P_kept = P
            if DROP:
                P = gl.where(keep_mask(bits, BM), P, -P)  # a negative sign means dropped
                P_kept = gl.where(P < 0.0, 0.0, P * params.drop.factor)
            smem.P.store(gl.convert_layout(P.permute((1, 0)), SL, assert_trivial=True))
            group_barrier()
            mbarrier.arrive(barriers.p_ready)
            mbarrier.arrive(q_free.index(stage))
            mbarrier.wait(o_ready, o_phase)
            do = flat(smem.dO, BM, EA)
            dV = warpgroup_mma(gl.convert_layout(P_kept.to(do.dtype).permute((1, 0)), gl.DotOperandLayout(0, VL, 2)), do, dV, is_async=True)
            dV = warpgroup_mma_wait(0, deps=[dV])
            mbarrier.arrive(o_free)
            o_phase ^= 1
            late = True
            ds_phase ^= 1
            stage, phase = advance(stage, phase, TRAITS.STAGES)
            t, h = next_visit(t, h, first_head, heads)
    if late:
        mbarrier.wait(barriers.s_ready, ds_phase)
        for part in gl.static_range(PARTS):
            share = start_part(smem, zero_dQ, 0, part, DA)
            share = warpgroup_mma_wait(0, deps=[share])
            pass_part(share, ds_phase, params, 0, part)
    store_gradient(dV, descriptors.dv, params.dv, params.dv_strides, batch, kv_head, key, params.M, params.E, 1.0, smem.V, TRAITS.TMA_STORE)
    tma.store_wait(0)


@gluon.jit
def ds_consumer(params, descriptors, TRAITS: gl.constexpr):
    """The group that computes dS and dK, and the second half of dQ."""
    smem, barriers, row_stats = params.smem, params.barriers, params.row_stats
    q_ready, q_free, o_ready, o_free = barriers.q_ready, barriers.q_free, barriers.o_ready, barriers.o_free
    DA: gl.constexpr = TRAITS.DA
    EA: gl.constexpr = TRAITS.EA
    BM: gl.constexpr = TRAITS.BM
    MASK: gl.constexpr = TRAITS.MASK
    SL: gl.constexpr = mma_layout(BM)
    KL: gl.constexpr = mma_layout(DA)
    QL: gl.constexpr = mma_layout(PART)
    TL: gl.constexpr = transposed_layout(BM)
    block, batch, kv_head = key_tile(params, gl.program_id(0))
    key = block * ROWS
    dK = gl.zeros([ROWS, DA], gl.float32, KL)
    zero = gl.zeros([ROWS, BM], gl.float32, SL)
    zero_dQ = gl.zeros([BM, PART], gl.float32, QL)
    mbarrier.wait(barriers.k_ready, 0)
    stage = 0
    phase = 0
    o_phase = 0
    p_phase = 0
    late = False  # whether there is a previous dS
    scale = params.scale
    heads = heads_together(params, MASK)
    for u in range(params.heads_per_kv // heads):
        first_head = kv_head * params.heads_per_kv + u * heads
        first, count = row_block_range(params, batch, first_head, block, BM, MASK)
        begin, end = common_rows(params, batch, first_head, key, MASK)
        t, h = first + count - 1, first_head
        for _ in range(count * heads):
            if TRAITS.SCALES:
                scale = gl.load(params.scales + h)
            b, slot = row_block_at(params, t, MASK)
            partial = is_partial(b, slot, begin, end, params.n, BM, MASK)
            share = start_part(smem, zero_dQ, 1, 0, DA)  # from its own dS of the previous iteration
            mbarrier.wait(o_ready, o_phase)
            dP = start_dP(flat(smem.V, ROWS, EA), flat(smem.dO, BM, EA), row_stats.delta, zero, TRAITS)
            share = warpgroup_mma_wait(1, deps=[share])
            if late:
                pass_part(share, p_phase ^ 1, params, 1, 0)
            share = start_part(smem, zero_dQ, 1, 1, DA)
            j = key + gl.arange(0, ROWS, gl.SliceLayout(0, TL))  # [ROWS]
            dP = transposed(warpgroup_mma_wait(1, deps=[dP]), BM)
            g = row_stats.delta
            if TRAITS.ENTROPY:
                g = row_stats.g_entropy.load(gl.SliceLayout(1, TL))
            mbarrier.wait(barriers.p_ready, p_phase)
            P = smem.P.permute((1, 0)).load(TL)  # [BM, ROWS]
            if TRAITS.DROP:
                P, dP = dropout_backward(P, dP, row_stats.delta.load(gl.SliceLayout(1, TL)), params.drop)
            group_barrier()
            mbarrier.arrive(o_free)
            share = warpgroup_mma_wait(0, deps=[share])
            if late:
                pass_part(share, p_phase ^ 1, params, 1, 1)
            mbarrier.wait(q_ready.index(stage), phase)
            lse = g
            if TRAITS.CAP:
                lse = row_stats.lse.index(stage).load(gl.SliceLayout(1, TL))
            dS = compute_dS(P, dP, lse, g, TileIndex(batch, h, b, j, j, j), partial, params, TRAITS)
            dS_of_keys = dS
            if TRAITS.SCALES:
                dS_of_keys = dS * scale
            q = flat(smem.Q.index(stage), BM, DA)
            smem.dS.store(gl.convert_layout(dS.to(q.dtype).permute((1, 0)), SL, assert_trivial=True))
            dS_of_keys = gl.convert_layout(dS_of_keys.to(q.dtype).permute((1, 0)), gl.DotOperandLayout(0, KL, 2))
            fence_async_shared()
            group_barrier()
            mbarrier.arrive(barriers.s_ready)
            dK = warpgroup_mma(dS_of_keys, q, dK, is_async=True)
            dK = warpgroup_mma_wait(0, deps=[dK])
            mbarrier.arrive(q_free.index(stage))
            o_phase ^= 1
            p_phase ^= 1
            late = True
            stage, phase = advance(stage, phase, TRAITS.STAGES)
            t, h = next_visit(t, h, first_head, heads)
    if late:
        for part in gl.static_range(PARTS):
            share = start_part(smem, zero_dQ, 1, part, DA)
            share = warpgroup_mma_wait(0, deps=[share])
            pass_part(share, p_phase ^ 1, params, 1, part)
    store_gradient(dK, descriptors.dk, params.dk, params.dk_strides, batch, kv_head, key, params.M, params.D, 1.0 if TRAITS.SCALES else scale,
                   smem.Q.index(0), TRAITS.TMA_STORE)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["lists", "dq_order", "drop", "n", "M", "D", "E", "padded_n", "key_blocks", "batch_kv_heads", "num_heads", "heads_per_kv",
                              "swizzle"])
def backward(q, k, v, do, lse, delta, g_entropy, dq_sums, dk_desc, dv_desc, dk, dv, dk_strides, dv_strides, scale, scales, cap, bias, lists, dq_order,
             drop, empty, seen, semaphores, n, M, D, E, padded_n, key_blocks, batch_kv_heads, num_heads, heads_per_kv, swizzle,
             DA: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, MASK: gl.constexpr,
             BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr, ENTROPY: gl.constexpr, DROP: gl.constexpr, SCALES: gl.constexpr,
             TMA_STORE: gl.constexpr):
    """A program takes ROWS keys of one key head, and all query heads that share it."""
    gl.static_assert(BM == ROWS, "dK goes to memory through a Q buffer")
    K = gl.allocate_shared_memory(k.dtype, [1, 1, ROWS, DA], k.layout)
    V = gl.allocate_shared_memory(v.dtype, [1, 1, ROWS, EA], v.layout)
    Q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DA], q.layout)
    dO = gl.allocate_shared_memory(do.dtype, [1, 1, BM, EA], do.layout)
    P = gl.allocate_shared_memory(gl.float32, [ROWS, BM], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    dS = gl.allocate_shared_memory(q.dtype, [ROWS, BM], gl.NVMMASharedLayout.get_default_for([ROWS, BM], q.dtype))
    dQ = gl.allocate_shared_memory(gl.float32, [2, dq_sums.block_shape[0], dq_sums.block_shape[1]], dq_sums.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [BM], lse.layout)
    g_smem = delta_smem
    if ENTROPY:
        g_smem = gl.allocate_shared_memory(gl.float32, [BM], lse.layout)
    k_ready = new_barriers(1, 1).index(0)
    o_ready = new_barriers(1, 1).index(0)
    o_free = new_barriers(1, 2).index(0)
    p_ready = new_barriers(1, 1).index(0)
    s_ready = new_barriers(1, 1).index(0)
    d_ready = new_barriers(DQ_WARPS * HALVES, 1)
    d_free = new_barriers(2, 1)
    q_ready = new_barriers(STAGES + 1, 1)
    q_free = new_barriers(STAGES, 2)
    fence_async_shared()
    descriptors = BackwardDescriptors(q, None, k, None, v, None, do, None, lse, delta, g_entropy)
    gradients, dq = GradientDescriptors(dk_desc, None, dv_desc, None), DQDescriptors(dq_sums, None)
    params = BackwardParams(
        BackwardSmem(Q, None, K, None, V, None, dO, None, P, dS, dQ, None),
        BackwardBarriers(k_ready, None, q_ready, q_free, o_ready, o_free, p_ready, s_ready, None, d_ready, d_free), RowStats(lse_smem, delta_smem, g_smem),
        dk, dv, dk_strides, dv_strides, scale, cap, bias, scales, lists, dq_order, drop, empty, seen, semaphores, n, M, D, E, padded_n,
        key_blocks, batch_kv_heads, num_heads, heads_per_kv, swizzle, None)
    TRAITS: gl.constexpr = traits_of(
        DA=DA, DB=0, EA=EA, BM=BM, STAGES=STAGES, MASK=MASK, BIAS=BIAS, CAP=CAP, FAST=FAST, ENTROPY=ENTROPY, DROP=DROP, SCALES=SCALES, TMA_STORE=TMA_STORE)
    warp_specialize([
        (p_consumer, (params, gradients, TRAITS)),
        (ds_consumer, (params, gradients, TRAITS)),
        (producer, (params, descriptors, TRAITS)),
        (dq_warp, (params, dq, 0, TRAITS)),
        (dq_warp, (params, dq, 1, TRAITS)),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])
