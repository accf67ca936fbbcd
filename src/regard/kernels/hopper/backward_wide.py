"""The backward pass on Hopper for dims above 128, where one warp group cannot hold dK and dV of its keys together.

A program has ROWS keys. One group weighs: S, P, and dV. The other slopes: dP, dS, and dK; it gets P through shared memory.
Each makes half of dQ = dS K, in two parts, and has a warp that adds these to memory in turns. All else is as in `backward.py`.
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

from ..portable.tile_ops import LOG2E
from .backward import blanked, clean, put, slopes, turned, valued, weights
from .dq_semaphore import await_turn, next_turn, tma_add
from .dropout import dropped, survive, survivors
from .forward import flat, group_barrier, tma_store
from .key_blocks import Task, common, hides, place, rows_at, turn_at, walk_of
from .register_layouts import product
from .register_layouts import turned as turned_layout
from .tile_scheduler import ROWS, advance, new_barriers, tma_load

HALVES = gl.constexpr(2)  # of dQ, one for each group
PARTS = gl.constexpr(2)  # of each half, which are made one after the other
PART = gl.constexpr(64)  # columns of a part


@gluon.jit
def copy(given, DA: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, ENTROPY: gl.constexpr):
    """The warp that copies: K and V once, then of each block of rows Q, and dO as soon as the one before it is done with."""
    described, X, barriers, facts, dk, dv, strides, scale, cap, bias, task = given
    q, k, v, do, level, delta, g_entropy, _, _, _ = described
    Q, K, V, dO, P, dS, dQ = X
    k_ready, q_ready, q_free, o_ready, o_free, p_ready, s_ready, d_ready, d_free = barriers
    block, item, kv = place(task)
    mbarrier.expect(k_ready, ROWS * (DA + EA) * 2)
    tma_load(k, [item, kv, block * ROWS, 0], k_ready, K)
    tma_load(v, [item, kv, block * ROWS, 0], k_ready, V)
    stage = 0
    parity = 1
    o_parity = 1
    for u in range(task.groups):
        h = kv * task.groups + u
        first, count = walk_of(task, item, h, block, BM, MASK)
        at = (item * task.heads + h) * task.NP
        for t in range(count):
            b, slot = rows_at(task, t, first, MASK)
            now = q_ready.index(stage)
            mbarrier.wait(q_free.index(stage), parity)
            mbarrier.expect(now, BM * DA * 2 + BM * 4)
            tma_load(q, [item, h, b * BM, 0], now, Q.index(stage))
            tma_load(level, [at + b * BM], now, facts[0].index(stage))
            mbarrier.wait(o_free, o_parity)
            mbarrier.expect(o_ready, BM * EA * 2 + BM * 4 * (2 if ENTROPY else 1))
            tma_load(do, [item, h, b * BM, 0], o_ready, dO)
            tma_load(delta, [at + b * BM], o_ready, facts[1])
            if ENTROPY:
                tma_load(g_entropy, [at + b * BM], o_ready, facts[2])
            o_parity ^= 1
            stage, parity = advance(stage, parity, STAGES)


@gluon.jit
def add(given, G: gl.constexpr, BM: gl.constexpr, MASK: gl.constexpr):
    """The warp that adds a group's half of dQ to memory when its turn has come. Each half has counters of its own."""
    described, X, barriers, facts, dk, dv, strides, scale, cap, bias, task = given
    sums = described[7]
    dQ = X[6]
    d_ready, d_free = barriers[7], barriers[8]
    block, item, kv = place(task)
    for u in range(task.groups):
        h = kv * task.groups + u
        first, count = walk_of(task, item, h, block, BM, MASK)
        for t in range(count):
            b, slot = rows_at(task, t, first, MASK)
            turn = turn_at(task, t, b, first, item, h, block, MASK)
            at = ((item * task.heads + h) * gl.cdiv(task.n, BM) + b) * HALVES + G
            await_turn(task.counters + at, turn)
            for part in gl.static_range(PARTS):
                mbarrier.wait(d_ready.index(G), part)
                if turn == 0:
                    tma_store(sums, [(at * PARTS + part) * BM, 0], dQ.index(G))
                else:
                    tma_add(sums, [(at * PARTS + part) * BM, 0], dQ.index(G))
                tma.store_wait(0)  # shared memory has been read
                mbarrier.arrive(d_free.index(G))
            next_turn(task.counters + at, turn)


