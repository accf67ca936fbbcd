"""The forward pass with its tangent on Hopper, in Gluon: what `portable/jvp.py` computes, in its letters and units.

A consumer group holds 64 rows: their O and A, and in each key block the logits S and the tangent T of the products. Six matrix products
per block, in an order that lets the softmax run beside them:

    S = Q Kᵀ    O += P V    A += (P∘t) V    A += P dV    of the block before; meanwhile the row max and P of this block
    T = dQ Kᵀ + Q dKᵀ                                    meanwhile O and A are rescaled; then P∘t

So S and T are never held together with the P and P∘t that the products read. Partial blocks come first, as in the forward pass.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...compat.gluon import group_barrier, tma_load, tma_store, warp_specialize
from ..portable.tile_ops import _BIAS_NONE, _NONE, DEEP, LN2, LOG2E, LOWEST, row_max_residual, row_spans
from .aggregates import ForwardBarriers, ForwardParams, KeyBlocks, RowBlock, traits_of
from .forward import flat, producer_registers
from .nonfinite import find_unseen, zero_unseen
from .online_softmax import (
    apply_mask,
    beside,
    log2,
    online_softmax,
    pack_P,
    partial_sums,
    rescale_O,
    row_sums,
    store_statistics,
    unpack_P,
)
from .register_layouts import mma_layout
from .tile_scheduler import ROWS, advance, block_at, first_row, group_range, key_block_range, new_barriers, work_tile


class JvpDescriptors(NamedTuple):
    """TMA descriptors; None for a tensor without a tangent."""

    q: Any
    k: Any
    v: Any
    dq: Any
    dk: Any
    dv: Any
    o: Any
    do: Any


class JvpSmem(NamedTuple):
    """Buffers in shared memory."""

    Q: Any  # [GROUPS, 1, 1, ROWS, D]
    dQ: Any
    K: Any  # [STAGES, 1, 1, BN, D]
    dK: Any
    V: Any
    dV: Any


class JvpOutputs(NamedTuple):
    """Pointers to the statistics and their tangents."""

    lse: Any
    row_max: Any
    log_row_sum: Any
    entropy: Any
    d_lse: Any
    d_entropy: Any


class JvpState(NamedTuple):
    """The running sums of a group's rows."""

    O: Any  # [ROWS, D]
    A: Any  # [ROWS, D]
    P: Any  # [ROWS, BN / 2] of the block before, packed
    Pt: Any  # the same, times the tangent of the logits
    m: Any  # [ROWS] row max
    l: Any  # [ROWS, 8] partial sums of P
    e: Any  # of P·X, for the entropy; X is the exponent
    u: Any  # of P∘t
    c: Any  # of P∘t·X


@gluon.jit
def start_T(smem, G, stage, zero, TRAITS: gl.constexpr):
    """Start T = dQ Kᵀ + Q dKᵀ."""
    BN: gl.constexpr = TRAITS.BN
    D: gl.constexpr = TRAITS.D
    T = zero
    if TRAITS.MOVES_Q:
        T = warpgroup_mma(flat(smem.dQ.index(G), ROWS, D), flat(smem.K.index(stage), BN, D).permute((1, 0)), T, use_acc=False, is_async=True)
    if TRAITS.MOVES_K:
        T = warpgroup_mma(flat(smem.Q.index(G), ROWS, D), flat(smem.dK.index(stage), BN, D).permute((1, 0)), T, use_acc=TRAITS.MOVES_Q, is_async=True)
    return T


@gluon.jit
def start_OA(P, Pt, smem, stage, O, A, TRAITS: gl.constexpr):
    """Start O += P V and A += (P∘t) V + P dV."""
    BN: gl.constexpr = TRAITS.BN
    D: gl.constexpr = TRAITS.D
    PL: gl.constexpr = gl.DotOperandLayout(0, O.type.layout, 2)
    P = unpack_P(P, smem.V.dtype, PL)
    Pt = unpack_P(Pt, smem.V.dtype, PL)
    V = flat(smem.V.index(stage), BN, D)
    O = warpgroup_mma(P, V, O, is_async=True)
    A = warpgroup_mma(Pt, V, A, is_async=True)
    if TRAITS.MOVES_V:
        A = warpgroup_mma(P, flat(smem.dV.index(stage), BN, D), A, is_async=True)
    return O, A


