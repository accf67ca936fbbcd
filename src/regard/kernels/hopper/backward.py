"""The backward pass on Hopper, in Gluon: all gradients by one kernel, five products per tile, the same bits every time.

A program holds one key block, ROWS keys per consumer group, and loops over the row blocks that see them. A producer warp loads Q,
dO and the row statistics into shared memory. Each group computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ and keeps Pᵀ and dSᵀ in registers, where
they are the left operands of dV += Pᵀ dO and dK += dSᵀ Q. dS also goes to shared memory: dQ = dS K needs that of all groups, and
each group computes its share of dQ's columns. Two dQ warps add dQ to memory. The key blocks that add to the same row block do so
in one order, the last keys first; a program waits only for programs that were launched before it.

Letters and units are those of `portable/backward.py`.
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

from ...compat.gluon import group_barrier, tma_add, tma_load, tma_store
from ..portable.tile_ops import _BIAS_ALIBI, _BIAS_NONE, _NONE, DEEP, LN2, LOG2E, program_tile
from .aggregates import (
    BackwardBarriers,
    BackwardDescriptors,
    BackwardParams,
    BackwardSmem,
    RowStats,
    TileIndex,
    traits_of,
)
from .dq_semaphore import acquire, release
from .dropout import dropout_backward, keep_bits, keep_mask
from .forward import CLEANED, flat
from .key_blocks import (
    apply_mask,
    common_rows,
    dq_position,
    is_partial,
    key_tile,
    load_bias,
    row_block_at,
    row_block_range,
)
from .online_softmax import capped_tanh, log2
from .register_layouts import mma_layout, transposed_layout
from .tile_scheduler import ROWS, advance, new_barriers

GROUPS = gl.constexpr(2)  # consumer groups, each with ROWS keys


@gluon.jit
def producer(params, TRAITS: gl.constexpr):
    """The producer warp: it loads K and V once, then Q, dO and the statistics of each row block."""
    descriptors, smem, barriers, row_stats = params.descriptors, params.smem, params.barriers, params.row_stats
    DA: gl.constexpr = TRAITS.DA
    EA: gl.constexpr = TRAITS.EA
    BM: gl.constexpr = TRAITS.BM
    STATS: gl.constexpr = 3 if TRAITS.ENTROPY else 2
    block, batch, kv_head = key_tile(params)
    k_ready = barriers.k_ready
    mbarrier.expect(k_ready, GROUPS * ROWS * (DA + EA) * 2)
    for g in gl.static_range(GROUPS):
        key = (block * GROUPS + g) * ROWS
        tma_load(descriptors.k, [batch, kv_head, key, 0], k_ready, smem.K.index(g))
        tma_load(descriptors.v, [batch, kv_head, key, 0], k_ready, smem.V.index(g))
    stage = 0
    phase = 1
    for u in range(params.heads_per_kv):
        h = kv_head * params.heads_per_kv + u
        first, count = row_block_range(params, batch, h, block, BM, TRAITS.MASK)
        at = (batch * params.num_heads + h) * params.padded_n
        for t in range(count):
            b, slot = row_block_at(params, t, first, TRAITS.MASK)
            ready = barriers.ready.index(stage)
            mbarrier.wait(barriers.free.index(stage), phase)
            mbarrier.expect(ready, BM * (DA + EA) * 2 + BM * 4 * STATS)
            tma_load(descriptors.q, [batch, h, b * BM, 0], ready, smem.Q.index(stage))
            tma_load(descriptors.lse, [at + b * BM], ready, row_stats.lse.index(stage))
            tma_load(descriptors.do, [batch, h, b * BM, 0], ready, smem.dO.index(stage))
            tma_load(descriptors.delta, [at + b * BM], ready, row_stats.delta.index(stage))
            if TRAITS.ENTROPY:
                tma_load(descriptors.g_entropy, [at + b * BM], ready, row_stats.g_entropy.index(stage))
            stage, phase = advance(stage, phase, TRAITS.STAGES)


@gluon.jit
def dq_warp(params, ODD: gl.constexpr, TRAITS: gl.constexpr):
    """One of two warps that add dQ to memory, once the semaphore allows it: this one takes every other row block."""
    dq_sums, dQ, d_ready, d_free = params.descriptors.dq_sums, params.smem.dQ, params.barriers.d_ready, params.barriers.d_free
    BM: gl.constexpr = TRAITS.BM
    block, batch, kv_head = key_tile(params)
    phase = 0
    buffer = 0  # of dQ's two (Triton 3.6 loses a count that both loops carry; a bit that flips survives)
    for u in range(params.heads_per_kv):
        h = kv_head * params.heads_per_kv + u
        first, count = row_block_range(params, batch, h, block, BM, TRAITS.MASK)
        for t in range(count):
            if buffer == ODD:
                b, slot = row_block_at(params, t, first, TRAITS.MASK)
                position = dq_position(params, t, b, first, batch, h, block, TRAITS.MASK)
                at = (batch * params.num_heads + h) * gl.cdiv(params.n, BM) + b
                acquire(params.semaphores + at, position)
                mbarrier.wait(d_ready.index(ODD), phase)
                phase ^= 1
                for g in gl.static_range(GROUPS):
                    if position == 0:
                        tma_store(dq_sums, [(at * GROUPS + g) * BM, 0], dQ.index(ODD * GROUPS + g))
                    else:
                        tma_add(dq_sums, [(at * GROUPS + g) * BM, 0], dQ.index(ODD * GROUPS + g))
                tma.store_wait(0)  # shared memory has been read
                mbarrier.arrive(d_free.index(ODD))
                release(params.semaphores + at, position)
            buffer ^= 1


@gluon.jit
def transposed(X, BM: gl.constexpr):
    """A product [ROWS, BM] as the paper has it, [BM, ROWS]; no number moves."""
    return gl.convert_layout(X.permute((1, 0)), transposed_layout(BM), assert_trivial=True)


@gluon.jit
def compute_P(S, lse, tile, scale, unit, partial, params, TRAITS: gl.constexpr):
    """Weights P [BM, ROWS] from products S; 0 where the pair is hidden."""
    if TRAITS.CAP:
        S = params.cap * capped_tanh(S, scale, params.cap)
    elif not TRAITS.FAST:
        S *= scale
    if TRAITS.BIAS != _BIAS_NONE:
        X = load_bias(tile, params, TRAITS)
        S = gl.where(X != float("-inf"), S + X, float("-inf"))  # by the bias and not by the sum, which a hidden key may make NaN
    if partial:
        S = apply_mask(S, tile, params, TRAITS)
    T = S * unit - lse[:, None] if TRAITS.FAST else (S - lse[:, None]) * LOG2E
    return gl.exp2(T)


@gluon.jit
def compute_dS(P, dP, lse, g, tile, partial, params, TRAITS: gl.constexpr):
    """dS [BM, ROWS] of the scaled products, from dP − δ. The slope of a cap is computed from P."""
    BIAS: gl.constexpr = TRAITS.BIAS
    if BIAS != _BIAS_NONE and BIAS != _BIAS_ALIBI:
        dP = gl.where(P > 0.0, dP, 0.0)
    else:
        if partial:
            dP = gl.where(P > 0.0, dP, 0.0)  # a hidden value may be NaN
    if TRAITS.ENTROPY:
        dP -= g[:, None] * gl.maximum(log2(P), DEEP)
    dS = P * dP
    if TRAITS.CAP:
        S = log2(P) * LN2 + lse[:, None]
        if BIAS != _BIAS_NONE:
            S -= load_bias(tile, params, TRAITS)
        t = S * (1.0 / params.cap)
        dS = gl.where(P > 0.0, dS * (1.0 - t * t), 0.0)
    return dS


@gluon.jit
def zero_empty_rows(X, lse, BM: gl.constexpr, C: gl.constexpr):
    """Set the queries X [BM, C] of rows that see nothing to 0, since they may be NaN. Every group writes the same to the same place."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    for r in gl.static_range(0, BM, CLEANED):
        part = X.slice(r, CLEANED)
        see = lse.slice(r, CLEANED).load(gl.SliceLayout(1, L)) < float("inf")
        part.store(gl.where(see[:, None], part.load(L), 0.0))


