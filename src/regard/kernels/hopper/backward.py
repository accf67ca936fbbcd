"""The backward pass on Hopper, in Gluon: all gradients by one kernel, five products per tile, the same bits every time.

A program takes one key block after another, ROWS keys per consumer group, and for each loops over the row blocks that see it. A producer
warp loads Q, dO and the row statistics into shared memory. Each group computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ and keeps Pᵀ and dSᵀ in registers,
where they are the left operands of dV += Pᵀ dO and dK += dSᵀ Q. dS also goes to shared memory: dQ = dS K needs that of all groups, and each
group computes its share of dQ's columns, the first one a visit late; at dims up to 96 a third group computes dQ. Two dQ warps add dQ to
memory. A load or store of shared memory waits until the products before it in the program have started, so loads come before products. The
key blocks that add to the same row block do so in one order, the first keys first; a tile waits only for tiles that were taken before it.
Dims of 65 to 96 are two chunks, of 64 and 32 columns: a letter with a B (KB, dKB) is the second, and DB its columns or 0.

Letters and units are those of `portable/backward.py`.
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

from ...compat.gluon import KEYS_IN_REGISTERS, group_barrier, tma_store, warp_specialize
from ..portable.tile_ops import _BIAS_NONE, _NONE, DEEP, LN2, LOG2E
from . import ptx
from .aggregates import (
    BackwardBarriers,
    BackwardDescriptors,
    BackwardParams,
    BackwardSmem,
    DQDescriptors,
    GradientDescriptors,
    GroupKeys,
    RowStats,
    TileIndex,
    VisitedRows,
    traits_of,
)
from .dq_sums import DQ_WARPS, GROUPS, choose_dQ, dq_group, dq_warp, key_columns, pass_dQ, start_dQ, write_dQ
from .dropout import dropout_backward, keep_bits, keep_mask
from .forward import flat
from .key_blocks import (
    TILE_INFO,
    apply_mask,
    buffer_and_phase,
    common_rows,
    heads_together,
    is_partial,
    load_bias,
    load_mask,
    next_tile,
    next_visit,
    producer,
    read_key_tile,
    row_block_at,
    row_block_range,
    unknown_zero,
)
from .nonfinite import zero_unseen_keys
from .online_softmax import capped_tanh, exp2, log2, may_hide
from .register_layouts import mma_layout, transposed_layout
from .tile_scheduler import ROWS, new_barriers

HOLD = gl.constexpr(ptx.HOLD)


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
    return exp2(T)


@gluon.jit
def compute_dS(P, dP, lse, g, tile, partial, params, TRAITS: gl.constexpr):
    """dS [BM, ROWS] of the scaled products, from dP − δ. The slope of a cap is computed from P."""
    if may_hide(TRAITS.BIAS):
        dP = gl.where(P > 0.0, dP, 0.0)
    else:
        if partial:
            dP = gl.where(P > 0.0, dP, 0.0)  # a hidden value may be NaN
    if TRAITS.ENTROPY:
        dP -= g[:, None] * gl.maximum(log2(P), DEEP)
    dS = P * dP
    if TRAITS.CAP:
        S = log2(P) * LN2 + lse[:, None]
        if TRAITS.BIAS != _BIAS_NONE:
            S -= load_bias(tile, params, TRAITS)
        t = S * (1.0 / params.cap)
        dS = gl.where(P > 0.0, dS * (1.0 - t * t), 0.0)
    return dS


@gluon.jit
def start_product(X, Y, zero):
    """Start X Yᵀ [ROWS, BM]: Sᵀ = K Qᵀ, or dPᵀ = V dOᵀ."""
    return warpgroup_mma(X, Y.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def add_product(X, Y, product):
    """Start product + X Yᵀ, for the second chunk."""
    return warpgroup_mma(X, Y.permute((1, 0)), product, is_async=True)


@gluon.jit
def store_gradient(X, descriptor, out, strides, batch, kv_head, key, M, D, scale, smem, TMA_STORE: gl.constexpr, first: gl.constexpr = 0):
    """Store X [ROWS, C] times a number in columns `first` …, by pointers, or by TMA through `smem`: wait by `tma.store_wait` before that is used again."""
    C: gl.constexpr = X.shape[1]
    XL: gl.constexpr = X.type.layout
    X = (X * scale).to(smem.dtype)
    if TMA_STORE:
        flat(smem, ROWS, C).store(X)
        fence_async_shared()
        group_barrier()
        tma_store(descriptor, [batch, kv_head, key, first], smem)
    else:
        j = key + gl.arange(0, ROWS, gl.SliceLayout(1, XL))
        c = first + gl.arange(0, C, gl.SliceLayout(0, XL))
        at = out + batch.to(gl.int64) * strides[0] + kv_head.to(gl.int64) * strides[1] + j.to(gl.int64)[:, None] * strides[2] + c[None, :]
        gl.store(at, X, mask=(j < M)[:, None] & (c < D)[None, :])


@gluon.jit
def hold(X):
    """An operand that stays in its registers, marked as changed: the assembler of Triton 3.6 may overwrite one that a loop only reads."""
    return gl.inline_asm_elementwise(HOLD, "=r,r", [X], X.dtype, True, 2)


@gluon.jit
def arrive(barrier, pred=True):
    """Arrive for a group that has passed `group_barrier`. Unlike `mbarrier.arrive` of Triton 3.6, it adds no second barrier of the group."""
    mbarrier.expect(barrier, 0, pred=pred)


@gluon.jit
def find_tile(t, h, keys, rows, params, TRAITS: gl.constexpr):
    """Row block t of head h against the keys of a group, with its mask, and whether it is partial."""
    b, slot = row_block_at(params, t, TRAITS.MASK)
    partial = is_partial(b, slot, rows.begin, rows.end, params.n, TRAITS.BM, TRAITS.MASK)
    j = keys.key + gl.arange(0, ROWS, gl.SliceLayout(0, transposed_layout(TRAITS.BM)))  # [ROWS]
    low, high = load_mask(keys.batch, h, b, j, slot, partial, params, TRAITS)
    return TileIndex(keys.batch, h, b, j, low, high), partial


@gluon.jit
def mma_one_row_block(visit, first_visit, t, h, dK, dV, dKB, dVB, keys, rows, params, G, TRAITS: gl.constexpr):
    """One iteration: a group's keys against row block t of its visits, in query head h; and the next visit. A tile begins with `first_visit`.

    A function of its own, since Triton generates the code of a loop twice, and that of a function once.
    """
    smem, row_stats, barriers = params.smem, params.row_stats, params.barriers
    DA: gl.constexpr = TRAITS.DA
    DB: gl.constexpr = TRAITS.DB
    EA: gl.constexpr = TRAITS.EA
    CHUNKS: gl.constexpr = 2 if DB > 0 else 1
    BM: gl.constexpr = TRAITS.BM
    DROP: gl.constexpr = TRAITS.DROP
    DQ_GROUP: gl.constexpr = TRAITS.DQ_GROUP
    SL: gl.constexpr = mma_layout(BM)
    TL: gl.constexpr = transposed_layout(BM)
    K, V = keys.K, keys.V
    fresh_zero = unknown_zero(visit, params) if V is None else 0  # with V in registers there is nothing to spill
    if K is None:
        K = flat(smem.K.index(G + fresh_zero), ROWS, DA)
    if V is None:
        V = flat(smem.V.index(G + fresh_zero), ROWS, EA)
    zero = gl.zeros([ROWS, BM], gl.float32, SL)
    stage, phase = buffer_and_phase(visit, TRAITS.STAGES)
    buffer, ds_phase = buffer_and_phase(visit, TRAITS.DS_BUFFERS)
    scale = params.scale
    if TRAITS.SCALES:
        scale = gl.load(params.scales + h)
    unit = scale * LOG2E
    q = flat(smem.Q.index(stage), BM, DA)
    qb = q
    do = flat(smem.dO.index(stage), BM, EA)
    if DB > 0:
        qb = flat(smem.QB.index(stage), BM, DB)
        KB, VB = flat(smem.KB.index(G + fresh_zero), ROWS, DB), flat(smem.VB.index(G + fresh_zero), ROWS, DB)
        dob = flat(smem.dOB.index(stage), BM, DB)
    if DROP:
        tile, partial = find_tile(t, h, keys, rows, params, TRAITS)
        bits = keep_bits(tile, params, BM)
    mbarrier.wait(barriers.q_ready.index(stage), phase)
    lse = row_stats.lse.index(stage).load(gl.SliceLayout(1, TL))  # [BM], here since it would wait behind the products
    if not DQ_GROUP:
        mbarrier.wait(barriers.o_ready.index(stage), phase)
    S = start_product(K, q, zero)
    if DB > 0:
        S = add_product(KB, qb, S)
    dP = start_product(V, do, zero)
    if DB > 0:
        dP = add_product(VB, dob, dP)
    if not DROP:  # here, beside the products, which would wait for it above; dropout leaves no registers for that
        tile, partial = find_tile(t, h, keys, rows, params, TRAITS)
    S = transposed(warpgroup_mma_wait(CHUNKS, deps=[S]), BM)
    P = compute_P(S, lse, tile, scale, unit, partial, params, TRAITS)
    P_kept = P
    if DROP:
        P = gl.where(keep_mask(bits, BM), P, -P)  # a negative sign means dropped
        P_kept = gl.where(P < 0.0, 0.0, P * params.drop.factor)
    P_kept = gl.convert_layout(P_kept.to(do.dtype).permute((1, 0)), gl.DotOperandLayout(0, dV.type.layout, 2))  # Pᵀ [ROWS, BM]
    delta = row_stats.delta.index(stage).load(gl.SliceLayout(1, TL))  # [BM]
    if DQ_GROUP:
        dV = warpgroup_mma(P_kept, do, dV, is_async=True)
        if DB > 0:
            dVB = warpgroup_mma(P_kept, dob, dVB, is_async=True)
    dS = transposed(warpgroup_mma_wait(CHUNKS if DQ_GROUP else 0, deps=[dP]), BM)
    if DROP:
        P, dS = dropout_backward(P, dS, delta, params.drop)
    else:
        dS = dS - delta[:, None]
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
    visit_of_dQ, dq_buffer, dq_phase = choose_dQ(visit, G)
    if DQ_GROUP:
        mbarrier.wait(barriers.s_free.index(buffer), ds_phase ^ 1)
    else:  # also says that the other group is done with what had the buffer before
        mbarrier.wait(barriers.s_ready.index(dq_buffer * GROUPS + (G ^ 1)), dq_phase)
    smem.dS.index(buffer * GROUPS + G).store(dS)
    dS_of_keys = gl.convert_layout(dS_of_keys.to(q.dtype).permute((1, 0)), gl.DotOperandLayout(0, dK.type.layout, 2))
    if not DQ_GROUP:
        dV = warpgroup_mma(P_kept, do, dV, is_async=True)
    fence_async_shared()
    group_barrier()
    if DQ_GROUP:
        arrive(barriers.s_ready.index(buffer))
    else:
        arrive(barriers.s_ready.index(buffer * GROUPS + G))
        arrive(barriers.d_ready.index(dq_buffer ^ 1), visit_of_dQ > first_visit)
        share = start_dQ(smem.dS, keys.columns, dq_buffer)
    dK = warpgroup_mma(dS_of_keys, q, dK, is_async=True)
    if DB > 0:
        dKB = warpgroup_mma(dS_of_keys, qb, dKB, is_async=True)
        dV, dVB, dK, dKB = warpgroup_mma_wait(0, deps=[dV, dVB, dK, dKB])
    elif DQ_GROUP:
        dV, dK = warpgroup_mma_wait(0, deps=[dV, dK])
    else:
        dV, share = warpgroup_mma_wait(1, deps=[dV, share])
        write_dQ(share, smem.dQ, dq_buffer, dq_phase ^ 1, params, G, TRAITS, visit_of_dQ >= first_visit)
        dK = warpgroup_mma_wait(0, deps=[dK])
    group_barrier()
    arrive(barriers.q_free.index(stage))
    t, h = next_visit(t, h, rows.first_head, rows.heads)
    return t, h, dK, dV, dKB, dVB


@gluon.jit
def last_dQ(columns, visits, first_visit, params, G, TRAITS: gl.constexpr):
    """After the last visit: each group passes the dQ that it has written, and the group that is late computes its last one."""
    smem, barriers = params.smem, params.barriers
    visit_of_dQ, buffer, phase = choose_dQ(visits, G)
    fence_async_shared()
    group_barrier()
    arrive(barriers.d_ready.index(buffer ^ 1), visit_of_dQ > first_visit)
    if (visits > first_visit) & (G == 0):  # the other group is never late
        mbarrier.wait(barriers.s_ready.index(buffer * GROUPS + (G ^ 1)), phase)
        share = start_dQ(smem.dS, columns, buffer)
        share = warpgroup_mma_wait(0, deps=[share])
        pass_dQ(share, smem.dQ, buffer, phase ^ 1, params, G, TRAITS)


@gluon.jit
def consume_tile(tile, visits, params, descriptors, columns, G, TRAITS: gl.constexpr):
    """Consumer group G: its ROWS keys of a tile against all rows that see them, and `columns` for its part of dQ.

    `visits` is the number of visits of earlier tiles; the result adds those of this one.
    """
    smem = params.smem
    DA: gl.constexpr = TRAITS.DA
    DB: gl.constexpr = TRAITS.DB
    EA: gl.constexpr = TRAITS.EA
    BM: gl.constexpr = TRAITS.BM
    MASK: gl.constexpr = TRAITS.MASK
    DQ_GROUP: gl.constexpr = TRAITS.DQ_GROUP
    V_HELD: gl.constexpr = DQ_GROUP and DB == 0 and TRAITS.BIAS == _BIAS_NONE and not TRAITS.DROP  # in registers: half as much is read from smem
    K_HELD: gl.constexpr = V_HELD and KEYS_IN_REGISTERS and MASK == _NONE
    block, batch, kv_head, first, count, begin, end, unseen = read_key_tile(tile, G, params)
    key = (block * GROUPS + G) * ROWS
    dK = gl.zeros([ROWS, DA], gl.float32, mma_layout(DA))
    dV = gl.zeros([ROWS, EA], gl.float32, mma_layout(EA))
    dKB, dVB = 0, 0
    heads = heads_together(params, MASK)
    zero_unseen_keys(flat(smem.K.index(G), ROWS, DA), unseen, batch, kv_head, key, params, TRAITS)
    if DB > 0:
        zero_unseen_keys(flat(smem.KB.index(G), ROWS, DB), unseen, batch, kv_head, key, params, TRAITS)
        dKB = gl.zeros([ROWS, DB], gl.float32, mma_layout(DB))
        dVB = gl.zeros([ROWS, DB], gl.float32, mma_layout(DB))
    K, V = None, None
    if V_HELD:
        V = flat(smem.V.index(G), ROWS, EA).load(gl.DotOperandLayout(0, mma_layout(BM), 2))
    if K_HELD:
        K = flat(smem.K.index(G), ROWS, DA).load(gl.DotOperandLayout(0, mma_layout(BM), 2))
    first_visit = visits
    for u in range(params.heads_per_kv // heads):
        first_head = kv_head * params.heads_per_kv + u * heads
        if u > 0:
            first, count = row_block_range(params, batch, first_head, block, BM, MASK)
            begin, end = common_rows(params, batch, first_head, key, MASK)
        t, h = first + count - 1, first_head
        for visit in range(visits, visits + count * heads):
            t, h, dK, dV, dKB, dVB = mma_one_row_block(
                visit, first_visit, t, h, dK, dV, dKB, dVB, GroupKeys(batch, key, K, V, columns), VisitedRows(begin, end, first_head, heads), params, G, TRAITS)
            if V_HELD:
                V = hold(V)
            if K_HELD:
                K = hold(K)
        visits += count * heads
    if not DQ_GROUP:
        last_dQ(columns, visits, first_visit, params, G, TRAITS)
    store_gradient(dV, descriptors.dv, params.dv, params.dv_strides, batch, kv_head, key, params.M, params.E, 1.0, smem.V.index(G), TRAITS.TMA_STORE)
    if DB > 0:
        store_gradient(dVB, descriptors.dvb, params.dv, params.dv_strides, batch, kv_head, key, params.M, params.E, 1.0, smem.VB.index(G), TRAITS.TMA_STORE, EA)
    scale = 1.0 if TRAITS.SCALES else params.scale  # dS has those of its heads already
    buffer, phase = buffer_and_phase(gl.maximum(visits, 1) - 1, TRAITS.DS_BUFFERS)
    keys_read = params.barriers.s_free if DQ_GROUP else params.barriers.d_ready  # by the products of dQ
    mbarrier.wait(keys_read.index(buffer), phase, pred=visits > first_visit)
    store_gradient(dK, descriptors.dk, params.dk, params.dk_strides, batch, kv_head, key, params.M, params.D, scale, smem.K.index(G), TRAITS.TMA_STORE)
    if DB > 0:
        store_gradient(dKB, descriptors.dkb, params.dk, params.dk_strides, batch, kv_head, key, params.M, params.D, scale, smem.KB.index(G), TRAITS.TMA_STORE, DA)
    tma.store_wait(0)
    if not DQ_GROUP:  # in the first visit of the next tile this group writes over its part of the last dQ
        mbarrier.wait(params.barriers.d_free.index(buffer), phase, pred=(visits > first_visit) & (G == 0))
    mbarrier.arrive(params.barriers.k_free)
    return visits


@gluon.jit
def consumer(params, descriptors, columns, G, TRAITS: gl.constexpr):
    """Consumer group G, which takes one tile after another."""
    tiles = params.key_blocks * params.batch_kv_heads
    taken = 0
    visits = 0
    tile = next_tile(taken, params, 4)
    while tile < tiles:
        visits = consume_tile(tile, visits, params, descriptors, columns, G, TRAITS)
        taken += 1
        tile = next_tile(taken, params, 4)


@gluon.jit
def group(params, descriptors, G: gl.constexpr, TRAITS: gl.constexpr):
    """The partition of consumer group G: `forward.group`. Its part of dQ is a slice of K's columns, for which G must be a constant."""
    columns = 0
    if not TRAITS.DQ_GROUP:
        columns = key_columns(params.smem.K, TRAITS.DA, G, 0, TRAITS)
    consumer(params, descriptors, columns, gl.to_tensor(G), TRAITS)