@gluon.jit
def clean_values(dirty, rows, j0, stage, params, TRAITS: gl.constexpr):
    """Set values and their tangents to 0 for keys that no row may attend to. They are loaded."""
    if dirty != 0:
        V = flat(params.smem.V.index(stage), TRAITS.BN, TRAITS.D)
        zero_unseen(V, V, 0, rows, j0, params, TRAITS.D, TRAITS)
        if TRAITS.MOVES_V:
            dV = flat(params.smem.dV.index(stage), TRAITS.BN, TRAITS.D)
            zero_unseen(dV, dV, 0, rows, j0, params, TRAITS.D, TRAITS)
        fence_async_shared()
        group_barrier()


@gluon.jit
def tangent_weights(P, T, scale, HIDES: gl.constexpr):
    """P∘t [ROWS, BN] from the tangent T of the products. A hidden key may be NaN, and so may its T; its weight is 0."""
    Pt = P * (T * scale)
    if HIDES:
        Pt = gl.where(P == 0.0, 0.0, Pt)
    return Pt


@gluon.jit
def add_tangent(P, Pt, u, c, m, m_new, a, ENTROPY: gl.constexpr):
    """u and c [ROWS, 8] with P∘t added; `a` rescales the past, from row max m to m_new."""
    each = beside(a, u)
    if ENTROPY:
        X = gl.maximum(log2(P), DEEP)  # again from P: the exponents would take the registers that T needs
        c = each * (c + beside(gl.maximum(m - m_new, DEEP), u) * u) + partial_sums(Pt * X)
    return each * u + partial_sums(Pt), c


@gluon.jit
def jvp_one_block(t, state, dirty, j0, stage, phase, rows, zero, params, G, TRAITS: gl.constexpr, MASKED: gl.constexpr):
    """One iteration: the softmax and its tangent of the t-th key block, beside the products of the previous one with its values."""
    barriers, lists, smem = params.barriers, params.lists, params.smem
    O, A, P, Pt, m, l, e, u, c = state
    BN: gl.constexpr = TRAITS.BN
    D: gl.constexpr = TRAITS.D
    if MASKED and TRAITS.MASK != _NONE:
        clean_values(dirty, rows, j0, stage, params, TRAITS)
    previous = stage
    stage, phase = advance(stage, phase, TRAITS.STAGES)
    b, slot = block_at(lists, t, rows.key_blocks, G, TRAITS.GROUPS, TRAITS.MASK)
    mbarrier.wait(barriers.k_ready.index(stage), phase)
    S = warpgroup_mma(flat(smem.Q.index(G), ROWS, D), flat(smem.K.index(stage), BN, D).permute((1, 0)), zero, use_acc=False, is_async=True)
    O, A = start_OA(P, Pt, smem, previous, O, A, TRAITS)
    lo, hi = rows.i, rows.i
    if MASKED:
        j0 = b * BN  # all values of a full block are clean
        lo, hi = row_spans(lists, rows.batch, rows.h, rows.i, params.n, params.M, TRAITS.MASK)
    S = warpgroup_mma_wait(3 if TRAITS.MOVES_V else 2, deps=[S])
    if MASKED:
        S = apply_mask(S, lists, lo, hi, slot, rows.i, j0, TRAITS.MASK)
    seen, dirty = find_unseen(rows.i, rows, j0, params, TRAITS, MASKED)
    P, m_new, l, e, a = online_softmax(S, m, l, e, rows.unit, TRAITS.ENTROPY, True, MASKED, False)
    mbarrier.wait(barriers.v_ready.index(stage), phase)  # for the next iteration; this loop also keeps ptxas from waiting for O before the softmax
    O, A = warpgroup_mma_wait(0, deps=[O, A])
    mbarrier.arrive(barriers.v_free.index(previous))
    T = start_T(smem, G, stage, zero, TRAITS)
    O = rescale_O(O, a)
    A = rescale_O(A, a)
    T = warpgroup_mma_wait(0, deps=[T])
    mbarrier.arrive(barriers.k_free.index(stage))
    Pt = tangent_weights(P, T, rows.scale, MASKED)
    u, c = add_tangent(P, Pt, u, c, m, m_new, a, TRAITS.ENTROPY)
    P = pack_P(P, 0, 0, 0, smem.V.dtype, False)
    Pt = pack_P(Pt, 0, 0, 0, smem.V.dtype, False)
    return O, A, P, Pt, m_new, l, e, u, c, dirty, j0, stage, phase


