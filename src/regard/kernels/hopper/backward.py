"""The backward pass on Hopper, in Gluon: all gradients by one kernel, five products a tile, the same bits every time.

A program holds a block of keys, ROWS for each warp group, and walks over the blocks of rows that see them. One warp copies
Q, dO and the facts of the rows into shared memory; each group multiplies Sᵀ = K Qᵀ and dPᵀ = V dOᵀ and keeps Pᵀ and dSᵀ in
registers, where they are the left operands of dV += Pᵀ dO and dK += dSᵀ Q. dS goes to shared memory too: dQ = dS K needs
those of all groups, and each group makes its share of dQ's columns. Two more warps add dQ to memory. The blocks of keys
that add to a block of rows take turns, the last keys first; a program waits only for those that were launched before it.

Letters and units are those of `kernels/backward.py`.
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

from ..portable.tile_ops import _BIAS_ALIBI, _BIAS_NONE, _NONE, DEEP, LN2, LOG2E, program_tile
from .dq_semaphore import await_turn, next_turn, tma_add
from .dropout import dropped, survive, survivors
from .forward import PIECE, flat, group_barrier, tma_store
from .key_blocks import Task, added, common, hides, place, rows_at, turn_at, veil, walk_of
from .online_softmax import log2, saturation
from .register_layouts import product
from .register_layouts import turned as turned_layout
from .tile_scheduler import ROWS, advance, new_barriers, tma_load

GROUPS = gl.constexpr(2)  # of warps, each with ROWS keys


@gluon.jit
def copy(given, DA: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
         ENTROPY: gl.constexpr):
    """The warp that copies: K and V once, then of each block of rows Q, dO and the facts."""
    described, X, barriers, facts, dk, dv, strides, scale, cap, bias, task = given
    q, k, v, do, level, delta, g_entropy, _, _, _ = described
    FACTS: gl.constexpr = 3 if ENTROPY else 2
    Q, K, V, dO, dS, dQ = X
    k_ready, ready, free, s_ready, d_ready, d_free = barriers
    block, item, kv = place(task)
    mbarrier.expect(k_ready, GROUPS * ROWS * (DA + EA) * 2)
    for g in gl.static_range(GROUPS):
        row = (block * GROUPS + g) * ROWS
        tma_load(k, [item, kv, row, 0], k_ready, K.index(g))
        tma_load(v, [item, kv, row, 0], k_ready, V.index(g))
    stage = 0
    parity = 1
    for u in range(task.groups):
        h = kv * task.groups + u
        first, count = walk_of(task, item, h, block, BM, MASK)
        at = (item * task.heads + h) * task.NP
        for t in range(count):
            b, slot = rows_at(task, t, first, MASK)
            now = ready.index(stage)
            mbarrier.wait(free.index(stage), parity)
            mbarrier.expect(now, BM * (DA + EA) * 2 + BM * 4 * FACTS)
            tma_load(q, [item, h, b * BM, 0], now, Q.index(stage))
            tma_load(level, [at + b * BM], now, facts[0].index(stage))
            tma_load(do, [item, h, b * BM, 0], now, dO.index(stage))
            tma_load(delta, [at + b * BM], now, facts[1].index(stage))
            if ENTROPY:
                tma_load(g_entropy, [at + b * BM], now, facts[2].index(stage))
            stage, parity = advance(stage, parity, STAGES)


@gluon.jit
def add(given, ODD: gl.constexpr, BM: gl.constexpr, MASK: gl.constexpr):
    """One of two warps that add dQ to memory when its turn has come: this one every other block of rows."""
    described, X, barriers, facts, dk, dv, strides, scale, cap, bias, task = given
    sums = described[7]
    dQ = X[5]
    d_ready, d_free = barriers[4], barriers[5]
    block, item, kv = place(task)
    parity = 0
    spot = 0  # of dQ, which has two (Triton 3.6 loses a count that both loops carry; a bit that flips stays)
    for u in range(task.groups):
        h = kv * task.groups + u
        first, count = walk_of(task, item, h, block, BM, MASK)
        for t in range(count):
            if spot == ODD:
                b, slot = rows_at(task, t, first, MASK)
                turn = turn_at(task, t, b, first, item, h, block, MASK)
                at = (item * task.heads + h) * gl.cdiv(task.n, BM) + b
                await_turn(task.counters + at, turn)
                mbarrier.wait(d_ready.index(ODD), parity)
                parity ^= 1
                for g in gl.static_range(GROUPS):
                    if turn == 0:
                        tma_store(sums, [(at * GROUPS + g) * BM, 0], dQ.index(ODD * GROUPS + g))
                    else:
                        tma_add(sums, [(at * GROUPS + g) * BM, 0], dQ.index(ODD * GROUPS + g))
                tma.store_wait(0)  # shared memory has been read
                mbarrier.arrive(d_free.index(ODD))
                next_turn(task.counters + at, turn)
            spot ^= 1


@gluon.jit
def turned(X, L: gl.constexpr):
    """A product [ROWS, BM] as the paper has it, [BM, ROWS]; nothing moves."""
    return gl.convert_layout(X.permute((1, 0)), L, assert_trivial=True)


@gluon.jit
def weights(S, level, b, j, slot, item, h, scale, unit, cap, bias, task, partial, BM: gl.constexpr, MASK: gl.constexpr,
            BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr, TL: gl.constexpr):
    """P [BM, ROWS] of products S; 0 where the pair is hidden."""
    if CAP:
        S = cap * saturation(S, scale, cap)
    elif not FAST:
        S *= scale
    if BIAS != _BIAS_NONE:
        X = added(bias, item, h, b, j, task, BM, BIAS, TL)
        S = gl.where(X != float("-inf"), S + X, float("-inf"))  # by the bias and not by the sum, which a hidden key may make NaN
    if partial:
        S = veil(S, b, j, slot, item, h, task, BM, MASK, TL)
    T = S * unit - level[:, None] if FAST else (S - level[:, None]) * LOG2E
    return gl.exp2(T)


@gluon.jit
def slopes(P, dP, level, g, item, h, b, j, cap, bias, task, partial, BM: gl.constexpr, BIAS: gl.constexpr, ENTROPY: gl.constexpr,
           CAP: gl.constexpr, TL: gl.constexpr):
    """dS [BM, ROWS] of the scaled products from dP − δ. What a cap has left of a logit is told from P."""
    if BIAS != _BIAS_NONE and BIAS != _BIAS_ALIBI:
        dP = gl.where(P > 0.0, dP, 0.0)
    else:
        if partial:
            dP = gl.where(P > 0.0, dP, 0.0)  # a hidden value may be NaN
    if ENTROPY:
        dP -= g[:, None] * gl.maximum(log2(P), DEEP)
    dS = P * dP
    if CAP:
        S = log2(P) * LN2 + level[:, None]
        if BIAS != _BIAS_NONE:
            S -= added(bias, item, h, b, j, task, BM, BIAS, TL)
        t = S * (1.0 / cap)
        dS = gl.where(P > 0.0, dS * (1.0 - t * t), 0.0)
    return dS


@gluon.jit
def blank(X, levels, BM: gl.constexpr, C: gl.constexpr):
    """Zeros for the queries X [BM, C] of rows that see nothing, which may be NaN. Every group writes the same to the same place."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    for r in gl.static_range(0, BM, PIECE):
        part = X.slice(r, PIECE)
        see = levels.slice(r, PIECE).load(gl.SliceLayout(1, L)) < float("inf")
        part.store(gl.where(see[:, None], part.load(L), 0.0))