@gluon.jit
def has_empty_row(lse, BM: gl.constexpr):
    """Whether some row of a block sees nothing."""
    return gl.max(lse.load(gl.BlockedLayout([BM // 32], [32], [4], [0])), 0) == float("inf")  # each warp has them all


@gluon.jit
def seen_by_some(params, batch, kv_head, j, HIDING: gl.constexpr):
    """Which keys j some row of some query head may attend to, int32; all of those past the end."""
    lists = params.lists
    some = j * 0
    for u in range(params.heads_per_kv):
        h = kv_head * params.heads_per_kv + u
        if HIDING:
            at = params.seen + (batch * params.num_heads + h).to(gl.int64) * params.M
        else:
            at = lists.seen + (batch // gl.load(lists.inner)).to(gl.int64) * lists.seen_item + h * lists.seen_head
        some = some | gl.load(at + j, mask=j < params.M, other=1).to(gl.int32)
    return some


@gluon.jit
def zero_unseen_keys(X, batch, kv_head, j0, params, TRAITS: gl.constexpr):
    """Set keys X [ROWS, DA] that no row may attend to to 0, since they may be NaN. `params.seen` says what a bias hides by −inf."""
    C: gl.constexpr = TRAITS.DA
    HIDING: gl.constexpr = TRAITS.BIAS != _BIAS_NONE and TRAITS.BIAS != _BIAS_ALIBI
    if TRAITS.MASK != _NONE or HIDING:
        j = j0 + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [4], [0]))  # each warp has them all
        if gl.min(seen_by_some(params, batch, kv_head, j, HIDING), 0) == 0:
            L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
            for r in gl.static_range(0, ROWS, CLEANED):
                some = j0 + r + gl.arange(0, CLEANED, gl.SliceLayout(1, L))
                part = X.slice(r, CLEANED)
                part.store(gl.where((seen_by_some(params, batch, kv_head, some, HIDING) != 0)[:, None], part.load(L), 0.0))
            fence_async_shared()
            group_barrier()


@gluon.jit
def clean_queries(X, lse, partial, TRAITS: gl.constexpr):
    """`zero_empty_rows`, where the mask or the bias may hide all keys from a row."""
    BIAS: gl.constexpr = TRAITS.BIAS
    if TRAITS.MASK != _NONE or BIAS != _BIAS_NONE:
        empty = partial
        if BIAS != _BIAS_NONE and BIAS != _BIAS_ALIBI:
            empty = partial | has_empty_row(lse, TRAITS.BM)
        if empty:
            zero_empty_rows(X, lse, TRAITS.BM, TRAITS.DA)


@gluon.jit
def copied(X, zero):
    """X, copied to other registers: ptxas of Triton 3.6 overwrites a register operand that a loop uses again."""
    return gl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r,r", [X, zero], X.dtype, True, 2)


@gluon.jit
def start_S(K, Q, zero, DA: gl.constexpr, BM: gl.constexpr):
    """Start Sᵀ = K Qᵀ [ROWS, BM]."""
    return warpgroup_mma(K, flat(Q, BM, DA).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_dP(V, dO, delta, zero, TRAITS: gl.constexpr):
    """Start dPᵀ − δ = V dOᵀ − δ [ROWS, BM]; without δ if dropout comes between."""
    dO = flat(dO, TRAITS.BM, TRAITS.EA).permute((1, 0))
    if TRAITS.DROP:
        dP = warpgroup_mma(V, dO, zero, use_acc=False, is_async=True)
    else:
        dP = warpgroup_mma(V, dO, zero - delta.load(gl.SliceLayout(0, mma_layout(TRAITS.BM)))[None, :], is_async=True)
    return dP


@gluon.jit
def start_dQ(smem, buffer, zero, G: gl.constexpr, DA: gl.constexpr):
    """Start dQ = dS K, the group's share of its columns [BM, DA / GROUPS]."""
    K, dS = smem.K, smem.dS
    SHARE: gl.constexpr = DA // GROUPS
    share = warpgroup_mma(dS.index(buffer * GROUPS).permute((1, 0)), flat(K.index(0), ROWS, DA).slice(G * SHARE, SHARE, dim=1), zero, use_acc=False,
                          is_async=True)
    for g in gl.static_range(1, GROUPS):
        share = warpgroup_mma(dS.index(buffer * GROUPS + g).permute((1, 0)), flat(K.index(g), ROWS, DA).slice(G * SHARE, SHARE, dim=1), share,
                              is_async=True)
    return share


@gluon.jit
def pass_dQ(share, buffer, phase, params, G: gl.constexpr):
    """Pass a share of dQ to the dQ warp."""
    mbarrier.wait(params.barriers.d_free.index(buffer), phase)
    params.smem.dQ.index(buffer * GROUPS + G).store(share)
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(params.barriers.d_ready.index(buffer))


@gluon.jit
def store_gradient(X, descriptor, out, strides, batch, kv_head, key, M, D, scale, smem, TMA_STORE: gl.constexpr):
    """Store X [ROWS, C] times a number, through the shared block `smem` or by pointers."""
    C: gl.constexpr = X.shape[1]
    XL: gl.constexpr = X.type.layout
    X = (X * scale).to(smem.dtype)
    if TMA_STORE:
        flat(smem, ROWS, C).store(X)
        fence_async_shared()
        group_barrier()
        tma_store(descriptor, [batch, kv_head, key, 0], smem)
        tma.store_wait(0)
        group_barrier()
    else:
        j = key + gl.arange(0, ROWS, gl.SliceLayout(1, XL))
        c = gl.arange(0, C, gl.SliceLayout(0, XL))
        at = out + batch.to(gl.int64) * strides[0] + kv_head.to(gl.int64) * strides[1] + j.to(gl.int64)[:, None] * strides[2] + c[None, :]
        gl.store(at, X, mask=(j < M)[:, None] & (c < D)[None, :])


@gluon.jit
def consumer(params, G: gl.constexpr, TRAITS: gl.constexpr):
    """Consumer group G: its ROWS keys against all rows that see the block. dQ of a row block is computed one iteration late."""
    smem, barriers, row_stats = params.smem, params.barriers, params.row_stats
    ready, free, s_ready = barriers.ready, barriers.free, barriers.s_ready
    DA: gl.constexpr = TRAITS.DA
    EA: gl.constexpr = TRAITS.EA
    BM: gl.constexpr = TRAITS.BM
    MASK: gl.constexpr = TRAITS.MASK
    DROP: gl.constexpr = TRAITS.DROP
    SHARE: gl.constexpr = DA // GROUPS  # columns of dQ that the group computes
    SL: gl.constexpr = mma_layout(BM)
    KL: gl.constexpr = mma_layout(DA)
    VL: gl.constexpr = mma_layout(EA)
    QL: gl.constexpr = mma_layout(SHARE)
    TL: gl.constexpr = transposed_layout(BM)
    block, batch, kv_head = key_tile(params)
    key = (block * GROUPS + G) * ROWS
    past_end = key + ROWS > params.M
    dK = gl.zeros([ROWS, DA], gl.float32, KL)
    dV = gl.zeros([ROWS, EA], gl.float32, VL)
    zero = gl.zeros([ROWS, BM], gl.float32, SL)
    zero_dQ = gl.zeros([BM, SHARE], gl.float32, QL)
    mbarrier.wait(barriers.k_ready, 0)
    zero_unseen_keys(flat(smem.K.index(G), ROWS, DA), batch, kv_head, key, params, TRAITS)
    K = flat(smem.K.index(G), ROWS, DA)
    V = flat(smem.V.index(G), ROWS, EA)
    if TRAITS.KV_IN_REGISTERS:
        K = K.load(gl.DotOperandLayout(0, SL, 2))
        V = V.load(gl.DotOperandLayout(0, SL, 2))
    stage = 0
    phase = 0
    buffer = 0  # of dS and dQ, which have two
    ds_phase = 1  # of the previous dS
    late = False  # whether there is a previous dS
    scale = params.scale
    for u in range(params.heads_per_kv):
        h = kv_head * params.heads_per_kv + u
        if TRAITS.SCALES:
            scale = gl.load(params.scales + h)
        unit = scale * LOG2E
        first, count = row_block_range(params, batch, h, block, BM, MASK)
        begin, end = common_rows(params, batch, h, key, MASK)
        for t in range(count):
            b, slot = row_block_at(params, t, first, MASK)
            partial = is_partial(b, slot, begin, end, params.n, BM, MASK) | past_end
            q = flat(smem.Q.index(stage), BM, DA)
            do = flat(smem.dO.index(stage), BM, EA)
            j = key + gl.arange(0, ROWS, gl.SliceLayout(0, TL))  # [ROWS]
            tile = TileIndex(batch, h, b, j, slot)
            if DROP:
                bits = keep_bits(tile, params, BM)
            mbarrier.wait(s_ready.index(buffer ^ 1), ds_phase, pred=late)
            share = start_dQ(smem, buffer ^ 1, zero_dQ, G, DA)
            mbarrier.wait(ready.index(stage), phase)
            keys, values = K, V
            if TRAITS.KV_IN_REGISTERS:
                nothing = (t + params.padded_n) >> 30
                keys, values = copied(K, nothing), copied(V, nothing)
            S = start_S(keys, smem.Q.index(stage), zero, DA, BM)
            share = warpgroup_mma_wait(1, deps=[share])
            if late:
                pass_dQ(share, buffer ^ 1, ds_phase ^ 1, params, G)
            dP = start_dP(values, smem.dO.index(stage), row_stats.delta.index(stage), zero, TRAITS)
            lse = row_stats.lse.index(stage).load(gl.SliceLayout(1, TL))  # [BM]
            S = transposed(warpgroup_mma_wait(1, deps=[S]), BM)
            P = compute_P(S, lse, tile, scale, unit, partial, params, TRAITS)
            P_kept = P
            if DROP:
                P = gl.where(keep_mask(bits, BM), P, -P)  # a negative sign means dropped
                P_kept = gl.where(P < 0.0, 0.0, P * params.drop.factor)
            dV = warpgroup_mma(gl.convert_layout(P_kept.to(do.dtype).permute((1, 0)), gl.DotOperandLayout(0, VL, 2)), do, dV, is_async=True)
            dS = transposed(warpgroup_mma_wait(1, deps=[dP]), BM)
            if DROP:
                P, dS = dropout_backward(P, dS, row_stats.delta.index(stage).load(gl.SliceLayout(1, TL)), params.drop)
            g = lse
            if TRAITS.ENTROPY:
                g = row_stats.g_entropy.index(stage).load(gl.SliceLayout(1, TL))
            if TRAITS.CAP:
                lse = row_stats.lse.index(stage).load(gl.SliceLayout(1, TL))
            dS = compute_dS(P, dS, lse, g, tile, partial, params, TRAITS)
            dS_of_keys = dS
            if TRAITS.SCALES:  # each query head has its own, and dK sums over them
                dS_of_keys = dS * scale
            dS = gl.convert_layout(dS.to(q.dtype).permute((1, 0)), SL, assert_trivial=True)  # dSᵀ [ROWS, BM]
            smem.dS.index(buffer * GROUPS + G).store(dS)
            dS_of_keys = gl.convert_layout(dS_of_keys.to(q.dtype).permute((1, 0)), gl.DotOperandLayout(0, KL, 2))
            clean_queries(q, row_stats.lse.index(stage), partial, TRAITS)
            fence_async_shared()
            group_barrier()
            mbarrier.arrive(s_ready.index(buffer))
            dK = warpgroup_mma(dS_of_keys, q, dK, is_async=True)
            dV, dK = warpgroup_mma_wait(0, deps=[dV, dK])
            mbarrier.arrive(free.index(stage))
            late = True
            ds_phase = gl.where(buffer == 0, ds_phase ^ 1, ds_phase)
            buffer ^= 1
            stage, phase = advance(stage, phase, TRAITS.STAGES)
    if late:
        mbarrier.wait(s_ready.index(buffer ^ 1), ds_phase)
        share = start_dQ(smem, buffer ^ 1, zero_dQ, G, DA)
        share = warpgroup_mma_wait(0, deps=[share])
        pass_dQ(share, buffer ^ 1, ds_phase ^ 1, params, G)
    descriptors, into = params.descriptors, smem.V.index(G)
    store_gradient(dV, descriptors.dv, params.dv, params.dv_strides, batch, kv_head, key, params.M, params.E, 1.0, into, TRAITS.TMA_STORE)
    store_gradient(dK, descriptors.dk, params.dk, params.dk_strides, batch, kv_head, key, params.M, params.D, 1.0 if TRAITS.SCALES else scale, into,
                   TRAITS.TMA_STORE)


@gluon.jit(do_not_specialize=["lists", "dq_order", "drop", "n", "M", "D", "E", "padded_n", "key_blocks", "batch_kv_heads", "num_heads", "heads_per_kv",
                              "swizzle"])
def backward(q, k, v, do, lse, delta, g_entropy, dq_sums, dk_desc, dv_desc, dk, dv, dk_strides, dv_strides, scale, scales, cap, bias, lists, dq_order,
             drop, seen, semaphores, n, M, D, E, padded_n, key_blocks, batch_kv_heads, num_heads, heads_per_kv, swizzle,
             DA: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
             KV_IN_REGISTERS: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr, ENTROPY: gl.constexpr,
             DROP: gl.constexpr, SCALES: gl.constexpr, TMA_STORE: gl.constexpr):
    """A program takes one key block of one key head; its query heads follow one after the other."""
    K = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, ROWS, DA], k.layout)
    V = gl.allocate_shared_memory(v.dtype, [GROUPS, 1, 1, ROWS, EA], v.layout)
    Q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DA], q.layout)
    dO = gl.allocate_shared_memory(do.dtype, [STAGES, 1, 1, BM, EA], do.layout)
    dS = gl.allocate_shared_memory(q.dtype, [2 * GROUPS, ROWS, BM], gl.NVMMASharedLayout.get_default_for([ROWS, BM], q.dtype))
    dQ = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, BM, DA // GROUPS], dq_sums.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    g_smem = delta_smem
    if ENTROPY:
        g_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    k_ready = new_barriers(1, 1).index(0)
    d_ready = new_barriers(2, GROUPS)
    d_free = new_barriers(2, 1)
    s_ready = new_barriers(2, GROUPS)
    ready = new_barriers(STAGES, 1)
    free = new_barriers(STAGES, GROUPS)
    fence_async_shared()
    params = BackwardParams(
        BackwardDescriptors(q, k, v, do, lse, delta, g_entropy, dq_sums, dk_desc, dv_desc), BackwardSmem(Q, K, V, dO, dS, dQ),
        BackwardBarriers(k_ready, ready, free, s_ready, d_ready, d_free), RowStats(lse_smem, delta_smem, g_smem),
        dk, dv, dk_strides, dv_strides, scale, cap, bias, scales, lists, dq_order, drop, seen, semaphores, n, M, D, E, padded_n,
        key_blocks, batch_kv_heads, num_heads, heads_per_kv, swizzle)
    TRAITS: gl.constexpr = traits_of(
        DA=DA, EA=EA, BM=BM, STAGES=STAGES, KV_IN_REGISTERS=KV_IN_REGISTERS, MASK=MASK, BIAS=BIAS, CAP=CAP, FAST=FAST, ENTROPY=ENTROPY,
        DROP=DROP, SCALES=SCALES, TMA_STORE=TMA_STORE)
    gl.warp_specialize([
        (consumer, (params, 0, TRAITS)),
        (consumer, (params, 1, TRAITS)),
        (producer, (params, TRAITS)),
        (dq_warp, (params, 0, TRAITS)),
        (dq_warp, (params, 1, TRAITS)),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])


@triton.jit(do_not_specialize=["n", "D"])
def dq_postprocess(dq_sums, semaphores, dq, scale, n, D, BM: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr, SEMAPHORES: tl.constexpr):
    """A row block of dQ from its sums, in PARTS of C columns; zeros if no key block added to it."""
    block, batch_head = program_tile(tl.cdiv(n, BM))
    at = tl.program_id(0)
    some = tl.load(semaphores + at * SEMAPHORES) > 0
    r = tl.arange(0, BM)
    i = block * BM + r
    for g in tl.static_range(PARTS):
        c = tl.arange(0, C)
        X = tl.load(dq_sums + ((at.to(tl.int64) * PARTS + g) * BM + r)[:, None] * C + c[None, :])  # [BM, C]
        X = tl.where(some, X, 0.0) * scale
        to = (batch_head.to(tl.int64) * n + i)[:, None] * D + (g * C + c)[None, :]
        tl.store(dq + to, X.to(dq.dtype.element_ty), mask=(i < n)[:, None] & (g * C + c < D)[None, :])
