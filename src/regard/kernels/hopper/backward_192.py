"""The backward pass on Hopper for keys of 129 to 192 dims with values of 65 to 128, as in DeepSeek's models.

A program has ROWS keys per consumer group, as in `backward.py`. Queries and keys are two chunks, of 128 and 64 columns; a letter
with a B (KB, dKB) is the second. dK and dV of a group's keys take 160 of a thread's 240 registers, too many for P and dS to be operands
in registers, too: they go through one block of shared memory, P first and then dS, in half precision. dK and dQ of a row block are
computed in the next iteration. Each group computes half of each chunk of dQ. Two dQ warps take turns by visit, and add both chunks to
memory at once. A program has one tile.
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
    GroupKeys,
    RowStats,
    VisitedRows,
    traits_of,
)
from .backward import add_product, arrive, compute_dS, compute_P, find_tile, start_product, store_gradient, transposed
from .dq_sums import DQ_WARPS, GROUPS, dq_warp, in_register_order, key_columns, start_dQ
from .forward import flat
from .key_blocks import (
    buffer_and_phase,
    common_rows,
    heads_together,
    key_tile,
    next_visit,
    producer,
    row_block_range,
    unknown_zero,
)
from .nonfinite import some_unseen, zero_unseen_keys
from .register_layouts import mma_layout, transposed_layout
from .tile_scheduler import ROWS, new_barriers

DS_BUFFERS = gl.constexpr(2)


@gluon.jit
def mma_one_row_block(visit, t, h, dK, dKB, dV, keys, rows, params, G: gl.constexpr, TRAITS: gl.constexpr):
    """One iteration: a group's keys against row block t in query head h; and dK and a half of dQ of the visit before. Returns the next visit."""
    smem, barriers, row_stats = params.smem, params.barriers, params.row_stats
    DA: gl.constexpr = TRAITS.DA
    DB: gl.constexpr = TRAITS.DB
    BM: gl.constexpr = TRAITS.BM
    SL: gl.constexpr = mma_layout(BM)
    TL: gl.constexpr = transposed_layout(BM)
    gl.static_assert(TRAITS.STAGES == DS_BUFFERS, "a visit's stage is also its buffer of dS")
    zero = gl.zeros([ROWS, BM], gl.float32, SL)
    scale = params.scale
    unit = scale * LOG2E
    fresh_zero = unknown_zero(visit, params)
    K, KB = flat(smem.K.index(G + fresh_zero), ROWS, DA), flat(smem.KB.index(G + fresh_zero), ROWS, DB)
    V = flat(smem.V.index(G + fresh_zero), ROWS, TRAITS.EA)
    has_before = visit > 0  # whether there is a visit before; if not, its dS is 0 and its dQ is not passed on
    stage, phase = buffer_and_phase(visit, DS_BUFFERS)
    before, before_phase = buffer_and_phase(visit - 1, DS_BUFFERS)
    _, o_phase = buffer_and_phase(visit, 1)
    _, dq_phase = buffer_and_phase(visit - DQ_WARPS, DQ_WARPS)  # of the dQ before that of the visit before
    q_before = gl.where(has_before, before, stage)  # queries that are there
    own, dS_before = smem.dS.index(stage * GROUPS + G), smem.dS.index(before * GROUPS + G)
    do = flat(smem.dO.index(fresh_zero), BM, TRAITS.EA)
    mbarrier.wait(barriers.q_ready.index(stage), phase)
    lse = row_stats.lse.index(stage).load(gl.SliceLayout(1, TL))  # [BM], here since it would wait behind the products
    S = start_product(K, flat(smem.Q.index(stage), BM, DA), zero)
    S = add_product(KB, flat(smem.QB.index(stage), BM, DB), S)
    dK = warpgroup_mma(dS_before, flat(smem.Q.index(q_before), BM, DA), dK, is_async=True)
    dKB = warpgroup_mma(dS_before, flat(smem.QB.index(q_before), BM, DB), dKB, is_async=True)
    tile, partial = find_tile(t, h, keys, rows, params, TRAITS)
    S = transposed(warpgroup_mma_wait(2, deps=[S]), BM)
    P = compute_P(S, lse, tile, scale, unit, partial, params, TRAITS).to(do.dtype)
    mbarrier.wait(barriers.s_ready[G ^ 1].index(before), before_phase, pred=has_before)  # also says that the other group is done with what had the buffer before
    dK, dKB = warpgroup_mma_wait(0, deps=[dK, dKB])
    group_barrier()
    arrive(barriers.q_free.index(before), has_before)
    own.store(gl.convert_layout(P.permute((1, 0)), SL, assert_trivial=True))  # Pᵀ [ROWS, BM], where dSᵀ will be
    mbarrier.wait(barriers.o_ready.index(0), o_phase)
    fence_async_shared()
    group_barrier()
    share = start_dQ(smem.dS, key_columns(smem.K, DA, G, fresh_zero, TRAITS), before)
    dV = warpgroup_mma(own, do, dV, is_async=True)
    share = warpgroup_mma_wait(1, deps=[share])
    mbarrier.wait(barriers.d_free.index(stage), dq_phase)
    smem.dQ.index(G).store(in_register_order(share))
    delta = row_stats.delta.index(0).load(gl.SliceLayout(0, SL))  # [BM]
    share_b = start_dQ(smem.dS, key_columns(smem.KB, DB, G, fresh_zero, TRAITS), before)
    dP = add_product(V, do, zero - delta[None, :])
    dV, share_b = warpgroup_mma_wait(1, deps=[dV, share_b])
    smem.dQB.index(G).store(in_register_order(share_b))
    dS = transposed(warpgroup_mma_wait(0, deps=[dP]), BM)
    P = own.permute((1, 0)).load(TL).to(gl.float32)
    g = lse
    if TRAITS.ENTROPY:
        g = row_stats.g_entropy.index(0).load(gl.SliceLayout(1, TL))
    group_barrier()
    arrive(barriers.o_free.index(0))
    if TRAITS.CAP:
        lse = row_stats.lse.index(stage).load(gl.SliceLayout(1, TL))
    dS = compute_dS(P, dS, lse, g, tile, partial, params, TRAITS)
    own.store(gl.convert_layout(dS.to(do.dtype).permute((1, 0)), SL, assert_trivial=True))  # dSᵀ [ROWS, BM]
    fence_async_shared()
    group_barrier()
    arrive(barriers.d_ready.index(before), has_before)
    arrive(barriers.s_ready[G].index(stage))
    t, h = next_visit(t, h, rows.first_head, rows.heads)
    return t, h, dK, dKB, dV


