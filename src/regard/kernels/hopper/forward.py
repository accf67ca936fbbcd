"""The forward pass on Hopper, in Gluon, with a producer warp and consumer groups: what `portable/forward.py` computes, in its letters and units.

Each consumer group holds 64 rows; while it runs the online softmax of one block, the tensor cores compute O += P V of the block before.
Partial blocks come first, from the last one backwards, then the full ones. LAZY: the row max is that of the first visible block and
mostly stays; a group in which a weight exceeds 2^OUTLIER_BITS stores nothing, and its rows get a retry in the safe loop.
A dim of 96 or 192 is split into two chunks, A and B: the second part of O is a tile of its own, R. Values of 96 dims are one chunk of 128
columns. `docs/kernels/hopper_forward.md` says why.
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

from ...compat.gluon import group_barrier, tma_store, warp_specialize
from ..portable.tile_ops import (
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
from . import configs
from .aggregates import (
    ForwardBarriers,
    ForwardDescriptors,
    ForwardOutputs,
    ForwardParams,
    ForwardSmem,
    KeyBlocks,
    OutputDescriptors,
    RowBlock,
    SoftmaxState,
    ValueBlock,
    traits_of,
)
from .nonfinite import find_unseen, zero_unseen
from .online_softmax import (
    ONE,
    apply_mask,
    beside,
    has_outlier,
    may_hide,
    online_softmax,
    pack_P,
    partial_sums,
    rescale_O,
    row_sums,
    running_top,
    score,
    softmax_fixed_max,
    store_statistics,
    unpack_P,
)
from .register_layouts import mma_layout
from .tile_scheduler import (
    INFO,
    RETRY,
    ROWS,
    TILE,
    advance,
    block_at,
    first_row,
    fixed_max_from,
    group_range,
    key_block_range,
    new_barriers,
    producer,
    read_info,
    read_tile,
    work_tile,
    write_info,
)

producer_registers = gluon.constexpr_function(configs.producer_registers)


@gluon.jit
def flat(X, R: gl.constexpr, C: gl.constexpr):
    """A TMA block [1, 1, R, C] as a matrix [R, C]."""
    return X.reshape([R, C])


@gluon.jit
def masked_logits(S, rows, j, j0, lo, hi, slot, partial, params, TRAITS: gl.constexpr, MASKED: gl.constexpr):
    """Products [ROWS, BN] to logits, −inf where hidden; and with a bias that may hide, which pairs are visible. A block may only be `partial` if MASKED."""
    show = j
    if not TRAITS.FAST:
        S, show = score(S, rows.scale, params.cap, params.bias, rows.bias_at, rows.i, j, j0, params.n, params.M, TRAITS.CAP, TRAITS.BIAS)
    if may_hide(TRAITS.BIAS):
        if MASKED:
            show = show & mask_tile(params.lists, lo, hi, gl.maximum(slot, 0), rows.i, j, TRAITS.MASK) & (slot >= 0)
        S = gl.where(show, S, float("-inf"))
    elif MASKED:
        if partial:
            S = apply_mask(S, params.lists, lo, hi, slot, rows.i, j0, TRAITS.MASK)
    return S, show


@gluon.jit
def clean_values(values, rows, stage, params, G, TRAITS: gl.constexpr, MASKED: gl.constexpr):
    """The index of a block's values after cleaning: their stage, or with a bias the group's own block. They are loaded."""
    V, VB = params.smem.V, params.smem.VB
    at = stage
    if may_hide(TRAITS.BIAS) or (MASKED and TRAITS.MASK != _NONE):
        if values.dirty != 0:
            if may_hide(TRAITS.BIAS):
                at = TRAITS.STAGES + G
            zero_unseen(flat(V.index(stage), TRAITS.BN, TRAITS.EA), flat(V.index(at), TRAITS.BN, TRAITS.EA), values.seen, rows, values.j0, params,
                        TRAITS.EA, TRAITS)
            if TRAITS.EB > 0:
                zero_unseen(flat(VB.index(stage), TRAITS.BN, TRAITS.EB), flat(VB.index(at), TRAITS.BN, TRAITS.EB), values.seen, rows, values.j0, params,
                            TRAITS.EB, TRAITS)
            fence_async_shared()
            group_barrier()
    return at


@gluon.jit
def start_QK(smem, q_buffer, stage, zero, TRAITS: gl.constexpr):
    """Start S = Q Kᵀ."""
    BN: gl.constexpr = TRAITS.BN
    DA: gl.constexpr = TRAITS.DA
    DB: gl.constexpr = TRAITS.DB
    S = warpgroup_mma(flat(smem.Q.index(q_buffer), ROWS, DA), flat(smem.K.index(stage), BN, DA).permute((1, 0)), zero, use_acc=False, is_async=True)
    if DB > 0:
        S = warpgroup_mma(flat(smem.QB.index(q_buffer), ROWS, DB), flat(smem.KB.index(stage), BN, DB).permute((1, 0)), S, is_async=True)
    return S


@gluon.jit
def start_PV(P, smem, at, O, R, TRAITS: gl.constexpr):
    """Start O += P V."""
    P = unpack_P(P, smem.V.dtype, gl.DotOperandLayout(0, O.type.layout, 2))
    O = warpgroup_mma(P, flat(smem.V.index(at), TRAITS.BN, TRAITS.EA), O, is_async=True)
    if TRAITS.EB > 0:
        R = warpgroup_mma(P, flat(smem.VB.index(at), TRAITS.BN, TRAITS.EB), R, is_async=True)
    return O, R


@gluon.jit
def wait_PV(O, R, EB: gl.constexpr):
    """O and R, once their products are done."""
    if EB > 0:
        O, R = warpgroup_mma_wait(0, deps=[O, R])
    else:
        O = warpgroup_mma_wait(0, deps=[O])
    return O, R


@gluon.jit
def mma_one_block(t, partial, O, R, P, softmax, values, stage, phase, rows, zero, params, G, TRAITS: gl.constexpr,
                  MASKED: gl.constexpr, FIXED_MAX: gl.constexpr):
    """One iteration: the softmax of the t-th key block, beside P V of the previous one. FIXED_MAX: m stays, whatever the logits."""
    barriers, lists = params.barriers, params.lists
    m, l, e, top = softmax
    BN: gl.constexpr = TRAITS.BN
    EB: gl.constexpr = TRAITS.EB
    HIDES: gl.constexpr = MASKED or may_hide(TRAITS.BIAS)
    LAZY: gl.constexpr = TRAITS.FAST and TRAITS.PERSISTENT
    values_at = clean_values(values, rows, stage, params, G, TRAITS, MASKED)
    j0 = values.j0
    previous = stage
    stage, phase = advance(stage, phase, TRAITS.STAGES)
    b, slot = block_at(lists, t, rows.key_blocks, G, TRAITS.GROUPS, TRAITS.MASK)
    j = b * BN + gl.arange(0, BN, gl.SliceLayout(0, zero.type.layout))
    mbarrier.wait(barriers.k_ready.index(stage), phase)
    S = start_QK(params.smem, rows.q_buffer, stage, zero, TRAITS)
    O, R = start_PV(P, params.smem, values_at, O, R, TRAITS)
    lo, hi = rows.i, rows.i
    if MASKED:
        j0 = b * BN  # all values of a full block are clean
        lo, hi = row_spans(lists, rows.batch, rows.h, rows.i, params.n, params.M, TRAITS.MASK)  # each time: full blocks need the registers
    S = warpgroup_mma_wait(2 if EB > 0 else 1, deps=[S])
    mbarrier.arrive(barriers.k_free.index(stage))
    OVERLAP: gl.constexpr = TRAITS.GROUPS == 2 or not TRAITS.ENTROPY  # whether the softmax overlaps the group's own product
    if not OVERLAP:
        mbarrier.wait(barriers.v_ready.index(stage), phase)
        O, R = wait_PV(O, R, EB)
    S, show = masked_logits(S, rows, j, b * BN, lo, hi, slot, partial, params, TRAITS, MASKED)
    seen, dirty = find_unseen(show, rows, j0, params, TRAITS, MASKED)
    if FIXED_MAX:
        P, l, e, top = softmax_fixed_max(S, m, l, e, top, rows.unit, TRAITS.ENTROPY)
    else:
        P, m, l, e, a = online_softmax(S, m, l, e, rows.unit, TRAITS.ENTROPY, TRAITS.FAST, HIDES, LAZY)
        if LAZY:
            top = gl.where(beside(a, l) < 1.0, ONE, running_top(top, P))  # a new row max is the largest logit itself
    if OVERLAP:
        mbarrier.wait(barriers.v_ready.index(stage), phase)  # for the next iteration; this loop also keeps ptxas from waiting for O before the softmax
        O, R = wait_PV(O, R, EB)
    mbarrier.arrive(barriers.v_free.index(previous))
    if not FIXED_MAX:
        O = rescale_O(O, a)
        if EB > 0:
            R = rescale_O(R, a)
    P = pack_P(P, rows.drop_keys, j, params.drop, params.smem.V.dtype, TRAITS.DROP)
    return O, R, P, m, l, e, top, seen, dirty, j0, stage, phase


@gluon.jit
def halves(X):
    """The first and the second half of the columns of X [R, C]."""
    R: gl.constexpr = X.shape[0]
    C: gl.constexpr = X.shape[1]
    return X.reshape([R, 2, C // 2]).permute((0, 2, 1)).split()


@gluon.jit
def store_O(O, share, empty, X, row, rows, params, first: gl.constexpr, TRAITS: gl.constexpr):
    """Normalise O [ROWS, C] and store it in the group's Q buffer X, or by pointers to columns `first` … of the output."""
    C: gl.constexpr = O.shape[1]
    OL: gl.constexpr = O.type.layout
    O = O * gl.convert_layout(share, gl.SliceLayout(1, OL))[:, None]
    if TRAITS.MASK != _NONE:
        O = gl.where(gl.convert_layout(empty, gl.SliceLayout(1, OL))[:, None], 0.0, O)  # a row that sees nothing may hold NaN
    O = O.to(X.dtype)
    if TRAITS.TMA_STORE:
        flat(X.index(rows.q_buffer), ROWS, C).store(O)
    else:
        strides = params.strides
        i = row + gl.arange(0, ROWS, gl.SliceLayout(1, OL))
        c = first + gl.arange(0, C, gl.SliceLayout(0, OL))
        at = params.outputs.output + rows.batch.to(gl.int64) * strides[0] + rows.h.to(gl.int64) * strides[1] + i.to(gl.int64)[:, None] * strides[2] + c[None, :]
        gl.store(at, O, mask=(i < params.n)[:, None] & (c < params.E)[None, :])


