"""The forward pass on Hopper, in Gluon: what `kernels/forward.py` computes, with a copying warp and warp groups that compute.

One warp copies blocks of K and V into shared memory. Each warp group holds 64 rows; while it folds the logits of one
block into m, l, e, the tensor cores multiply O += P V of the block before. Blocks that hide something come first, from the
last one backwards, then those that all rows see whole: so of a causal mask a group masks the block that it begins with,
which has no P V beside it. Letters and units are the portable kernel's.

In a persistent grid, where logits are plain products (LEVELLED), m is a level that mostly stays: the largest logit of the first
block in which a row sees a key. Full blocks but the first are folded blindly; a group in which a weight came above 2^MUCH leaves
its rows, and they come again, with care. Where that happens often, all rows of the head are met so.

A tensor has power-of-two sides here. So a dim of 96 or 192 is taken in two chunks, A and B: S is the sum of two products,
and the second half of O is a tile of its own, R. B is 0 where one chunk is enough.
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

from ..portable.tile_ops import (
    _BIAS_NONE,
    _NONE,
    LN2,
    LOG2E,
    LOWEST,
    bias_row_pointers,
    dropout_row_keys,
    mask_tile,
    row_max_residual,
    row_spans,
)
from .aggregates import Given, RowBlock, kind_of
from .configs import copying
from .online_softmax import (
    ONE_BITS,
    beside,
    fold,
    higher,
    leaped,
    operand,
    packed,
    parts,
    scored,
    shrink,
    summed,
    veil,
    weigh,
)
from .register_layouts import product
from .tile_scheduler import (
    LEFT,
    PLAN,
    ROWS,
    advance,
    blind_from,
    block_at,
    copy,
    new_barriers,
    note,
    place,
    row_of,
    seats_of,
    share_of,
    told,
    walk_of,
)

PIECE = gl.constexpr(16)  # values that are cleaned together
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copying = gluon.constexpr_function(copying)


@gluon.jit
def flat(X, R: gl.constexpr, C: gl.constexpr):
    """A block of the copy engine, [1, 1, R, C], as a matrix."""
    return X.reshape([R, C])


@gluon.jit
def judge(S, rows, j, j0, lo, hi, slot, given, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Products [ROWS, BN] to logits, −inf where hidden; and with a bias, which pairs show."""
    show = j
    if not KIND.FAST:
        S, show = scored(S, rows.scale, given.cap, given.bias, rows.at, rows.i, j, given.n, given.M, KIND.CAP, KIND.BIAS)
    if KIND.BIAS != _BIAS_NONE:
        if MASKED:
            show = show & mask_tile(given.where, lo, hi, gl.maximum(slot, 0), rows.i, j, KIND.MASK) & (slot >= 0)
        S = gl.where(show, S, float("-inf"))
    elif MASKED:
        S = veil(S, given.where, lo, hi, slot, rows.i, j0, KIND.MASK)
    return S, show