@gluon.jit
def part_of(K, dS, none, G: gl.constexpr, part: gl.constexpr, DA: gl.constexpr):
    """dQ = dS K [BM, PART], a part of a group's columns, begun."""
    return warpgroup_mma(dS.permute((1, 0)), flat(K, ROWS, DA).slice((G * PARTS + part) * PART, PART, dim=1), none, use_acc=False, is_async=True)


@gluon.jit
def hand_over(share, dQ, d_free, d_ready, G: gl.constexpr, part: gl.constexpr):
    """A part of dQ to the warp that adds it. There are two parts a block, so barriers are in the same parity each time."""
    mbarrier.wait(d_free.index(G), part ^ 1)
    dQ.index(G).store(share)
    fence_async_shared()
    group_barrier()
    mbarrier.arrive(d_ready.index(G))


@gluon.jit
def weigh(given, DA: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr,
          CAP: gl.constexpr, FAST: gl.constexpr, DROP: gl.constexpr, SCALES: gl.constexpr, DESCRIBED: gl.constexpr):
    """The group that makes P and dV, and the first half of dQ."""
    described, X, barriers, facts, dk, dv, strides, scale, cap, bias, task = given
    Q, K, V, dO, P, dS, dQ = X
    k_ready, q_ready, q_free, o_ready, o_free, p_ready, s_ready, d_ready, d_free = barriers
    SL: gl.constexpr = product(BM)
    VL: gl.constexpr = product(EA)
    QL: gl.constexpr = product(PART)
    TL: gl.constexpr = turned_layout(BM)
    block, item, kv = place(task)
    row = block * ROWS
    beyond = row + ROWS > task.M
    dV = gl.zeros([ROWS, EA], gl.float32, VL)
    none = gl.zeros([ROWS, BM], gl.float32, SL)
    no_dQ = gl.zeros([BM, PART], gl.float32, QL)
    mbarrier.wait(k_ready, 0)
    clean(flat(K, ROWS, DA), task, item, kv, row, DA, MASK, BIAS)
    stage = 0
    parity = 0
    phase = 1  # of the dS before
    o_parity = 0
    late = False
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
            j = row + gl.arange(0, ROWS, gl.SliceLayout(0, TL))  # [ROWS]
            if DROP:
                bits = survivors(task, item, h, b, j, BM, TL)
            mbarrier.wait(s_ready, phase, pred=late)
            share = part_of(K, dS, no_dQ, 0, 0, DA)
            mbarrier.wait(q_ready.index(stage), parity)
            S = warpgroup_mma(flat(K, ROWS, DA), flat(Q.index(stage), BM, DA).permute((1, 0)), none, use_acc=False, is_async=True)
            share = warpgroup_mma_wait(1, deps=[share])
            if late:
                hand_over(share, dQ, d_free, d_ready, 0, 0)
            share = part_of(K, dS, no_dQ, 0, 1, DA)
            level = facts[0].index(stage).load(gl.SliceLayout(1, TL))  # [BM]
            S = turned(warpgroup_mma_wait(1, deps=[S]), TL)
            W = weights(S, level, b, j, slot, item, h, scale, unit, cap, bias, task, partial, BM, MASK, BIAS, CAP, FAST, TL)
            share = warpgroup_mma_wait(0, deps=[share])
            if late:
                hand_over(share, dQ, d_free, d_ready, 0, 1)
            Pd = W
            if DROP:
                W = gl.where(survive(bits, BM, TL), W, -W)  # the sign says who was dropped
                Pd = gl.where(W < 0.0, 0.0, W * task.drop.factor)
            P.store(gl.convert_layout(W.permute((1, 0)), SL, assert_trivial=True))
            group_barrier()
            mbarrier.arrive(p_ready)
            mbarrier.arrive(q_free.index(stage))
            mbarrier.wait(o_ready, o_parity)
            do = flat(dO, BM, EA)
            dV = warpgroup_mma(gl.convert_layout(Pd.to(do.dtype).permute((1, 0)), gl.DotOperandLayout(0, VL, 2)), do, dV, is_async=True)
            dV = warpgroup_mma_wait(0, deps=[dV])
            mbarrier.arrive(o_free)
            o_parity ^= 1
            late = True
            phase ^= 1
            stage, parity = advance(stage, parity, STAGES)
    if late:
        mbarrier.wait(s_ready, phase)
        for part in gl.static_range(PARTS):
            share = part_of(K, dS, no_dQ, 0, part, DA)
            share = warpgroup_mma_wait(0, deps=[share])
            hand_over(share, dQ, d_free, d_ready, 0, part)
    put(dV, described[9], dv, strides[1], item, kv, row, task.M, task.E, 1.0, V, EA, DESCRIBED, VL)