@gluon.jit
def epilogue(O, R, softmax, i, row, rows, params, descriptors, TRAITS: gl.constexpr):
    """Store the output and the statistics of a group's rows i, which begin at `row`; past the end nothing is stored."""
    outputs, smem = params.outputs, params.smem
    m, l, e, top = softmax
    EA: gl.constexpr = TRAITS.EA
    EB: gl.constexpr = TRAITS.EB
    batch, h, n = rows.batch, rows.h, params.n
    l = row_sums(l, m)
    e = row_sums(e, m)
    kept_factor = 1.0
    if TRAITS.DROP:
        kept_factor = params.drop.factor
    share = l * 0.0 + kept_factor  # [ROWS] by which O is multiplied
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    m_natural = m  # [ROWS] in natural units
    if TRAITS.FAST:
        m_natural = m * LN2
    row_max = m_natural  # [ROWS] the exact one
    if TRAITS.FAST and TRAITS.PERSISTENT:
        above = gl.log2(gl.convert_layout(gl.max(top, 1), m.type.layout).to(gl.float32, bitcast=True))
        row_max = (m + above) * LN2
    denominator = l
    if TRAITS.SINK:
        denominator = l + gl.exp2((gl.load(params.sinks + h) - m_natural) * LOG2E)
    share = share / denominator
    SPLIT: gl.constexpr = TRAITS.TMA_STORE and EA > TRAITS.DA
    TWO: gl.constexpr = EB > 0 or SPLIT
    if SPLIT:  # O has 128 columns, the buffers of Q have 64 and 32
        O, R = halves(O)
        R, _ = halves(R)
    store_O(O, share, empty, smem.Q, row, rows, params, 0, TRAITS)
    if TWO:
        store_O(R, share, empty, smem.QB if TRAITS.TMA_STORE else smem.Q, row, rows, params, EA, TRAITS)
    if TRAITS.TMA_STORE:
        fence_async_shared()
        group_barrier()
        tma_store(descriptors.o, [batch, h, row, 0], smem.Q.index(rows.q_buffer))
        if TWO:
            tma_store(descriptors.ob, [batch, h, row, TRAITS.DA], smem.QB.index(rows.q_buffer))
    at = (batch.to(gl.int64) * params.num_heads + h) * n + i
    ln_l = gl.log2(l) * LN2
    log_row_sum = ln_l + row_max_residual(m, row_max, empty, TRAITS.FAST)
    store_statistics(outputs, at, i < n, row_max, log_row_sum, ln_l - e / l * LN2, empty, params.sinks, h, TRAITS.SINK, TRAITS.ENTROPY)


