"""The backward pass on Hopper for keys of 129 to 192 dims with values of 65 to 128, as in DeepSeek's models.

A program has ROWS keys per consumer group, as in `backward.py`. Queries and keys are two chunks, of 128 and 64 columns; a letter
with a B (KB, dKB) is the second. dK and dV of a group's keys take 160 of a thread's 240 registers, too many for P and dS to be operands
in registers, too: they go through one block of shared memory, P first and then dS, in half precision. dK and dQ of a row block are
computed in the next iteration. Each group computes half of each chunk of dQ, and has a dQ warp that adds one chunk after the other.
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

from ...compat.gluon import group_barrier, warp_specialize
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
from .backward import add_product, compute_dS, compute_P, producer, start_product, store_gradient, transposed
from .dq_sums import GROUPS, add_visits, in_register_order, key_columns, start_dQ, store_or_add
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
from .nonfinite import some_unseen, zero_unseen_keys
from .register_layouts import mma_layout, transposed_layout
from .tile_scheduler import ROWS, advance, new_barriers

DS_BUFFERS = gl.constexpr(2)


@gluon.jit
def second_dQ(params, G: gl.constexpr, TRAITS: gl.constexpr):
    """The buffer of the second chunk of a group's half of dQ: a part of that of the first, which is read before it."""
    return params.smem.dQ.index(G).slice(0, TRAITS.DB)


@gluon.jit
def add_half(params, descriptors, at, position, phase, G: gl.constexpr, TRAITS: gl.constexpr):
    """Add a group's half of a row block, one chunk after the other."""
    dq_sums, dq_sums_b, d_ready, d_free = descriptors.sums, descriptors.sums_b, params.barriers.d_ready, params.barriers.d_free
    SIZE: gl.constexpr = dq_sums.block_shape[0]  # rows of a half in memory, of its first chunk
    BOTH: gl.constexpr = SIZE + dq_sums_b.block_shape[0]  # of both chunks
    mbarrier.wait(d_ready.index(G), 0)
    store_or_add(dq_sums, at * BOTH, params.smem.dQ.index(G), position)
    tma.store_wait(0)  # shared memory has been read
    mbarrier.arrive(d_free.index(G))
    mbarrier.wait(d_ready.index(G), 1)
    store_or_add(dq_sums_b, at * BOTH + SIZE, second_dQ(params, G, TRAITS), position)
    tma.store_wait(0)
    mbarrier.arrive(d_free.index(G))


@gluon.jit
def dq_warp(params, descriptors, G: gl.constexpr, TRAITS: gl.constexpr):
    """The warp that adds a group's half of dQ to memory."""
    add_visits(params, descriptors, G, 1, add_half, TRAITS)


@gluon.jit
def pass_dQ(share, buffer, params, G: gl.constexpr, part: gl.constexpr):
    """Pass a chunk of a group's half of dQ to its dQ warp. There are two chunks per block, so barriers have the same phase each time."""
    mbarrier.wait(params.barriers.d_free.index(G), part ^ 1)
    buffer.store(in_register_order(share))
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(params.barriers.d_ready.index(G))