@gluon.jit
def seen_at(where, rows):
    """Where it is told which keys of the rows' head some row sees."""
    return (rows.item // gl.load(where.inner)).to(gl.int64) * where.seen_item + rows.h * where.seen_head


@gluon.jit
def unseen(show, rows, j0, given, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Whether some key of a block is one that no row may attend, whose value may be NaN; with a bias, of the group's rows."""
    seen = 0
    dirty = 0
    if KIND.BIAS != _BIAS_NONE:
        seen = gl.max(show.to(gl.int32), 0)
        dirty = 1 - gl.min(seen, 0)
    elif MASKED and KIND.MASK != _NONE:
        if rows.spotless == 0:
            j = j0 + gl.arange(0, KIND.BN, gl.BlockedLayout([KIND.BN // 32], [32], [4], [0]))  # each warp has them all
            at = seen_at(given.where, rows)
            dirty = (gl.min(gl.load(given.where.seen + at + j, mask=j < given.M, other=1).to(gl.int32), 0) == 0).to(gl.int32)
    return seen, dirty


@gluon.jit
def clean(X, into, seen, rows, j0, given, C: gl.constexpr, KIND: gl.constexpr):
    """Values X [BN, C] with zeros for unseen keys: into the group's own block with a bias, else where they are.

    Without a bias every group writes the same numbers to the same place, and reads them after its own writes.
    """
    VL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    if KIND.BIAS != _BIAS_NONE:
        into.store(gl.where((gl.convert_layout(seen, gl.SliceLayout(1, VL)) > 0)[:, None], X.load(VL), 0.0))
    else:
        at = seen_at(given.where, rows)
        for r in gl.static_range(0, KIND.BN, PIECE):
            j = j0 + r + gl.arange(0, PIECE, gl.SliceLayout(1, VL))
            part = X.slice(r, PIECE)
            part.store(gl.where((gl.load(given.where.seen + at + j, mask=j < given.M, other=1) != 0)[:, None], part.load(VL), 0.0))


@gluon.jit
def tidy(seen, dirty, rows, j0, stage, given, G: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Where the values of a block lie, clean: its stage, or with a bias the group's own block. They are there."""
    Q, QB, K, KB, V, VB = given.X
    at = stage
    if KIND.BIAS != _BIAS_NONE or (MASKED and KIND.MASK != _NONE):
        if dirty != 0:
            if KIND.BIAS != _BIAS_NONE:
                at = KIND.STAGES + G
            clean(flat(V.index(stage), KIND.BN, KIND.EA), flat(V.index(at), KIND.BN, KIND.EA), seen, rows, j0, given, KIND.EA, KIND)
            if KIND.EB > 0:
                clean(flat(VB.index(stage), KIND.BN, KIND.EB), flat(VB.index(at), KIND.BN, KIND.EB), seen, rows, j0, given, KIND.EB, KIND)
            fence_async_shared()
            group_barrier()
    return at


@gluon.jit
def products(X, mine, stage, none, KIND: gl.constexpr):
    """S = Q Kᵀ, begun."""
    Q, QB, K, KB, V, VB = X
    BN: gl.constexpr = KIND.BN
    DA: gl.constexpr = KIND.DA
    DB: gl.constexpr = KIND.DB
    S = warpgroup_mma(flat(Q.index(mine), ROWS, DA), flat(K.index(stage), BN, DA).permute((1, 0)), none, use_acc=False, is_async=True)
    if DB > 0:
        S = warpgroup_mma(flat(QB.index(mine), ROWS, DB), flat(KB.index(stage), BN, DB).permute((1, 0)), S, is_async=True)
    return S


@gluon.jit
def averages(P, X, at, O, R, KIND: gl.constexpr):
    """O += P V, begun."""
    Q, QB, K, KB, V, VB = X
    P = operand(P, V.dtype, gl.DotOperandLayout(0, O.type.layout, 2))
    O = warpgroup_mma(P, flat(V.index(at), KIND.BN, KIND.EA), O, is_async=True)
    if KIND.EB > 0:
        R = warpgroup_mma(P, flat(VB.index(at), KIND.BN, KIND.EB), R, is_async=True)
    return O, R


@gluon.jit
def ended(O, R, EB: gl.constexpr):
    """O and R, when their products are done."""
    if EB > 0:
        O, R = warpgroup_mma_wait(0, deps=[O, R])
    else:
        O = warpgroup_mma_wait(0, deps=[O])
    return O, R


@gluon.jit
def meet(t, O, R, P, m, l, e, top, seen, dirty, j0, stage, parity, rows, none, given, G: gl.constexpr, KIND: gl.constexpr,
         MASKED: gl.constexpr, BLIND: gl.constexpr):
    """The logits of the t-th block, while the values of the one before it are multiplied; BLIND: m stays, whatever they are."""
    q_ready, q_free, k_ready, k_free, v_ready, v_free = given.barriers
    where = given.where
    BN: gl.constexpr = KIND.BN
    EB: gl.constexpr = KIND.EB
    HIDES: gl.constexpr = MASKED or KIND.BIAS != _BIAS_NONE
    LEVELLED: gl.constexpr = KIND.FAST and KIND.PERSISTENT
    clean_at = tidy(seen, dirty, rows, j0, stage, given, G, KIND, MASKED)
    before = stage
    stage, parity = advance(stage, parity, KIND.STAGES)
    b, slot = block_at(where, t, *rows.met_by, G, KIND.GROUPS, KIND.MASK)
    j = b * BN + gl.arange(0, BN, gl.SliceLayout(0, none.type.layout))
    mbarrier.wait(k_ready.index(stage), parity)
    S = products(given.X, rows.mine, stage, none, KIND)
    O, R = averages(P, given.X, clean_at, O, R, KIND)
    lo, hi = rows.i, rows.i
    if MASKED:
        j0 = b * BN  # of a full block every value is clean
        lo, hi = row_spans(where, rows.item, rows.h, rows.i, given.n, given.M, KIND.MASK)  # each time, so that they take no registers in full blocks
    S = warpgroup_mma_wait(2 if EB > 0 else 1, deps=[S])
    mbarrier.arrive(k_free.index(stage))
    BESIDE: gl.constexpr = KIND.GROUPS == 2 or not KIND.ENTROPY  # whether the fold runs beside the group's own product
    if not BESIDE:
        mbarrier.wait(v_ready.index(stage), parity)
        O, R = ended(O, R, EB)
    S, show = judge(S, rows, j, b * BN, lo, hi, slot, given, KIND, MASKED)
    seen, dirty = unseen(show, rows, j0, given, KIND, MASKED)
    if BLIND:
        P, l, e, top = weigh(S, m, l, e, top, rows.unit, KIND.ENTROPY)
    else:
        P, m, l, e, a = fold(S, m, l, e, rows.unit, KIND.ENTROPY, KIND.FAST, HIDES, LEVELLED)
        if LEVELLED:
            top = gl.where(beside(a, l) < 1.0, ONE_BITS, higher(top, P))  # a new level is the largest logit itself
    if BESIDE:
        mbarrier.wait(v_ready.index(stage), parity)  # for the next turn; a loop here also keeps the assembler from waiting for O before the fold
        O, R = ended(O, R, EB)
    mbarrier.arrive(v_free.index(before))
    if not BLIND:
        O = shrink(O, a)
        if EB > 0:
            R = shrink(R, a)
    P = packed(P, rows.keys, j, given.drop, given.X[4].dtype, KIND.DROP)
    return O, R, P, m, l, e, top, seen, dirty, j0, stage, parity


@gluon.jit
def put(O, share, empty, X, row, rows, given, first: gl.constexpr, KIND: gl.constexpr):
    """O [ROWS, C], divided, into the place X that the group's queries had, or by pointers to columns `first` … of the output."""
    C: gl.constexpr = O.shape[1]
    OL: gl.constexpr = O.type.layout
    O = O * gl.convert_layout(share, gl.SliceLayout(1, OL))[:, None]
    if KIND.MASK != _NONE:
        O = gl.where(gl.convert_layout(empty, gl.SliceLayout(1, OL))[:, None], 0.0, O)  # what was met for nothing may hold NaN
    O = O.to(X.dtype)
    if KIND.DESCRIBED:
        flat(X.index(rows.mine), ROWS, C).store(O)
    else:
        strides = given.strides
        i = row + gl.arange(0, ROWS, gl.SliceLayout(1, OL))
        c = first + gl.arange(0, C, gl.SliceLayout(0, OL))
        at = given.out[0] + rows.item.to(gl.int64) * strides[0] + rows.h.to(gl.int64) * strides[1] + i.to(gl.int64)[:, None] * strides[2] + c[None, :]
        gl.store(at, O, mask=(i < given.n)[:, None] & (c < given.E)[None, :])


@gluon.jit
def write(O, R, m, l, e, top, i, row, rows, given, KIND: gl.constexpr):
    """The output of a group's rows, and what is told of each row; i are the rows from `row` on, beyond the last if none is written."""
    output, lse, row_max, log_row_sum, entropy = given.out
    X = given.X
    EA: gl.constexpr = KIND.EA
    EB: gl.constexpr = KIND.EB
    item, h, n = rows.item, rows.h, given.n
    l = summed(l, m)
    e = summed(e, m)
    kept_factor = 1.0
    if KIND.DROP:
        kept_factor = given.drop.factor
    share = l * 0.0 + kept_factor  # [ROWS] by which O is multiplied
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    level = m  # [ROWS] in natural units
    if KIND.FAST:
        level = m * LN2
    natural = level  # [ROWS] the largest logit
    if KIND.FAST and KIND.PERSISTENT:
        above = gl.log2(gl.convert_layout(gl.max(top, 1), m.type.layout).to(gl.float32, bitcast=True))
        natural = (m + above) * LN2
    whole = l
    if KIND.SINK:
        whole = l + gl.exp2((gl.load(given.sinks + h) - level) * LOG2E)  # the sink's share of the denominator
    share = share / whole
    put(O, share, empty, X[0], row, rows, given, 0, KIND)
    if EB > 0:
        put(R, share, empty, X[1] if KIND.DESCRIBED else X[0], row, rows, given, EA, KIND)
    if KIND.DESCRIBED:
        fence_async_shared()
        group_barrier()
        tma_store(given.described[6], [item, h, row, 0], X[0].index(rows.mine))
        if EB > 0:
            tma_store(given.described[7], [item, h, row, EA], X[1].index(rows.mine))
    at = (item.to(gl.int64) * given.heads + h) * n + i
    ln_l = gl.log2(l) * LN2
    rest = ln_l + row_max_residual(m, natural, empty, KIND.FAST)
    gl.store(lse + at, gl.where(empty, float("-inf"), natural + rest), mask=i < n)
    gl.store(row_max + at, gl.where(empty, float("-inf"), natural), mask=i < n)
    gl.store(log_row_sum + at, rest, mask=i < n)
    if KIND.ENTROPY:
        gl.store(entropy + at, ln_l - e / l * LN2, mask=i < n)


@gluon.jit
def compute(given, G: gl.constexpr, KIND: gl.constexpr):
    """A warp group: its ROWS rows of a block against all keys that the block meets."""
    q_ready, q_free, k_ready, k_free, v_ready, v_free = given.barriers
    where, n, M, blocks, owners, heads, plan = given.where, given.n, given.M, given.blocks, given.owners, given.heads, given.plan
    BN: gl.constexpr = KIND.BN
    EB: gl.constexpr = KIND.EB
    STAGES: gl.constexpr = KIND.STAGES
    GROUPS: gl.constexpr = KIND.GROUPS
    MASK: gl.constexpr = KIND.MASK
    BIAS: gl.constexpr = KIND.BIAS
    PERSISTENT: gl.constexpr = KIND.PERSISTENT
    LEVELLED: gl.constexpr = KIND.FAST and PERSISTENT
    SL: gl.constexpr = product(BN)
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    none = gl.zeros([ROWS, BN], gl.float32, SL)
    stage = 0
    parity = 0
    q_stage = 0
    q_parity = 0
    QS: gl.constexpr = 2 if PERSISTENT else 1
    tile = gl.program_id(0)
    spotless = 1
    if MASK != _NONE and BIAS == _BIAS_NONE:
        spotless = gl.load(where.spotless)
    begun = False
    if PERSISTENT:
        mbarrier.wait(q_ready.index(0), 0)
    while tile < blocks * owners:
        careful = 0
        if PERSISTENT:
            careful, item, h, first, full, until, total, row, start, entire = seats_of(plan, q_stage * PLAN, G)
            whole = until - full
        else:
            block, own = place(tile, blocks, owners, given.section)
            item, h = own // heads, own % heads
            first, full, until, whole, total = walk_of(where, item, h, block, M, BN, MASK)
            row = row_of(block, n, blocks, G, GROUPS)
            start, entire = share_of(where, item, h, row, first, full, whole, total, n, BN, MASK)
        i = row + gl.arange(0, ROWS, SR)  # [ROWS]
        scale = given.scale
        if KIND.SCALES:
            scale = gl.load(given.scales + h)
        unit = scale * LOG2E
        at = bias_row_pointers(given.bias, item, h, i, BIAS)
        keys = (i, i)
        if KIND.DROP:
            keys = dropout_row_keys(given.drop, item, h, heads, i, n)
        met_by = (first, full, until, whole, total)
        m = gl.full([ROWS], LOWEST, gl.float32, SR)
        l = parts(none)  # zeros
        e = l
        top = gl.full([ROWS, 8], ONE_BITS, gl.int32, l.type.layout)  # the largest weights, told from m
        O = gl.zeros([ROWS, KIND.EA], gl.float32, product(KIND.EA))
        R = 0
        if EB > 0:
            R = gl.zeros([ROWS, EB], gl.float32, product(EB))

        count = gl.maximum(total, 1)
        begin = gl.minimum(start, count - 1)
        if not PERSISTENT:
            mbarrier.wait(q_ready.index(0), 0)
        for _ in range(begin):  # what the rows of other groups see alone
            mbarrier.wait(k_ready.index(stage), parity)
            mbarrier.arrive(k_free.index(stage))
            mbarrier.wait(v_ready.index(stage), parity)
            mbarrier.arrive(v_free.index(stage))
            stage, parity = advance(stage, parity, STAGES)
        b, slot = block_at(where, begin, *met_by, G, GROUPS, MASK)
        j0 = b * BN
        j = j0 + gl.arange(0, BN, gl.SliceLayout(0, SL))
        rows = RowBlock(i, q_stage * GROUPS + G, item, h, met_by, at, keys, scale, unit, spotless)
        mbarrier.wait(k_ready.index(stage), parity)
        S = products(given.X, rows.mine, stage, none, KIND)
        lo, hi = row_spans(where, item, h, i, n, M, MASK)
        hi = gl.where(total > 0, hi, 0)
        S = warpgroup_mma_wait(0, deps=[S])
        mbarrier.arrive(k_free.index(stage))
        S, show = judge(S, rows, j, j0, lo, hi, slot, given, KIND, BIAS != _BIAS_NONE)
        if BIAS == _BIAS_NONE:
            if begin < entire:
                S = veil(S, where, lo, hi, slot, i, j0, MASK)
        seen, dirty = unseen(show, rows, j0, given, KIND, True)
        P, m, l, e, a = fold(S, m, l, e, unit, KIND.ENTROPY, KIND.FAST, True, False)
        P = packed(P, keys, j, given.drop, given.X[4].dtype, KIND.DROP)
        mbarrier.wait(v_ready.index(stage), parity)
        if PERSISTENT:
            if begun:  # by now the rows before have been written from where their queries were
                tma.store_wait(0)
                mbarrier.arrive(q_free.index(q_stage ^ 1))

        if MASK != _NONE:  # without a mask the first block alone may hide something
            for t in range(begin + 1, entire):
                O, R, P, m, l, e, top, seen, dirty, j0, stage, parity = meet(
                    t, O, R, P, m, l, e, top, seen, dirty, j0, stage, parity, rows, none, given, G, KIND, True, False)
        if BIAS == _BIAS_NONE:  # the values of full blocks are clean
            tidy(seen, dirty, rows, j0, stage, given, G, KIND, True)
        clear = gl.maximum(begin + 1, entire)  # the first block that hides nothing
        blind = count
        if LEVELLED:
            blind = blind_from(clear, count, whole, total, careful)
        for t in range(clear, blind):
            O, R, P, m, l, e, top, seen, dirty, j0, stage, parity = meet(
                t, O, R, P, m, l, e, top, seen, dirty, j0, stage, parity, rows, none, given, G, KIND, False, False)
        if LEVELLED:
            for t in range(blind, count):
                O, R, P, m, l, e, top, seen, dirty, j0, stage, parity = meet(
                    t, O, R, P, m, l, e, top, seen, dirty, j0, stage, parity, rows, none, given, G, KIND, False, True)

        clean_at = tidy(seen, dirty, rows, j0, stage, given, G, KIND, False)
        O, R = averages(P, given.X, clean_at, O, R, KIND)
        O, R = ended(O, R, EB)
        mbarrier.arrive(v_free.index(stage))
        stage, parity = advance(stage, parity, STAGES)
        if LEVELLED:
            left = gl.where(careful > 0, 0, leaped(top))
            note(plan, q_stage * PLAN + LEFT + G, left, 4)
            row = gl.where(left > 0, blocks * GROUPS * ROWS, row)  # nothing is written of rows that come again
            i = row + gl.arange(0, ROWS, SR)
        write(O, R, m, l, e, top, i, row, rows, given, KIND)
        begun = True
        if PERSISTENT:
            q_stage, q_parity = advance(q_stage, q_parity, QS)
            mbarrier.wait(q_ready.index(q_stage), q_parity)
            tile = told(plan, q_stage * PLAN, 4)
            if tile == blocks * owners:  # nothing to do: the copying warp waits for what was left of the last rows
                tma.store_wait(0)
                mbarrier.arrive(q_free.index(q_stage ^ 1))
                q_stage, q_parity = advance(q_stage, q_parity, QS)
                mbarrier.wait(q_ready.index(q_stage), q_parity)
                tile = told(plan, q_stage * PLAN, 4)
        else:
            tile = blocks * owners
    if KIND.DESCRIBED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["where", "drop", "n", "M", "E", "blocks", "owners", "heads", "groups", "section"])
def forward(q, qb, k, kb, v, vb, o, ob, output, lse, row_max, log_row_sum, entropy, strides, scale, scales, cap, sinks, bias, where, drop,
            n, M, E, blocks, owners, heads, groups, section, counter,
            DA: gl.constexpr, DB: gl.constexpr, EA: gl.constexpr, EB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
            GROUPS: gl.constexpr, REGISTERS: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr,
            ENTROPY: gl.constexpr, DROP: gl.constexpr, SINK: gl.constexpr, SCALES: gl.constexpr,
            PERSISTENT: gl.constexpr, DESCRIBED: gl.constexpr):
    """A program has one block of rows of one head, or in a persistent grid one after the other."""
    OWN: gl.constexpr = GROUPS if BIAS != _BIAS_NONE else 0  # blocks of cleaned values
    QS: gl.constexpr = 2 if PERSISTENT else 1  # blocks of rows in flight
    Q = gl.allocate_shared_memory(q.dtype, [QS * GROUPS, 1, 1, ROWS, DA], q.layout)
    K = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, DA], k.layout)
    V = gl.allocate_shared_memory(v.dtype, [STAGES + OWN, 1, 1, BN, EA], v.layout)
    QB = Q
    KB = K
    VB = V
    if DB > 0:
        QB = gl.allocate_shared_memory(q.dtype, [QS * GROUPS, 1, 1, ROWS, DB], qb.layout)
        KB = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, DB], kb.layout)
    if EB > 0:
        VB = gl.allocate_shared_memory(v.dtype, [STAGES + OWN, 1, 1, BN, EB], vb.layout)
    q_ready = new_barriers(QS, 1)
    q_free = new_barriers(QS, GROUPS)
    k_ready = new_barriers(STAGES, 1)
    k_free = new_barriers(STAGES, GROUPS)
    v_ready = new_barriers(STAGES, 1)
    v_free = new_barriers(STAGES, GROUPS)
    plan = gl.allocate_shared_memory(gl.int32, [QS * PLAN, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    described = (q, qb, k, kb, v, vb, o, ob)
    X = (Q, QB, K, KB, V, VB)
    barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
    out = (output, lse, row_max, log_row_sum, entropy)
    given = Given(described, X, barriers, out, strides, scale, scales, cap, sinks, bias, where, drop, n, M, E, blocks, owners, heads, groups, section,
                  counter, plan)
    KIND: gl.constexpr = kind_of(
        DA=DA, DB=DB, EA=EA, EB=EB, BN=BN, STAGES=STAGES, GROUPS=GROUPS, MASK=MASK, BIAS=BIAS, CAP=CAP, FAST=FAST, ENTROPY=ENTROPY,
        DROP=DROP, SINK=SINK, SCALES=SCALES, PERSISTENT=PERSISTENT, DESCRIBED=DESCRIBED)
    COPYING: gl.constexpr = _copying(GROUPS, REGISTERS)
    if GROUPS == 2:
        gl.warp_specialize([
            (compute, (given, 0, KIND)),
            (compute, (given, 1, KIND)),
            (copy, (given, KIND)),
        ], [4, 1], [REGISTERS, COPYING])
    else:
        gl.warp_specialize([
            (compute, (given, 0, KIND)),
            (compute, (given, 1, KIND)),
            (compute, (given, 2, KIND)),
            (copy, (given, KIND)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, COPYING])