@gluon.jit
def last_visit(visits, dK, dKB, params, G: gl.constexpr, TRAITS: gl.constexpr):
    """After the last visit of a tile: its dK, and its half of dQ."""
    smem, barriers = params.smem, params.barriers
    BM: gl.constexpr = TRAITS.BM
    last, phase = buffer_and_phase(visits - 1, DS_BUFFERS)
    before, dq_phase = buffer_and_phase(visits - DQ_WARPS, DQ_WARPS)
    dS = smem.dS.index(last * GROUPS + G)
    dK = warpgroup_mma(dS, flat(smem.Q.index(last), BM, TRAITS.DA), dK, is_async=True)
    dKB = warpgroup_mma(dS, flat(smem.QB.index(last), BM, TRAITS.DB), dKB, is_async=True)
    mbarrier.wait(barriers.s_ready[G ^ 1].index(last), phase)
    dK, dKB = warpgroup_mma_wait(0, deps=[dK, dKB])
    share = start_dQ(smem.dS, key_columns(smem.K, TRAITS.DA, G, 0, TRAITS), last)
    share_b = start_dQ(smem.dS, key_columns(smem.KB, TRAITS.DB, G, 0, TRAITS), last)
    share, share_b = warpgroup_mma_wait(0, deps=[share, share_b])
    mbarrier.wait(barriers.d_free.index(before), dq_phase)
    smem.dQ.index(G).store(in_register_order(share))
    smem.dQB.index(G).store(in_register_order(share_b))
    fence_async_shared()
    group_barrier()
    arrive(barriers.d_ready.index(last))
    return dK, dKB