@gluon.jit
def attend_row_block(tile, stored, q_buffer, q_phase, stage, phase, all_seen, params, descriptors, G, TRAITS: gl.constexpr):
    """A group's ROWS rows of one row block against all key blocks that it visits; and the next tile.

    A function of its own, since Triton generates the code of a loop twice, and that of a function once.
    """
    barriers, lists, n, M, row_blocks, batch_heads = params.barriers, params.lists, params.n, params.M, params.row_blocks, params.batch_heads
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    BN: gl.constexpr = TRAITS.BN
    EB: gl.constexpr = TRAITS.EB
    GROUPS: gl.constexpr = TRAITS.GROUPS
    MASK: gl.constexpr = TRAITS.MASK
    BIAS: gl.constexpr = TRAITS.BIAS
    PERSISTENT: gl.constexpr = TRAITS.PERSISTENT
    LAZY: gl.constexpr = TRAITS.FAST and PERSISTENT
    ONE_LOOP: gl.constexpr = TRAITS.ONE_LOOP  # which asks of each block whether it is partial
    Q_BUFFERS: gl.constexpr = TRAITS.Q_BUFFERS
    SL: gl.constexpr = mma_layout(BN)
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    zero = gl.zeros([ROWS, BN], gl.float32, SL)
    safe = 0
    if PERSISTENT:
        safe, batch, h, first, full, full_end, total, row, start, unmasked = read_tile(params.tile_info, q_buffer * INFO, G)
        key_blocks = KeyBlocks(first, full, full_end, full_end - full, total)
    else:
        block, batch_head = work_tile(tile, row_blocks, batch_heads, params.swizzle)
        batch, h = batch_head // params.num_heads, batch_head % params.num_heads
        key_blocks = KeyBlocks(*key_block_range(lists, batch, h, block, M, BN, MASK))
        row = first_row(block, n, row_blocks, G, GROUPS)
        start, unmasked = group_range(lists, batch, h, row, key_blocks, n, BN, MASK)
    i = row + gl.arange(0, ROWS, SR)  # [ROWS]
    scale = params.scale
    if TRAITS.SCALES:
        scale = gl.load(params.scales + h)
    unit = scale * LOG2E
    bias_at = bias_row_pointers(params.bias, batch, h, i, BIAS)
    keys = (i, i)
    if TRAITS.DROP:
        keys = dropout_row_keys(params.drop, batch, h, params.num_heads, i, n)
    m = gl.full([ROWS], LOWEST, gl.float32, SR)
    l = partial_sums(zero)
    e = l
    top = gl.full([ROWS, 8], ONE, gl.int32, l.type.layout)
    O = gl.zeros([ROWS, TRAITS.EA], gl.float32, mma_layout(TRAITS.EA))
    R = 0
    if EB > 0:
        R = gl.zeros([ROWS, EB], gl.float32, mma_layout(EB))

    count = gl.maximum(key_blocks.total, 1)
    begin = gl.minimum(start, count - 1)
    if not PERSISTENT:
        mbarrier.wait(q_ready.index(0), 0)
    for _ in range(begin):  # skip the blocks that only other groups see
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.arrive(k_free.index(stage))
        mbarrier.wait(v_ready.index(stage), phase)
        mbarrier.arrive(v_free.index(stage))
        stage, phase = advance(stage, phase, TRAITS.STAGES)
    b, slot = block_at(lists, begin, key_blocks, G, GROUPS, MASK)
    j0 = b * BN
    j = j0 + gl.arange(0, BN, gl.SliceLayout(0, SL))
    rows = RowBlock(i, q_buffer * GROUPS + G, batch, h, key_blocks, bias_at, keys, scale, unit, all_seen)
    mbarrier.wait(k_ready.index(stage), phase)
    S = start_QK(params.smem, rows.q_buffer, stage, zero, TRAITS)
    lo, hi = row_spans(lists, batch, h, i, n, M, MASK)
    hi = gl.where(key_blocks.total > 0, hi, 0)
    S = warpgroup_mma_wait(0, deps=[S])
    mbarrier.arrive(k_free.index(stage))
    S, show = masked_logits(S, rows, j, j0, lo, hi, slot, begin < unmasked, params, TRAITS, True)
    seen, dirty = find_unseen(show, rows, j0, params, TRAITS, True)
    P, m, l, e, a = online_softmax(S, m, l, e, unit, TRAITS.ENTROPY, TRAITS.FAST, True, False)
    P = pack_P(P, keys, j, params.drop, params.smem.V.dtype, TRAITS.DROP)
    mbarrier.wait(v_ready.index(stage), phase)
    if Q_BUFFERS == 2:
        if stored:  # by now TMA has read the previous rows from their Q buffer
            tma.store_wait(0)
            mbarrier.arrive(q_free.index(q_buffer ^ 1))

    fixed = gl.maximum(begin + 1, unmasked)
    if LAZY:
        fixed = fixed_max_from(fixed, count, key_blocks.num_full, key_blocks.total, safe)
    if ONE_LOOP:
        fixed = count
    if LAZY or MASK != _NONE:  # the masked loop is the safe one, too, so that there is less to compile
        for t in range(begin + 1, fixed):
            partial = True
            if LAZY or ONE_LOOP:
                partial = t < unmasked
            O, R, P, m, l, e, top, seen, dirty, j0, stage, phase = mma_one_block(
                t, partial, O, R, P, SoftmaxState(m, l, e, top), ValueBlock(seen, dirty, j0), stage, phase, rows, zero, params, G, TRAITS,
                MASK != _NONE, False)  # without a mask, only the first block can hide something
    if not may_hide(BIAS):  # the values of full blocks are clean
        clean_values(ValueBlock(seen, dirty, j0), rows, stage, params, G, TRAITS, True)
    if not ONE_LOOP:
        for t in range(fixed, count):
            O, R, P, m, l, e, top, seen, dirty, j0, stage, phase = mma_one_block(
                t, False, O, R, P, SoftmaxState(m, l, e, top), ValueBlock(seen, dirty, j0), stage, phase, rows, zero, params, G, TRAITS, False, LAZY)

    values_at = clean_values(ValueBlock(seen, dirty, j0), rows, stage, params, G, TRAITS, False)
    O, R = start_PV(P, params.smem, values_at, O, R, TRAITS)
    O, R = wait_PV(O, R, EB)
    mbarrier.arrive(v_free.index(stage))
    stage, phase = advance(stage, phase, TRAITS.STAGES)
    if LAZY:
        retry = gl.where(safe > 0, 0, has_outlier(top))
        write_info(params.tile_info, q_buffer * INFO + RETRY + G, retry, 4)
        row = gl.where(retry > 0, row_blocks * GROUPS * ROWS, row)  # past the end: nothing is stored before a retry
        i = row + gl.arange(0, ROWS, SR)
    epilogue(O, R, SoftmaxState(m, l, e, top), i, row, rows, params, descriptors, TRAITS)
    if PERSISTENT:
        if Q_BUFFERS == 1:  # the next queries go where the output has been read from
            if TRAITS.TMA_STORE:
                tma.store_wait(0)
            else:
                group_barrier()
            mbarrier.arrive(q_free.index(0))
        q_buffer, q_phase = advance(q_buffer, q_phase, Q_BUFFERS)
        mbarrier.wait(q_ready.index(q_buffer), q_phase)
        tile = read_info(params.tile_info, q_buffer * INFO + TILE, 4)
        if Q_BUFFERS == 2:
            if tile == row_blocks * batch_heads:  # no tile: the producer waits to hear whether the last rows need a retry
                tma.store_wait(0)
                mbarrier.arrive(q_free.index(q_buffer ^ 1))
                q_buffer, q_phase = advance(q_buffer, q_phase, Q_BUFFERS)
                mbarrier.wait(q_ready.index(q_buffer), q_phase)
                tile = read_info(params.tile_info, q_buffer * INFO + TILE, 4)
    else:
        tile = row_blocks * batch_heads
    return tile, q_buffer, q_phase, stage, phase