@gluon.jit
def consumer(params, descriptors, G: gl.constexpr, TRAITS: gl.constexpr):
    """Consumer group G: its ROWS keys against all rows that see the block. Its half of dQ is one iteration late."""
    smem, barriers, row_stats = params.smem, params.barriers, params.row_stats
    q_ready, q_free, o_ready = barriers.q_ready, barriers.q_free, barriers.o_ready
    s_ready, s_free = barriers.s_ready, barriers.s_free
    DA: gl.constexpr = TRAITS.DA
    DB: gl.constexpr = TRAITS.DB
    EA: gl.constexpr = TRAITS.EA
    BM: gl.constexpr = TRAITS.BM
    MASK: gl.constexpr = TRAITS.MASK
    SL: gl.constexpr = mma_layout(BM)
    KL: gl.constexpr = mma_layout(DA)
    VL: gl.constexpr = mma_layout(EA)
    TL: gl.constexpr = transposed_layout(BM)
    block, batch, kv_head = key_tile(params)
    key = (block * GROUPS + G) * ROWS
    dK = gl.zeros([ROWS, DA], gl.float32, KL)
    dKB = gl.zeros([ROWS, DB], gl.float32, mma_layout(DB))
    dV = gl.zeros([ROWS, EA], gl.float32, VL)
    zero = gl.zeros([ROWS, BM], gl.float32, SL)
    K, KB, V = flat(smem.K.index(G), ROWS, DA), flat(smem.KB.index(G), ROWS, DB), flat(smem.V.index(G), ROWS, EA)
    q_dtype: gl.constexpr = smem.Q.dtype
    unseen = some_unseen(batch, kv_head, key, params, TRAITS)
    mbarrier.wait(barriers.k_ready, 0)
    zero_unseen_keys(K, unseen, batch, kv_head, key, params, TRAITS)
    zero_unseen_keys(KB, unseen, batch, kv_head, key, params, TRAITS)
    smem.dS.index(GROUPS + G).store(zero.to(q_dtype))  # of no previous row block
    fence_async_shared()
    group_barrier()
    stage = 0
    phase = 0
    before = 0  # the stage of the previous row block
    buffer = 0  # of dS
    ds_phase = 1
    late = False  # whether there is a previous row block
    scale = params.scale
    unit = scale * LOG2E
    heads = heads_together(params, MASK)
    for u in range(params.heads_per_kv // heads):
        first_head = kv_head * params.heads_per_kv + u * heads
        first, count = row_block_range(params, batch, first_head, block, BM, MASK)
        begin, end = common_rows(params, batch, first_head, key, MASK)
        t, h = first + count - 1, first_head
        for _ in range(count * heads):
            b, slot = row_block_at(params, t, MASK)
            partial = is_partial(b, slot, begin, end, params.n, BM, MASK)
            q, qb = flat(smem.Q.index(stage), BM, DA), flat(smem.QB.index(stage), BM, DB)
            do = flat(smem.dO.index(stage), BM, EA)
            own = smem.dS.index(buffer * GROUPS + G)
            j = key + gl.arange(0, ROWS, gl.SliceLayout(0, TL))  # [ROWS]
            low, high = load_mask(batch, h, b, j, slot, partial, params, TRAITS)
            tile = TileIndex(batch, h, b, j, low, high)
            mbarrier.wait(q_ready.index(stage), phase)
            S = start_product(K, q, zero)
            S = add_product(KB, qb, S)
            dK = warpgroup_mma(smem.dS.index((buffer ^ 1) * GROUPS + G), flat(smem.Q.index(before), BM, DA), dK, is_async=True)
            dKB = warpgroup_mma(smem.dS.index((buffer ^ 1) * GROUPS + G), flat(smem.QB.index(before), BM, DB), dKB, is_async=True)
            lse = row_stats.lse.index(stage).load(gl.SliceLayout(1, TL))  # [BM]
            S = transposed(warpgroup_mma_wait(2, deps=[S]), BM)
            P = compute_P(S, lse, tile, scale, unit, partial, params, TRAITS).to(do.dtype)
            mbarrier.wait(s_free.index(buffer), ds_phase)
            own.store(gl.convert_layout(P.permute((1, 0)), SL, assert_trivial=True))  # Pᵀ [ROWS, BM], where dSᵀ will be
            fence_async_shared()
            group_barrier()
            mbarrier.wait(s_ready.index(buffer ^ 1), gl.where(buffer == 0, ds_phase, ds_phase ^ 1), pred=late)
            share = start_dQ(smem.dS, key_columns(smem.K, DA, G, TRAITS), buffer ^ 1)
            mbarrier.wait(o_ready.index(stage), phase)
            dV = warpgroup_mma(own, do, dV, is_async=True)
            dK, dKB, share = warpgroup_mma_wait(1, deps=[dK, dKB, share])
            if late:
                mbarrier.arrive(q_free.index(before))
                pass_dQ(share, smem.dQ.index(G), params, G, 0)
            share_b = start_dQ(smem.dS, key_columns(smem.KB, DB, G, TRAITS), buffer ^ 1)
            dP = start_product(V, do, zero)
            dV, share_b = warpgroup_mma_wait(1, deps=[dV, share_b])
            if late:
                mbarrier.arrive(s_free.index(buffer ^ 1))
                pass_dQ(share_b, second_dQ(params, G, TRAITS), params, G, 1)
            delta = row_stats.delta.index(stage).load(gl.SliceLayout(1, TL))  # [BM]
            dS = transposed(warpgroup_mma_wait(0, deps=[dP]), BM) - delta[:, None]
            P = own.permute((1, 0)).load(TL).to(gl.float32)
            g = lse
            if TRAITS.ENTROPY:
                g = row_stats.g_entropy.index(stage).load(gl.SliceLayout(1, TL))
            if TRAITS.CAP:
                lse = row_stats.lse.index(stage).load(gl.SliceLayout(1, TL))
            dS = compute_dS(P, dS, lse, g, tile, partial, params, TRAITS)
            own.store(gl.convert_layout(dS.to(do.dtype).permute((1, 0)), SL, assert_trivial=True))  # dSᵀ [ROWS, BM]
            fence_async_shared()
            group_barrier()
            mbarrier.arrive(s_ready.index(buffer))
            late = True
            before = stage
            buffer, ds_phase = advance(buffer, ds_phase, DS_BUFFERS)
            stage, phase = advance(stage, phase, TRAITS.STAGES)
            t, h = next_visit(t, h, first_head, heads)
    if late:
        dK = warpgroup_mma(smem.dS.index((buffer ^ 1) * GROUPS + G), flat(smem.Q.index(before), BM, DA), dK, is_async=True)
        dKB = warpgroup_mma(smem.dS.index((buffer ^ 1) * GROUPS + G), flat(smem.QB.index(before), BM, DB), dKB, is_async=True)
        dK, dKB = warpgroup_mma_wait(0, deps=[dK, dKB])
        mbarrier.wait(s_ready.index(buffer ^ 1), gl.where(buffer == 0, ds_phase, ds_phase ^ 1))
        share = start_dQ(smem.dS, key_columns(smem.K, DA, G, TRAITS), buffer ^ 1)
        share_b = start_dQ(smem.dS, key_columns(smem.KB, DB, G, TRAITS), buffer ^ 1)
        share, share_b = warpgroup_mma_wait(0, deps=[share, share_b])
        pass_dQ(share, smem.dQ.index(G), params, G, 0)
        pass_dQ(share_b, second_dQ(params, G, TRAITS), params, G, 1)
    into = smem.V.index(G)
    store_gradient(dV, descriptors.dv, params.dv, params.dv_strides, batch, kv_head, key, params.M, params.E, 1.0, into, TRAITS.TMA_STORE)
    tma.store_wait(0)
    group_barrier()
    store_gradient(dK, descriptors.dk, params.dk, params.dk_strides, batch, kv_head, key, params.M, params.D, scale, into, TRAITS.TMA_STORE)
    store_gradient(dKB, descriptors.dkb, params.dk, params.dk_strides, batch, kv_head, key, params.M, params.D, scale, into, False, DA)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["lists", "dq_order", "drop", "n", "M", "D", "E", "padded_n", "key_blocks", "batch_kv_heads", "num_heads", "heads_per_kv",
                              "swizzle"])