@gluon.jit
def consumer(params, descriptors, G: gl.constexpr, TRAITS: gl.constexpr):
    """Consumer group G: its ROWS keys against all rows that see the block. Its half of dQ is one iteration late.

    A program has one tile: in a loop over tiles the compiler spills.
    """
    smem = params.smem
    DA: gl.constexpr = TRAITS.DA
    DB: gl.constexpr = TRAITS.DB
    BM: gl.constexpr = TRAITS.BM
    MASK: gl.constexpr = TRAITS.MASK
    block, batch, kv_head = key_tile(params, gl.program_id(0))
    key = (block * GROUPS + G) * ROWS
    dK = gl.zeros([ROWS, DA], gl.float32, mma_layout(DA))
    dKB = gl.zeros([ROWS, DB], gl.float32, mma_layout(DB))
    dV = gl.zeros([ROWS, TRAITS.EA], gl.float32, mma_layout(TRAITS.EA))
    unseen = some_unseen(batch, kv_head, key, params, TRAITS)
    mbarrier.wait(params.barriers.k_ready, 0)
    zero_unseen_keys(flat(smem.K.index(G), ROWS, DA), unseen, batch, kv_head, key, params, TRAITS)
    zero_unseen_keys(flat(smem.KB.index(G), ROWS, DB), unseen, batch, kv_head, key, params, TRAITS)
    smem.dS.index(GROUPS + G).store(gl.zeros([ROWS, BM], smem.dS.dtype, mma_layout(BM)))  # of no visit
    fence_async_shared()
    group_barrier()
    visits = 0
    heads = heads_together(params, MASK)
    for u in range(params.heads_per_kv // heads):
        first_head = kv_head * params.heads_per_kv + u * heads
        first, count = row_block_range(params, batch, first_head, block, BM, MASK)
        begin, end = common_rows(params, batch, first_head, key, MASK)
        t, h = first + count - 1, first_head
        for visit in range(visits, visits + count * heads):
            t, h, dK, dKB, dV = mma_one_row_block(
                visit, t, h, dK, dKB, dV, GroupKeys(batch, key, None, None, None), VisitedRows(begin, end, first_head, heads), params, G, TRAITS)
        visits += count * heads
    if visits > 0:
        dK, dKB = last_visit(visits, dK, dKB, params, G, TRAITS)
    into = smem.V.index(G)
    store_gradient(dV, descriptors.dv, params.dv, params.dv_strides, batch, kv_head, key, params.M, params.E, 1.0, into, TRAITS.TMA_STORE)
    tma.store_wait(0)
    group_barrier()
    scale = params.scale
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
    gl.static_assert(not DROP and not SCALES, "with dropout or a scale per head, dV and dK need another P and dS than dQ does")
    gl.static_assert(DA == EA, "dK goes to memory through a V buffer")
    PARTS: gl.constexpr = 2  # of dQ's columns, one per group
    O_STAGES: gl.constexpr = 1  # of dO: more have no room
    K = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, ROWS, DA], k.layout)
    KB = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, ROWS, DB], kb.layout)
    V = gl.allocate_shared_memory(v.dtype, [GROUPS, 1, 1, ROWS, EA], v.layout)
    Q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DA], q.layout)
    QB = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DB], qb.layout)
    dO = gl.allocate_shared_memory(do.dtype, [O_STAGES, 1, 1, BM, EA], do.layout)
    dS = gl.allocate_shared_memory(q.dtype, [DS_BUFFERS * GROUPS, ROWS, BM], gl.NVMMASharedLayout.get_default_for([ROWS, BM], q.dtype))
    dQ = gl.allocate_shared_memory(gl.float32, [PARTS, dq_sums.block_shape[0], dq_sums.block_shape[1]], dq_sums.layout)
    dQB = gl.allocate_shared_memory(gl.float32, [PARTS, dq_sums_b.block_shape[0], dq_sums_b.block_shape[1]], dq_sums_b.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [O_STAGES, BM], lse.layout)
    g_smem = delta_smem
    if ENTROPY:
        g_smem = gl.allocate_shared_memory(gl.float32, [O_STAGES, BM], lse.layout)
    k_ready = new_barriers(1, 1).index(0)
    o_ready = new_barriers(O_STAGES, 1)
    o_free = new_barriers(O_STAGES, GROUPS)
    s_ready = new_barriers(DS_BUFFERS, 1), new_barriers(DS_BUFFERS, 1)  # not of one allocation, which Triton would guard by a barrier between arrival and wait
    d_ready = new_barriers(DQ_WARPS, GROUPS)
    d_free = new_barriers(DQ_WARPS, 1)
    q_ready = new_barriers(STAGES + 1, 1)
    q_free = new_barriers(STAGES, GROUPS)
    fence_async_shared()
    descriptors = BackwardDescriptors(q, qb, k, kb, v, None, do, None, lse, delta, g_entropy)
    gradients, dq = GradientDescriptors(dk_desc, None, dv_desc, None), DQDescriptors(dq_sums, dq_sums_b)
    params = BackwardParams(
        BackwardSmem(Q, QB, K, KB, V, None, dO, None, None, dS, dQ, dQB),
        BackwardBarriers(k_ready, None, q_ready, q_free, o_ready, o_free, None, s_ready, None, d_ready, d_free), RowStats(lse_smem, delta_smem, g_smem),
        dk, dv, dk_strides, dv_strides, scale, cap, bias, scales, lists, dq_order, drop, empty, seen, semaphores, n, M, D, E, padded_n,
        key_blocks, batch_kv_heads, num_heads, heads_per_kv, swizzle, None)
    TRAITS: gl.constexpr = traits_of(
        DA=DA, DB=DB, EA=EA, EB=0, BM=BM, ONE_TILE=True, STAGES=STAGES, O_STAGES=O_STAGES, DQ_BUFFERS=1, PARTS=PARTS, MASK=MASK, BIAS=BIAS, CAP=CAP, FAST=FAST, ENTROPY=ENTROPY,
        DROP=DROP, SCALES=SCALES, TMA_STORE=TMA_STORE)
    warp_specialize([
        (consumer, (params, gradients, 0, TRAITS)),
        (consumer, (params, gradients, 1, TRAITS)),
        (producer, (params, descriptors, TRAITS)),
        (dq_warp, (params, dq, 0, TRAITS)),
        (dq_warp, (params, dq, 1, TRAITS)),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])