@gluon.jit
def consumer(params, descriptors, G, TRAITS: gl.constexpr):
    """Consumer group G: its ROWS rows of each row block that the program takes."""
    stage, phase = 0, 0
    q_buffer, q_phase = 0, 0
    tile = gl.program_id(0)
    all_seen = 1
    if TRAITS.MASK != _NONE and not may_hide(TRAITS.BIAS):
        all_seen = gl.load(params.lists.all_keys_visible)
    stored = False  # whether there is a previous row block
    if TRAITS.PERSISTENT:
        mbarrier.wait(params.barriers.q_ready.index(0), 0)
    while tile < params.row_blocks * params.batch_heads:
        tile, q_buffer, q_phase, stage, phase = attend_row_block(
            tile, stored, q_buffer, q_phase, stage, phase, all_seen, params, descriptors, G, TRAITS)
        stored = True
    if TRAITS.TMA_STORE:
        tma.store_wait(0)


@gluon.jit
def group(params, descriptors, G: gl.constexpr, TRAITS: gl.constexpr):
    """The partition of consumer group G. `consumer` takes G as a number of the program, so that its code is generated once for all groups."""
    consumer(params, descriptors, gl.to_tensor(G), TRAITS)


@gluon.jit(do_not_specialize=["lists", "drop", "n", "M", "E", "row_blocks", "batch_heads", "num_heads", "heads_per_kv", "swizzle"])
def forward(q, qb, k, kb, v, vb, o, ob, output, lse, row_max, log_row_sum, entropy, strides, scale, scales, cap, sinks, bias, lists, drop,
            n, M, E, row_blocks, batch_heads, num_heads, heads_per_kv, swizzle, counters,
            DA: gl.constexpr, DB: gl.constexpr, EA: gl.constexpr, EB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
            GROUPS: gl.constexpr, REGISTERS: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr,
            ENTROPY: gl.constexpr, DROP: gl.constexpr, SINK: gl.constexpr, SCALES: gl.constexpr,
            PERSISTENT: gl.constexpr, Q_BUFFERS: gl.constexpr, ONE_LOOP: gl.constexpr, TMA_STORE: gl.constexpr):
    """A program takes one row block of one head, or in a persistent grid one after the other."""
    CLEANED_BLOCKS: gl.constexpr = GROUPS if may_hide(BIAS) else 0
    Q = gl.allocate_shared_memory(q.dtype, [Q_BUFFERS * GROUPS, 1, 1, ROWS, DA], q.layout)
    K = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, DA], k.layout)
    V = gl.allocate_shared_memory(v.dtype, [STAGES + CLEANED_BLOCKS, 1, 1, BN, EA], v.layout)
    QB = Q
    KB = K
    VB = V
    if DB > 0:
        QB = gl.allocate_shared_memory(q.dtype, [Q_BUFFERS * GROUPS, 1, 1, ROWS, DB], qb.layout)
        KB = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, DB], kb.layout)
    if EB > 0:
        VB = gl.allocate_shared_memory(v.dtype, [STAGES + CLEANED_BLOCKS, 1, 1, BN, EB], vb.layout)
    q_ready = new_barriers(Q_BUFFERS, 1)
    q_free = new_barriers(Q_BUFFERS, GROUPS)
    k_ready = new_barriers(STAGES, 1)
    k_free = new_barriers(STAGES, GROUPS)
    v_ready = new_barriers(STAGES, 1)
    v_free = new_barriers(STAGES, GROUPS)
    tile_info = gl.allocate_shared_memory(gl.int32, [Q_BUFFERS * INFO, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    inputs, stored = ForwardDescriptors(q, qb, k, kb, v, vb), OutputDescriptors(o, ob)
    params = ForwardParams(
        ForwardSmem(Q, QB, K, KB, V, VB), ForwardBarriers(q_ready, q_free, k_ready, k_free, v_ready, v_free),
        ForwardOutputs(output, lse, row_max, log_row_sum, entropy), strides, scale, scales, cap, sinks, bias, lists, drop, n, M, E,
        row_blocks, batch_heads, num_heads, heads_per_kv, swizzle, counters, tile_info)
    TRAITS: gl.constexpr = traits_of(
        DA=DA, DB=DB, EA=EA, EB=EB, BN=BN, STAGES=STAGES, GROUPS=GROUPS, MASK=MASK, BIAS=BIAS, CAP=CAP, FAST=FAST, ENTROPY=ENTROPY,
        DROP=DROP, SINK=SINK, SCALES=SCALES, PERSISTENT=PERSISTENT,
        Q_BUFFERS=Q_BUFFERS, ONE_LOOP=ONE_LOOP, TMA_STORE=TMA_STORE)
    PRODUCER: gl.constexpr = producer_registers(GROUPS, REGISTERS)
    if GROUPS == 2:
        warp_specialize([
            (group, (params, stored, 0, TRAITS)),
            (group, (params, stored, 1, TRAITS)),
            (producer, (params, inputs, TRAITS)),
        ], [4, 1], [REGISTERS, PRODUCER])
    else:
        warp_specialize([
            (group, (params, stored, 0, TRAITS)),
            (group, (params, stored, 1, TRAITS)),
            (group, (params, stored, 2, TRAITS)),
            (producer, (params, inputs, TRAITS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER])