@gluon.jit
def epilogue(state, row, rows, params, descriptors, G, TRAITS: gl.constexpr):
    """Store the output, the statistics and their tangents; past the end nothing is stored."""
    outputs, smem, n = params.outputs, params.smem, params.n
    O, A, P, Pt, m, l, e, u, c = state
    OR: gl.constexpr = gl.SliceLayout(1, O.type.layout)
    l, e, u, c = row_sums(l, m), row_sums(e, m), row_sums(u, m), row_sums(c, m)
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    u = u / l
    share = gl.convert_layout(1.0 / l, OR)[:, None]
    O = O * share
    A = A * share - gl.convert_layout(u, OR)[:, None] * O
    if TRAITS.MASK != _NONE:  # a row that sees nothing may hold NaN
        nothing = gl.convert_layout(empty, OR)[:, None]
        O = gl.where(nothing, 0.0, O)
        A = gl.where(nothing, 0.0, A)
    flat(smem.Q.index(G), ROWS, TRAITS.D).store(O.to(smem.Q.dtype))
    flat(smem.dQ.index(G), ROWS, TRAITS.D).store(A.to(smem.Q.dtype))
    fence_async_shared()
    group_barrier()
    tma_store(descriptors.o, [rows.batch, rows.h, row, 0], smem.Q.index(G))
    tma_store(descriptors.do, [rows.batch, rows.h, row, 0], smem.dQ.index(G))
    i = rows.i
    at = (rows.batch.to(gl.int64) * params.num_heads + rows.h) * n + i
    ln_l = gl.log2(l) * LN2
    row_max = m * LN2
    log_row_sum = ln_l + row_max_residual(m, row_max, empty, True)
    store_statistics(outputs, at, i < n, row_max, log_row_sum, ln_l - e / l * LN2, empty, None, rows.h, False, TRAITS.ENTROPY)
    gl.store(outputs.d_lse + at, u, mask=i < n)
    if TRAITS.ENTROPY:
        gl.store(outputs.d_entropy + at, (u * e - c) / l * LN2, mask=i < n)
    tma.store_wait(0)