@gluon.jit
def slope(given, DA: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr,
          CAP: gl.constexpr, ENTROPY: gl.constexpr, DROP: gl.constexpr, SCALES: gl.constexpr, DESCRIBED: gl.constexpr):
    """The group that makes dS and dK, and the second half of dQ."""
    described, X, barriers, facts, dk, dv, strides, scale, cap, bias, task = given
    Q, K, V, dO, P, dS, dQ = X
    k_ready, q_ready, q_free, o_ready, o_free, p_ready, s_ready, d_ready, d_free = barriers
    SL: gl.constexpr = product(BM)
    KL: gl.constexpr = product(DA)
    QL: gl.constexpr = product(PART)
    TL: gl.constexpr = turned_layout(BM)
    block, item, kv = place(task)
    row = block * ROWS
    beyond = row + ROWS > task.M
    dK = gl.zeros([ROWS, DA], gl.float32, KL)
    none = gl.zeros([ROWS, BM], gl.float32, SL)
    no_dQ = gl.zeros([BM, PART], gl.float32, QL)
    mbarrier.wait(k_ready, 0)
    stage = 0
    parity = 0
    o_parity = 0
    p_parity = 0
    late = False
    for u in range(task.groups):
        h = kv * task.groups + u
        if SCALES:
            scale = gl.load(task.scales + h)
        first, count = walk_of(task, item, h, block, BM, MASK)
        begin, behind = common(task, item, h, row, MASK)
        for t in range(count):
            b, slot = rows_at(task, t, first, MASK)
            partial = hides(b, slot, begin, behind, task.n, BM, MASK) | beyond
            share = part_of(K, dS, no_dQ, 1, 0, DA)  # its own: written in the step before
            mbarrier.wait(o_ready, o_parity)
            dP = valued(flat(V, ROWS, EA), dO, facts[1], none, EA, BM, DROP, SL)
            share = warpgroup_mma_wait(1, deps=[share])
            if late:
                hand_over(share, dQ, d_free, d_ready, 1, 0)
            share = part_of(K, dS, no_dQ, 1, 1, DA)
            j = row + gl.arange(0, ROWS, gl.SliceLayout(0, TL))  # [ROWS]
            dP = turned(warpgroup_mma_wait(1, deps=[dP]), TL)
            g = facts[1]
            if ENTROPY:
                g = facts[2].load(gl.SliceLayout(1, TL))
            mbarrier.wait(p_ready, p_parity)
            W = P.permute((1, 0)).load(TL)  # [BM, ROWS]
            if DROP:
                W, dP = dropped(W, dP, facts[1].load(gl.SliceLayout(1, TL)), task.drop)
            group_barrier()
            mbarrier.arrive(o_free)
            share = warpgroup_mma_wait(0, deps=[share])
            if late:
                hand_over(share, dQ, d_free, d_ready, 1, 1)
            mbarrier.wait(q_ready.index(stage), parity)
            level = g
            if CAP:
                level = facts[0].index(stage).load(gl.SliceLayout(1, TL))
            dP = slopes(W, dP, level, g, item, h, b, j, cap, bias, task, partial, BM, BIAS, ENTROPY, CAP, TL)
            of_keys = dP
            if SCALES:
                of_keys = dP * scale
            q = flat(Q.index(stage), BM, DA)
            dS.store(gl.convert_layout(dP.to(q.dtype).permute((1, 0)), SL, assert_trivial=True))
            of_keys = gl.convert_layout(of_keys.to(q.dtype).permute((1, 0)), gl.DotOperandLayout(0, KL, 2))
            blanked(q, facts[0].index(stage), partial, BM, DA, MASK, BIAS)
            fence_async_shared()
            group_barrier()
            mbarrier.arrive(s_ready)
            dK = warpgroup_mma(of_keys, q, dK, is_async=True)
            dK = warpgroup_mma_wait(0, deps=[dK])
            mbarrier.arrive(q_free.index(stage))
            o_parity ^= 1
            p_parity ^= 1
            late = True
            stage, parity = advance(stage, parity, STAGES)
    if late:
        for part in gl.static_range(PARTS):
            share = part_of(K, dS, no_dQ, 1, part, DA)
            share = warpgroup_mma_wait(0, deps=[share])
            hand_over(share, dQ, d_free, d_ready, 1, part)
    put(dK, described[8], dk, strides[0], item, kv, row, task.M, task.D, 1.0 if SCALES else scale, Q.index(0), DA, DESCRIBED, KL)