@gluon.jit(do_not_specialize=["lists", "dq_order", "drop", "n", "M", "D", "E", "padded_n", "key_blocks", "batch_kv_heads", "num_heads", "heads_per_kv",
                              "swizzle"])
def backward(q, qb, k, kb, v, vb, do, dob, lse, delta, g_entropy, dq_sums, dq_sums_b, dk_desc, dkb_desc, dv_desc, dvb_desc, dk, dv,
             dk_strides, dv_strides, scale, scales, cap, bias, lists, dq_order, drop, empty, seen, semaphores, n, M, D, E, padded_n, key_blocks,
             batch_kv_heads, num_heads, heads_per_kv, swizzle,
             DA: gl.constexpr, DB: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
             DQ_GROUP: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr, ENTROPY: gl.constexpr,
             DROP: gl.constexpr, SCALES: gl.constexpr, TMA_STORE: gl.constexpr):
    """A program takes one key block of one key head, and all query heads that share it; then the next."""
    K = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, ROWS, DA], k.layout)
    V = gl.allocate_shared_memory(v.dtype, [GROUPS, 1, 1, ROWS, EA], v.layout)
    Q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DA], q.layout)
    dO = gl.allocate_shared_memory(do.dtype, [STAGES, 1, 1, BM, EA], do.layout)
    DS_BUFFERS: gl.constexpr = 4 if DQ_GROUP else 2
    PARTS: gl.constexpr = 1 if DQ_GROUP else 2  # of dQ's columns, one per group that computes it
    gl.static_assert(DQ_GROUP or DS_BUFFERS == DQ_WARPS, "the dQ of a visit has the number of its dS")
    dS = gl.allocate_shared_memory(q.dtype, [DS_BUFFERS * GROUPS, ROWS, BM], gl.NVMMASharedLayout.get_default_for([ROWS, BM], q.dtype))
    dQ = gl.allocate_shared_memory(gl.float32, [DQ_WARPS * PARTS, dq_sums.block_shape[0], dq_sums.block_shape[1]], dq_sums.layout)
    KB, VB, QB, dOB, dQB = K, V, Q, dO, dQ
    if DB > 0:
        KB = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, ROWS, DB], kb.layout)
        VB = gl.allocate_shared_memory(v.dtype, [GROUPS, 1, 1, ROWS, DB], vb.layout)
        QB = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DB], qb.layout)
        dOB = gl.allocate_shared_memory(do.dtype, [STAGES, 1, 1, BM, DB], dob.layout)
        dQB = gl.allocate_shared_memory(gl.float32, [DQ_WARPS * PARTS, dq_sums_b.block_shape[0], dq_sums_b.block_shape[1]], dq_sums_b.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    g_smem = delta_smem
    if ENTROPY:
        g_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse.layout)
    tile_info = gl.allocate_shared_memory(gl.int32, [TILE_INFO, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_ready = new_barriers(1, 1).index(0)
    k_free = new_barriers(1, GROUPS + DQ_WARPS + (1 if DQ_GROUP else 0)).index(0)
    d_ready = new_barriers(DQ_WARPS, PARTS)
    d_free = new_barriers(DQ_WARPS, 1)
    s_ready = new_barriers(DS_BUFFERS, GROUPS) if DQ_GROUP else new_barriers(DS_BUFFERS * GROUPS, 1)
    s_free = new_barriers(DS_BUFFERS, 1) if DQ_GROUP else None
    q_ready = new_barriers(STAGES + 1, 2 if DQ_GROUP else 1, 1)
    o_ready = q_ready if DQ_GROUP else new_barriers(STAGES, 1)
    q_free = new_barriers(STAGES, GROUPS)
    fence_async_shared()
    descriptors = BackwardDescriptors(q, qb, k, kb, v, vb, do, dob, lse, delta, g_entropy)
    gradients, dq = GradientDescriptors(dk_desc, dkb_desc, dv_desc, dvb_desc), DQDescriptors(dq_sums, dq_sums_b)
    params = BackwardParams(
        BackwardSmem(Q, QB, K, KB, V, VB, dO, dOB, None, dS, dQ, dQB),
        BackwardBarriers(k_ready, k_free, q_ready, q_free, o_ready, None, None, s_ready, s_free, d_ready, d_free), RowStats(lse_smem, delta_smem, g_smem),
        dk, dv, dk_strides, dv_strides, scale, cap, bias, scales, lists, dq_order, drop, empty, seen, semaphores, n, M, D, E, padded_n,
        key_blocks, batch_kv_heads, num_heads, heads_per_kv, swizzle, tile_info)
    TRAITS: gl.constexpr = traits_of(
        DA=DA, DB=DB, EA=EA, EB=DB, BM=BM, ONE_TILE=False, STAGES=STAGES, O_STAGES=STAGES, DQ_GROUP=DQ_GROUP, DS_BUFFERS=DS_BUFFERS, DQ_BUFFERS=DQ_WARPS, PARTS=PARTS, MASK=MASK, BIAS=BIAS,
        CAP=CAP, FAST=FAST, ENTROPY=ENTROPY, DROP=DROP, SCALES=SCALES, TMA_STORE=TMA_STORE)
    if DQ_GROUP:
        warp_specialize([
            (group, (params, gradients, 0, TRAITS)),
            (group, (params, gradients, 1, TRAITS)),
            (dq_group, (params, TRAITS)),
            (producer, (params, descriptors, TRAITS)),
            (dq_warp, (params, dq, 0, TRAITS)),
            (dq_warp, (params, dq, 1, TRAITS)),
        ], [4, 4, 1, 1, 1], [REGISTERS, 72, 24, 24, 24])
    else:
        warp_specialize([
            (group, (params, gradients, 0, TRAITS)),
            (group, (params, gradients, 1, TRAITS)),
            (producer, (params, descriptors, TRAITS)),
            (dq_warp, (params, dq, 0, TRAITS)),
            (dq_warp, (params, dq, 1, TRAITS)),
        ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])