@gluon.jit
def consumer(params, descriptors, G, TRAITS: gl.constexpr):
    """Consumer group G: its ROWS rows of the program's row block against all key blocks that the row block visits."""
    barriers, lists, smem, n, M = params.barriers, params.lists, params.smem, params.n, params.M
    k_ready, k_free, v_ready, v_free = barriers.k_ready, barriers.k_free, barriers.v_ready, barriers.v_free
    BN: gl.constexpr = TRAITS.BN
    D: gl.constexpr = TRAITS.D
    GROUPS: gl.constexpr = TRAITS.GROUPS
    MASK: gl.constexpr = TRAITS.MASK
    ENTROPY: gl.constexpr = TRAITS.ENTROPY
    SL: gl.constexpr = mma_layout(BN)
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    zero = gl.zeros([ROWS, BN], gl.float32, SL)
    stage = 0
    phase = 0
    all_seen = 1
    if MASK != _NONE:
        all_seen = gl.load(lists.all_keys_visible)
    block, batch_head = work_tile(gl.program_id(0), params.row_blocks, params.batch_heads, params.swizzle)
    batch, h = batch_head // params.num_heads, batch_head % params.num_heads
    key_blocks = KeyBlocks(*key_block_range(lists, batch, h, block, M, BN, MASK))
    row = first_row(block, n, params.row_blocks, G, GROUPS)
    start, unmasked = group_range(lists, batch, h, row, key_blocks, n, BN, MASK)
    i = row + gl.arange(0, ROWS, SR)  # [ROWS]
    rows = RowBlock(i, G, batch, h, key_blocks, 0, 0, params.scale, params.scale * LOG2E, all_seen)
    m = gl.full([ROWS], LOWEST, gl.float32, SR)
    nothing = partial_sums(zero)
    O = gl.zeros([ROWS, D], gl.float32, mma_layout(D))
    A = gl.zeros([ROWS, D], gl.float32, mma_layout(D))

    count = gl.maximum(key_blocks.total, 1)
    begin = gl.minimum(start, count - 1)
    for _ in range(begin):  # skip the blocks that only other groups see
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.arrive(k_free.index(stage))
        mbarrier.wait(v_ready.index(stage), phase)
        mbarrier.arrive(v_free.index(stage))
        stage, phase = advance(stage, phase, TRAITS.STAGES)
    b, slot = block_at(lists, begin, key_blocks, G, GROUPS, MASK)
    j0 = b * BN
    mbarrier.wait(barriers.q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(stage), phase)
    S = warpgroup_mma(flat(smem.Q.index(G), ROWS, D), flat(smem.K.index(stage), BN, D).permute((1, 0)), zero, use_acc=False, is_async=True)
    T = start_T(smem, G, stage, zero, TRAITS)
    lo, hi = row_spans(lists, batch, h, i, n, M, MASK)
    hi = gl.where(key_blocks.total > 0, hi, 0)
    S, T = warpgroup_mma_wait(0, deps=[S, T])
    mbarrier.arrive(k_free.index(stage))
    S = apply_mask(S, lists, lo, hi, slot, i, j0, MASK)
    seen, dirty = find_unseen(i, rows, j0, params, TRAITS, True)
    P, m_new, l, e, a = online_softmax(S, m, nothing, nothing, rows.unit, ENTROPY, True, True, False)
    Pt = tangent_weights(P, T, rows.scale, True)
    u, c = add_tangent(P, Pt, nothing, nothing, m, m_new, a, ENTROPY)
    m = m_new
    P = pack_P(P, 0, 0, 0, smem.V.dtype, False)
    Pt = pack_P(Pt, 0, 0, 0, smem.V.dtype, False)
    mbarrier.wait(v_ready.index(stage), phase)

    if MASK != _NONE:  # without a mask, only the first block can hide something
        for t in range(begin + 1, unmasked):
            O, A, P, Pt, m, l, e, u, c, dirty, j0, stage, phase = jvp_one_block(
                t, JvpState(O, A, P, Pt, m, l, e, u, c), dirty, j0, stage, phase, rows, zero, params, G, TRAITS, True)
        clean_values(dirty, rows, j0, stage, params, TRAITS)  # the values of full blocks are clean
    for t in range(gl.maximum(begin + 1, unmasked), count):
        O, A, P, Pt, m, l, e, u, c, dirty, j0, stage, phase = jvp_one_block(
            t, JvpState(O, A, P, Pt, m, l, e, u, c), dirty, j0, stage, phase, rows, zero, params, G, TRAITS, False)

    O, A = start_OA(P, Pt, smem, stage, O, A, TRAITS)
    O, A = warpgroup_mma_wait(0, deps=[O, A])
    mbarrier.arrive(v_free.index(stage))
    epilogue(JvpState(O, A, P, Pt, m, l, e, u, c), row, rows, params, descriptors, G, TRAITS)