def backward(q, qb, k, kb, v, do, lse, delta, g_entropy, dq_sums, dq_sums_b, dk_desc, dv_desc, dk, dv, dk_strides, dv_strides, scale, scales, cap, bias,
             lists, dq_order, drop, empty, seen, semaphores, n, M, D, E, padded_n, key_blocks, batch_kv_heads, num_heads, heads_per_kv, swizzle,
             DA: gl.constexpr, DB: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
             MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr,
             ENTROPY: gl.constexpr, DROP: gl.constexpr, SCALES: gl.constexpr, TMA_STORE: gl.constexpr):
    """A program takes one key block of one key head, and all query heads that share it."""
    gl.static_assert(not DROP and not SCALES, "dV and dK read P and dS as they are for dQ")
    gl.static_assert(DA == EA, "dK goes to memory through a V buffer")
    PARTS: gl.constexpr = 2  # of dQ's columns, one per group
    K = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, ROWS, DA], k.layout)
    KB = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, ROWS, DB], kb.layout)
    V = gl.allocate_shared_memory(v.dtype, [GROUPS, 1, 1, ROWS, EA], v.layout)
    Q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DA], q.layout)
    QB = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DB], qb.layout)
    dO = gl.allocate_shared_memory(do.dtype, [STAGES, 1, 1, BM, EA], do.layout)
    dS = gl.allocate_shared_memory(q.dtype, [DS_BUFFERS * GROUPS, ROWS, BM], gl.NVMMASharedLayout.get_default_for([ROWS, BM], q.dtype))
    dQ = gl.allocate_shared_memory(gl.float32, [PARTS, dq_sums.block_shape[0], dq_sums.block_shape[1]], dq_sums.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    g_smem = delta_smem
    if ENTROPY:
        g_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    k_ready = new_barriers(1, 1).index(0)
    o_ready = new_barriers(STAGES, 1)
    s_ready = new_barriers(DS_BUFFERS, GROUPS)
    s_free = new_barriers(DS_BUFFERS, GROUPS)
    d_ready = new_barriers(PARTS, 1)
    d_free = new_barriers(PARTS, 1)
    q_ready = new_barriers(STAGES + 1, 1)
    q_free = new_barriers(STAGES, GROUPS)
    fence_async_shared()
    descriptors = BackwardDescriptors(q, qb, k, kb, v, None, do, None, lse, delta, g_entropy)
    gradients, dq = GradientDescriptors(dk_desc, None, dv_desc, None), DQDescriptors(dq_sums, dq_sums_b)
    params = BackwardParams(
        BackwardSmem(Q, QB, K, KB, V, None, dO, None, None, dS, dQ, dQ),
        BackwardBarriers(k_ready, q_ready, q_free, o_ready, None, None, s_ready, s_free, d_ready, d_free), RowStats(lse_smem, delta_smem, g_smem),
        dk, dv, dk_strides, dv_strides, scale, cap, bias, scales, lists, dq_order, drop, empty, seen, semaphores, n, M, D, E, padded_n,
        key_blocks, batch_kv_heads, num_heads, heads_per_kv, swizzle)
    TRAITS: gl.constexpr = traits_of(
        DA=DA, DB=DB, EA=EA, EB=0, BM=BM, STAGES=STAGES, PARTS=PARTS, MASK=MASK, BIAS=BIAS, CAP=CAP, FAST=FAST, ENTROPY=ENTROPY,
        DROP=DROP, SCALES=SCALES, TMA_STORE=TMA_STORE)
    warp_specialize([
        (consumer, (params, gradients, 0, TRAITS)),
        (consumer, (params, gradients, 1, TRAITS)),
        (producer, (params, descriptors, TRAITS)),
        (dq_warp, (params, dq, 0, TRAITS)),
        (dq_warp, (params, dq, 1, TRAITS)),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])