@gluon.jit(do_not_specialize=["where", "turns", "drop", "n", "M", "D", "E", "NP", "blocks", "owners", "heads", "groups", "section"])
def backward(q, k, v, do, level, delta, g_entropy, sums, dk_desc, dv_desc, dk, dv, strides, scale, scales, cap, bias, where, turns, drop,
             seen, counters, n, M, D, E, NP, blocks, owners, heads, groups, section,
             DA: gl.constexpr, EA: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, MASK: gl.constexpr,
             BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr, ENTROPY: gl.constexpr, DROP: gl.constexpr, SCALES: gl.constexpr,
             DESCRIBED: gl.constexpr):
    """A program has ROWS keys of one key head; its query heads come one after the other."""
    gl.static_assert(BM == ROWS, "dK goes to memory through a block of queries")
    K = gl.allocate_shared_memory(k.dtype, [1, 1, ROWS, DA], k.layout)
    V = gl.allocate_shared_memory(v.dtype, [1, 1, ROWS, EA], v.layout)
    Q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, DA], q.layout)
    dO = gl.allocate_shared_memory(do.dtype, [1, 1, BM, EA], do.layout)
    P = gl.allocate_shared_memory(gl.float32, [ROWS, BM], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    dS = gl.allocate_shared_memory(q.dtype, [ROWS, BM], gl.NVMMASharedLayout.get_default_for([ROWS, BM], q.dtype))
    dQ = gl.allocate_shared_memory(gl.float32, [2, BM, PART], sums.layout)
    levels = gl.allocate_shared_memory(gl.float32, [STAGES, BM], level.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [BM], level.layout)
    third = deltas
    if ENTROPY:
        third = gl.allocate_shared_memory(gl.float32, [BM], level.layout)
    k_ready = new_barriers(1, 1).index(0)
    o_ready = new_barriers(1, 1).index(0)
    o_free = new_barriers(1, 2).index(0)
    p_ready = new_barriers(1, 1).index(0)
    s_ready = new_barriers(1, 1).index(0)
    d_ready = new_barriers(2, 1)
    d_free = new_barriers(2, 1)
    q_ready = new_barriers(STAGES, 1)
    q_free = new_barriers(STAGES, 2)
    fence_async_shared()
    described = (q, k, v, do, level, delta, g_entropy, sums, dk_desc, dv_desc)
    X = (Q, K, V, dO, P, dS, dQ)
    barriers = (k_ready, q_ready, q_free, o_ready, o_free, p_ready, s_ready, d_ready, d_free)
    facts = (levels, deltas, third)
    task = Task(scales, where, turns, drop, seen, counters, n, M, D, E, NP, blocks, owners, heads, groups, section)
    given = (described, X, barriers, facts, dk, dv, strides, scale, cap, bias, task)
    gl.warp_specialize([
        (weigh, (given, DA, EA, BM, STAGES, MASK, BIAS, CAP, FAST, DROP, SCALES, DESCRIBED)),
        (slope, (given, DA, EA, BM, STAGES, MASK, BIAS, CAP, ENTROPY, DROP, SCALES, DESCRIBED)),
        (copy, (given, DA, EA, BM, STAGES, MASK, ENTROPY)),
        (add, (given, 0, BM, MASK)),
        (add, (given, 1, BM, MASK)),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])