@gluon.jit
def lost(levels, BM: gl.constexpr):
    """Whether some row of a block sees nothing."""
    return gl.max(levels.load(gl.BlockedLayout([BM // 32], [32], [4], [0])), 0) == float("inf")  # each warp has them all


@gluon.jit
def seen_by_some(task, item, kv, j, HIDING: gl.constexpr):
    """Of keys j, which some row of some head may attend, int32; of those beyond the last, all."""
    where = task.where
    some = j * 0
    for u in range(task.groups):
        h = kv * task.groups + u
        if HIDING:
            at = task.seen + (item * task.heads + h).to(gl.int64) * task.M
        else:
            at = where.seen + (item // gl.load(where.inner)).to(gl.int64) * where.seen_item + h * where.seen_head
        some = some | gl.load(at + j, mask=j < task.M, other=1).to(gl.int32)
    return some


@gluon.jit
def clean(X, task, item, kv, j0, C: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr):
    """Zeros for keys X [ROWS, C] that no row may attend, which may be NaN. What a bias hides by −inf is told by `seen`."""
    HIDING: gl.constexpr = BIAS != _BIAS_NONE and BIAS != _BIAS_ALIBI
    if MASK != _NONE or HIDING:
        j = j0 + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [4], [0]))  # each warp has them all
        if gl.min(seen_by_some(task, item, kv, j, HIDING), 0) == 0:
            L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
            for r in gl.static_range(0, ROWS, PIECE):
                some = j0 + r + gl.arange(0, PIECE, gl.SliceLayout(1, L))
                part = X.slice(r, PIECE)
                part.store(gl.where((seen_by_some(task, item, kv, some, HIDING) != 0)[:, None], part.load(L), 0.0))
            fence_async_shared()
            group_barrier()


@gluon.jit
def blanked(X, levels, partial, BM: gl.constexpr, C: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr):
    """`blank`, where the mask or the bias may hide all keys from a row."""
    if MASK != _NONE or BIAS != _BIAS_NONE:
        empty = partial
        if BIAS != _BIAS_NONE and BIAS != _BIAS_ALIBI:
            empty = partial | lost(levels, BM)
        if empty:
            blank(X, levels, BM, C)


@gluon.jit
def fresh(X, zero):
    """X, in registers of its own. The assembler of Triton 3.6 overwrites an operand in registers that a loop uses again."""
    return gl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r,r", [X, zero], X.dtype, True, 2)


@gluon.jit
def compared(K, X, stage, none, DA: gl.constexpr, BM: gl.constexpr):
    """Sᵀ = K Qᵀ [ROWS, BM], begun."""
    return warpgroup_mma(K, flat(X[0].index(stage), BM, DA).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def valued(V, dO, delta, none, EA: gl.constexpr, BM: gl.constexpr, DROP: gl.constexpr, SL: gl.constexpr):
    """dPᵀ − δ = V dOᵀ − δ [ROWS, BM], begun; without δ where dropout comes between."""
    dO = flat(dO, BM, EA).permute((1, 0))
    if DROP:
        dP = warpgroup_mma(V, dO, none, use_acc=False, is_async=True)
    else:
        dP = warpgroup_mma(V, dO, none - delta.load(gl.SliceLayout(0, SL))[None, :], is_async=True)
    return dP


@gluon.jit
def shared_out(X, at, none, G: gl.constexpr, DA: gl.constexpr):
    """dQ = dS K, the group's share of its columns [BM, DA / GROUPS], begun."""
    K, dS = X[1], X[4]
    SHARE: gl.constexpr = DA // GROUPS
    share = warpgroup_mma(dS.index(at * GROUPS).permute((1, 0)), flat(K.index(0), ROWS, DA).slice(G * SHARE, SHARE, dim=1), none, use_acc=False,
                          is_async=True)
    for g in gl.static_range(1, GROUPS):
        share = warpgroup_mma(dS.index(at * GROUPS + g).permute((1, 0)), flat(K.index(g), ROWS, DA).slice(G * SHARE, SHARE, dim=1), share,
                              is_async=True)
    return share


@gluon.jit
def hand_over(share, dQ, at, d_free, d_ready, phase, G: gl.constexpr):
    """A share of dQ to the warp that adds it."""
    mbarrier.wait(d_free.index(at), phase)
    dQ.index(at * GROUPS + G).store(share)
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(d_ready.index(at))


@gluon.jit
def put(X, desc, out, strides, item, kv, row, M, D, scale, into, C: gl.constexpr, DESCRIBED: gl.constexpr, XL: gl.constexpr):
    """X [ROWS, C] times a number to memory, through the shared block `into` or by pointers."""
    X = (X * scale).to(into.dtype)
    if DESCRIBED:
        flat(into, ROWS, C).store(X)
        fence_async_shared()
        group_barrier()
        tma_store(desc, [item, kv, row, 0], into)
        tma.store_wait(0)
        group_barrier()
    else:
        j = row + gl.arange(0, ROWS, gl.SliceLayout(1, XL))
        c = gl.arange(0, C, gl.SliceLayout(0, XL))
        at = out + item.to(gl.int64) * strides[0] + kv.to(gl.int64) * strides[1] + j.to(gl.int64)[:, None] * strides[2] + c[None, :]
        gl.store(at, X, mask=(j < M)[:, None] & (c < D)[None, :])


@gluon.jit
def compute(given, G: gl.constexpr, DA: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
            HELD: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr, ENTROPY: gl.constexpr,
            DROP: gl.constexpr, SCALES: gl.constexpr, DESCRIBED: gl.constexpr):
    """A warp group: its ROWS keys against all rows that see the block. dQ of a block is made in the next block's step."""
    described, X, barriers, facts, dk, dv, strides, scale, cap, bias, task = given
    Q, K, V, dO, dS, dQ = X
    k_ready, ready, free, s_ready, d_ready, d_free = barriers
    SHARE: gl.constexpr = DA // GROUPS  # columns of dQ that the group makes
    SL: gl.constexpr = product(BM)
    KL: gl.constexpr = product(DA)
    VL: gl.constexpr = product(EA)
    QL: gl.constexpr = product(SHARE)
    TL: gl.constexpr = turned_layout(BM)
    block, item, kv = place(task)
    row = (block * GROUPS + G) * ROWS
    beyond = row + ROWS > task.M
    dK = gl.zeros([ROWS, DA], gl.float32, KL)
    dV = gl.zeros([ROWS, EA], gl.float32, VL)
    none = gl.zeros([ROWS, BM], gl.float32, SL)
    no_dQ = gl.zeros([BM, SHARE], gl.float32, QL)
    mbarrier.wait(k_ready, 0)
    clean(flat(K.index(G), ROWS, DA), task, item, kv, row, DA, MASK, BIAS)
    own_k = flat(K.index(G), ROWS, DA)
    own_v = flat(V.index(G), ROWS, EA)
    if HELD:
        own_k = own_k.load(gl.DotOperandLayout(0, SL, 2))
        own_v = own_v.load(gl.DotOperandLayout(0, SL, 2))
    stage = 0
    parity = 0
    turn = 0  # of dS and dQ, which have two places
    phase = 1  # of the dS before
    late = False  # whether there is a dS before
    for u in range(task.groups):
        h = kv * task.groups + u
        if SCALES:
            scale = gl.load(task.scales + h)
        unit = scale * LOG2E
        first, count = walk_of(task, item, h, block, BM, MASK)
        begin, behind = common(task, item, h, row, MASK)
        for t in range(count):
            b, slot = rows_at(task, t, first, MASK)
            partial = hides(b, slot, begin, behind, task.n, BM, MASK) | beyond
            q = flat(Q.index(stage), BM, DA)
            do = flat(dO.index(stage), BM, EA)
            j = row + gl.arange(0, ROWS, gl.SliceLayout(0, TL))  # [ROWS]
            if DROP:
                bits = survivors(task, item, h, b, j, BM, TL)
            mbarrier.wait(s_ready.index(turn ^ 1), phase, pred=late)
            share = shared_out(X, turn ^ 1, no_dQ, G, DA)
            mbarrier.wait(ready.index(stage), parity)
            keys, values = own_k, own_v
            if HELD:
                zero = (t + task.NP) >> 30
                keys, values = fresh(own_k, zero), fresh(own_v, zero)
            S = compared(keys, X, stage, none, DA, BM)
            share = warpgroup_mma_wait(1, deps=[share])
            if late:
                hand_over(share, dQ, turn ^ 1, d_free, d_ready, phase ^ 1, G)
            dP = valued(values, dO.index(stage), facts[1].index(stage), none, EA, BM, DROP, SL)
            level = facts[0].index(stage).load(gl.SliceLayout(1, TL))  # [BM]
            S = turned(warpgroup_mma_wait(1, deps=[S]), TL)
            P = weights(S, level, b, j, slot, item, h, scale, unit, cap, bias, task, partial, BM, MASK, BIAS, CAP, FAST, TL)
            Pd = P
            if DROP:
                P = gl.where(survive(bits, BM, TL), P, -P)  # the sign says who was dropped
                Pd = gl.where(P < 0.0, 0.0, P * task.drop.factor)
            dV = warpgroup_mma(gl.convert_layout(Pd.to(do.dtype).permute((1, 0)), gl.DotOperandLayout(0, VL, 2)), do, dV, is_async=True)
            slope = turned(warpgroup_mma_wait(1, deps=[dP]), TL)
            if DROP:
                P, slope = dropped(P, slope, facts[1].index(stage).load(gl.SliceLayout(1, TL)), task.drop)
            g = level
            if ENTROPY:
                g = facts[2].index(stage).load(gl.SliceLayout(1, TL))
            if CAP:
                level = facts[0].index(stage).load(gl.SliceLayout(1, TL))
            slope = slopes(P, slope, level, g, item, h, b, j, cap, bias, task, partial, BM, BIAS, ENTROPY, CAP, TL)
            of_keys = slope
            if SCALES:  # each query head has its own, and dK is of them all
                of_keys = slope * scale
            slope = gl.convert_layout(slope.to(q.dtype).permute((1, 0)), SL, assert_trivial=True)  # dSᵀ [ROWS, BM]
            dS.index(turn * GROUPS + G).store(slope)
            of_keys = gl.convert_layout(of_keys.to(q.dtype).permute((1, 0)), gl.DotOperandLayout(0, KL, 2))
            blanked(q, facts[0].index(stage), partial, BM, DA, MASK, BIAS)
            fence_async_shared()
            group_barrier()
            mbarrier.arrive(s_ready.index(turn))
            dK = warpgroup_mma(of_keys, q, dK, is_async=True)
            dV, dK = warpgroup_mma_wait(0, deps=[dV, dK])
            mbarrier.arrive(free.index(stage))
            late = True
            phase = gl.where(turn == 0, phase ^ 1, phase)
            turn ^= 1
            stage, parity = advance(stage, parity, STAGES)
    if late:
        mbarrier.wait(s_ready.index(turn ^ 1), phase)
        share = shared_out(X, turn ^ 1, no_dQ, G, DA)
        share = warpgroup_mma_wait(0, deps=[share])
        hand_over(share, dQ, turn ^ 1, d_free, d_ready, phase ^ 1, G)
    put(dV, described[9], dv, strides[1], item, kv, row, task.M, task.E, 1.0, V.index(G), EA, DESCRIBED, VL)
    put(dK, described[8], dk, strides[0], item, kv, row, task.M, task.D, 1.0 if SCALES else scale, V.index(G), DA, DESCRIBED, KL)


@gluon.jit(do_not_specialize=["where", "turns", "drop", "n", "M", "D", "E", "NP", "blocks", "owners", "heads", "groups", "section"])
def backward(q, k, v, do, level, delta, g_entropy, sums, dk_desc, dv_desc, dk, dv, strides, scale, scales, cap, bias, where, turns, drop,
             seen, counters, n, M, D, E, NP, blocks, owners, heads, groups, section,
             DA: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
             HELD: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr, ENTROPY: gl.constexpr,
             DROP: gl.constexpr, SCALES: gl.constexpr, DESCRIBED: gl.constexpr):
    """A program has one block of keys of one key head; its query heads come one after the other."""
    K = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, ROWS, DA], k.layout)
    V = gl.allocate_shared_memory(v.dtype, [GROUPS, 1, 1, ROWS, EA], v.layout)
    Q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DA], q.layout)
    dO = gl.allocate_shared_memory(do.dtype, [STAGES, 1, 1, BM, EA], do.layout)
    dS = gl.allocate_shared_memory(q.dtype, [2 * GROUPS, ROWS, BM], gl.NVMMASharedLayout.get_default_for([ROWS, BM], q.dtype))
    dQ = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, BM, DA // GROUPS], sums.layout)
    levels = gl.allocate_shared_memory(gl.float32, [STAGES, BM], level.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BM], level.layout)
    third = deltas
    if ENTROPY:
        third = gl.allocate_shared_memory(gl.float32, [STAGES, BM], level.layout)
    k_ready = new_barriers(1, 1).index(0)
    d_ready = new_barriers(2, GROUPS)
    d_free = new_barriers(2, 1)
    s_ready = new_barriers(2, GROUPS)
    ready = new_barriers(STAGES, 1)
    free = new_barriers(STAGES, GROUPS)
    fence_async_shared()
    described = (q, k, v, do, level, delta, g_entropy, sums, dk_desc, dv_desc)
    X = (Q, K, V, dO, dS, dQ)
    barriers = (k_ready, ready, free, s_ready, d_ready, d_free)
    facts = (levels, deltas, third)  # then g_H of the entropy
    task = Task(scales, where, turns, drop, seen, counters, n, M, D, E, NP, blocks, owners, heads, groups, section)
    given = (described, X, barriers, facts, dk, dv, strides, scale, cap, bias, task)
    gl.warp_specialize([
        (compute, (given, 0, DA, EA, BM, STAGES, HELD, MASK, BIAS, CAP, FAST, ENTROPY, DROP, SCALES, DESCRIBED)),
        (compute, (given, 1, DA, EA, BM, STAGES, HELD, MASK, BIAS, CAP, FAST, ENTROPY, DROP, SCALES, DESCRIBED)),
        (copy, (given, DA, EA, BM, STAGES, MASK, ENTROPY)),
        (add, (given, 0, BM, MASK)),
        (add, (given, 1, BM, MASK)),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])


@triton.jit(do_not_specialize=["n", "D"])
def finish(sums, counters, dq, scale, n, D, BM: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr, COUNTERS: tl.constexpr):
    """A block of rows of dQ from its sums, in PARTS of C columns; zeros if nothing was added."""
    block, own = program_tile(tl.cdiv(n, BM))
    at = tl.program_id(0)
    some = tl.load(counters + at * COUNTERS) > 0
    r = tl.arange(0, BM)
    i = block * BM + r
    for g in tl.static_range(PARTS):
        c = tl.arange(0, C)
        X = tl.load(sums + ((at.to(tl.int64) * PARTS + g) * BM + r)[:, None] * C + c[None, :])  # [BM, C]
        X = tl.where(some, X, 0.0) * scale
        to = (own.to(tl.int64) * n + i)[:, None] * D + (g * C + c)[None, :]
        tl.store(dq + to, X.to(dq.dtype.element_ty), mask=(i < n)[:, None] & (g * C + c < D)[None, :])