@gluon.jit
def producer(params, descriptors, TRAITS: gl.constexpr):
    """The producer warp: it loads Q and dQ, then K, V and their tangents of all key blocks, as soon as a stage is free."""
    smem, barriers, lists = params.smem, params.barriers, params.lists
    BN: gl.constexpr = TRAITS.BN
    GROUPS: gl.constexpr = TRAITS.GROUPS
    KEY_BYTES: gl.constexpr = BN * TRAITS.D * 2
    block, batch_head = work_tile(gl.program_id(0), params.row_blocks, params.batch_heads, params.swizzle)
    batch, h = batch_head // params.num_heads, batch_head % params.num_heads
    kv_head = h // params.heads_per_kv
    key_blocks = KeyBlocks(*key_block_range(lists, batch, h, block, params.M, BN, TRAITS.MASK))
    q_ready = barriers.q_ready.index(0)
    mbarrier.expect(q_ready, GROUPS * ROWS * TRAITS.D * (4 if TRAITS.MOVES_Q else 2))
    for g in gl.static_range(GROUPS):
        row = first_row(block, params.n, params.row_blocks, g, GROUPS)
        tma_load(descriptors.q, [batch, h, row, 0], q_ready, smem.Q.index(g))
        if TRAITS.MOVES_Q:
            tma_load(descriptors.dq, [batch, h, row, 0], q_ready, smem.dQ.index(g))
    stage = 0
    phase = 1  # a new barrier counts as free: the phase before its first is complete
    for s in range(gl.maximum(key_blocks.total, 1)):
        b, slot = block_at(lists, s, key_blocks, 0, GROUPS, TRAITS.MASK)
        at = [batch, kv_head, b * BN, 0]
        k_ready, v_ready = barriers.k_ready.index(stage), barriers.v_ready.index(stage)
        mbarrier.wait(barriers.k_free.index(stage), phase)
        mbarrier.expect(k_ready, KEY_BYTES * (2 if TRAITS.MOVES_K else 1))
        tma_load(descriptors.k, at, k_ready, smem.K.index(stage))
        if TRAITS.MOVES_K:
            tma_load(descriptors.dk, at, k_ready, smem.dK.index(stage))
        mbarrier.wait(barriers.v_free.index(stage), phase)
        mbarrier.expect(v_ready, KEY_BYTES * (2 if TRAITS.MOVES_V else 1))
        tma_load(descriptors.v, at, v_ready, smem.V.index(stage))
        if TRAITS.MOVES_V:
            tma_load(descriptors.dv, at, v_ready, smem.dV.index(stage))
        stage, phase = advance(stage, phase, TRAITS.STAGES)


@gluon.jit
def group(params, descriptors, G: gl.constexpr, TRAITS: gl.constexpr):
    """The partition of consumer group G: `forward.group`."""
    consumer(params, descriptors, gl.to_tensor(G), TRAITS)


@gluon.jit(do_not_specialize=["lists", "n", "M", "row_blocks", "batch_heads", "num_heads", "heads_per_kv", "swizzle"])
def jvp(q, k, v, dq, dk, dv, o, do, lse, row_max, log_row_sum, entropy, d_lse, d_entropy, scale, lists, n, M, row_blocks, batch_heads,
        num_heads, heads_per_kv, swizzle, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
        REGISTERS: gl.constexpr, MASK: gl.constexpr, ENTROPY: gl.constexpr):
    """A program takes one row block of one head."""
    MOVES_Q: gl.constexpr = dq is not None
    MOVES_K: gl.constexpr = dk is not None
    MOVES_V: gl.constexpr = dv is not None
    Q = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, ROWS, D], q.layout)
    dQ = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, ROWS, D], q.layout)  # for the output's tangent in any case
    K = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, D], k.layout)
    V = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BN, D], v.layout)
    dK = K
    dV = V
    if MOVES_K:
        dK = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, D], k.layout)
    if MOVES_V:
        dV = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BN, D], v.layout)
    barriers = ForwardBarriers(
        new_barriers(1, 1), None, new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS), new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS))
    fence_async_shared()
    descriptors = JvpDescriptors(q, k, v, dq, dk, dv, o, do)
    params = ForwardParams(
        JvpSmem(Q, dQ, K, dK, V, dV), barriers,
        JvpOutputs(lse, row_max, log_row_sum, entropy, d_lse, d_entropy), None, scale, None, None, None, None, lists, None, n, M, None,
        row_blocks, batch_heads, num_heads, heads_per_kv, swizzle, None, None)
    TRAITS: gl.constexpr = traits_of(
        D=D, BN=BN, STAGES=STAGES, GROUPS=GROUPS, MASK=MASK, BIAS=_BIAS_NONE, ENTROPY=ENTROPY, MOVES_Q=MOVES_Q, MOVES_K=MOVES_K, MOVES_V=MOVES_V)
    PRODUCER: gl.constexpr = producer_registers(GROUPS, REGISTERS)
    gl.static_assert(GROUPS == 2, "no tile has more")
    warp_specialize([
        (group, (params, descriptors, 0, TRAITS)),
        (group, (params, descriptors, 1, TRAITS)),
        (producer, (params, descriptors, TRAITS)),
    ], [4, 1], [REGISTERS, PRODUCER])
