"""The tile scheduler of the Hopper backward: the row blocks that a key block visits, its position in dQ's order, its mask and bias.

And the producer warp, which says by the tile info which key block a program takes next.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...compat.gluon import tma_load
from ..portable.tile_ops import (
    _BIAS_ALIBI,
    _BIAS_TENSOR,
    _BITS,
    _NONE,
    _SPANS,
    bias_row_pointers,
    block_list_start,
    mask_item,
)
from . import ptx
from .aggregates import KeyTile
from .nonfinite import clean_queries, some_empty, some_unseen
from .online_softmax import MASK_BIT
from .register_layouts import transposed_layout
from .tile_scheduler import BROADCAST, COUNT, ROWS, read_info, work_tile, write_info

GROUPS = gl.constexpr(2)  # consumer groups, each with ROWS keys
TILE_INFO = gl.constexpr(9)  # numbers in the tile info
INFO_TILE, INFO_FIRST, INFO_COUNT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # the tile, and its `row_block_range`
INFO_GROUP = gl.constexpr(3)  # from here on three numbers per group: its `common_rows`, and `some_unseen`

MASK_SPAN = gl.constexpr(ptx.MASK_SPAN)
NO_ROW = gl.constexpr(2**31 - 1)  # the first row of an empty range


@gluon.constexpr_function
def bias_load(dtype):
    """The PTX that loads a number of a bias."""
    return ptx.LOAD_BIAS[str(dtype)]


@gluon.jit
def buffer_and_phase(visit, BUFFERS: gl.constexpr):
    """The buffer of a visit, and the phase of its barriers. A wait for visit −1, before the first, returns at once."""
    SHIFT: gl.constexpr = BUFFERS.bit_length() - 1
    gl.static_assert(BUFFERS == 1 << SHIFT, "BUFFERS must be a power of two")
    return visit & (BUFFERS - 1), visit >> SHIFT & 1


@gluon.jit
def unknown_zero(visit, params):
    """0, as a number that the compiler does not know.

    An address in shared memory that is the same in each visit is computed before the loop, and spilled. With this number in it, it
    is computed in each visit, for which no register is kept.
    """
    return visit + params.n >> 31


@gluon.jit
def row_block_range(params, batch, h, block, BM: gl.constexpr, MASK: gl.constexpr):
    """The row blocks that a key block visits: the first one (with bits, its place in `dq_order.entry`), and how many. Visits begin at the last one."""
    if MASK == _NONE:
        first, count = 0, gl.cdiv(params.n, BM)
    elif MASK == _SPANS:
        at = params.lists.bounds + block_list_start(params.lists, batch, h, MASK) + block * 4
        first = gl.load(at)
        count = gl.load(at + 3) - first
    else:
        at = params.dq_order.start + block_list_start(params.lists, batch, h, MASK) + block
        first = gl.load(at)
        count = gl.load(at + 1) - first
    return first, count


@gluon.jit
def heads_together(params, MASK: gl.constexpr):
    """How many query heads of a group take turns at each row block: all of them if they share a mask, else one."""
    heads = params.heads_per_kv
    if MASK != _NONE:
        heads = gl.where(params.lists.block_head == 0, heads, 1)
    return heads


@gluon.jit
def next_visit(t, h, first_head, heads):
    """The next row block and query head: the same rows for each of `heads` heads, then the rows before them."""
    wraps = h == first_head + heads - 1
    return gl.where(wraps, t - 1, t), gl.where(wraps, first_head, h + 1)


@gluon.jit
def row_block_at(params, t, MASK: gl.constexpr):
    """The row block in place t of `row_block_range`, and the slot of its bits, −1 where it is full."""
    b, slot = t, 0
    if MASK == _BITS:
        b, slot = gl.load(params.dq_order.entry + t), gl.load(params.dq_order.slot + t)
    return b, slot


@gluon.jit
def dq_position(params, t, b, batch, h, block, MASK: gl.constexpr):
    """How many key blocks add to dQ of a row block before this one."""
    order = params.dq_order
    if MASK == _NONE:
        position = block
    elif MASK == _SPANS:
        item = mask_item(params.lists, batch)
        position = gl.load(order.rank + item * order.key_item + h * order.key_head + block)
        position -= gl.load(order.base + item * order.row_item + h * order.row_head + b)
    else:
        position = gl.load(order.position + t)
    return position


@gluon.jit
def dq_visit(params, visit, first, count, batch, first_head, heads, block, BM: gl.constexpr, MASK: gl.constexpr):
    """Where dQ of a key block's visit is in memory, counted in row blocks, and its position; past the last visit, that of the last."""
    visit = gl.minimum(visit, count * heads - 1)
    t, h = first + count - 1 - visit // heads, first_head + visit % heads
    b, slot = row_block_at(params, t, MASK)
    position = dq_position(params, t, b, batch, h, block, MASK)
    return (batch * params.num_heads + h) * gl.cdiv(params.n, BM) + b, position


@gluon.jit
def key_tile(params, tile):
    """Key block, batch item and key head of a tile. `swizzle` heads are scheduled together; their first keys come first."""
    from_last, batch_head = work_tile(tile, params.key_blocks, params.batch_kv_heads, params.swizzle)
    kv_heads = params.num_heads // params.heads_per_kv
    return params.key_blocks - 1 - from_last, batch_head // kv_heads, batch_head % kv_heads


@gluon.jit
def common_rows(params, batch, h, key, MASK: gl.constexpr):
    """The rows that see all ROWS keys of a group, which begin at `key`: the first row, and one past the last. No rows see keys past the end."""
    begin, end = 0, params.n
    if MASK == _SPANS:
        order = params.dq_order
        at = mask_item(params.lists, batch) * order.span_item + h * order.span_head
        begin = gl.load(order.begin + at + (gl.minimum(key + ROWS, params.M) - 1))
        end = gl.load(order.end + at + gl.minimum(key, params.M - 1))
    return gl.where(key + ROWS > params.M, NO_ROW, begin), end


@gluon.jit
def write_key_tile(tile, taken, first, count, batch, kv_head, key, params, TRAITS: gl.constexpr):
    """Write the info of the tile that a program takes after `taken` others, once all warps are done with the one before."""
    info = params.tile_info
    begin_0, end_0 = common_rows(params, batch, kv_head * params.heads_per_kv, key, TRAITS.MASK)
    begin_1, end_1 = common_rows(params, batch, kv_head * params.heads_per_kv, key + ROWS, TRAITS.MASK)
    unseen_0 = some_unseen(batch, kv_head, key, params, TRAITS, 1)
    unseen_1 = some_unseen(batch, kv_head, key + ROWS, params, TRAITS, 1)
    mbarrier.wait(params.barriers.k_free, taken & 1 ^ 1)
    write_info(info, INFO_TILE, tile, 1)
    write_info(info, INFO_FIRST, first, 1)
    write_info(info, INFO_COUNT, count, 1)
    write_info(info, INFO_GROUP, begin_0, 1)
    write_info(info, INFO_GROUP + 1, end_0, 1)
    write_info(info, INFO_GROUP + 2, unseen_0.to(gl.int32), 1)
    write_info(info, INFO_GROUP + 3, begin_1, 1)
    write_info(info, INFO_GROUP + 4, end_1, 1)
    write_info(info, INFO_GROUP + 5, unseen_1.to(gl.int32), 1)


@gluon.jit
def next_tile(taken, params, WARPS: gl.constexpr):
    """Wait for the tile that a program takes after `taken` others. Its number is past the last one if there is none."""
    mbarrier.wait(params.barriers.k_ready, taken & 1)
    return read_info(params.tile_info, INFO_TILE, WARPS)


@gluon.jit
def read_key_tile(tile, G, params):
    """What consumer group G needs to know of its tile."""
    info, group = params.tile_info, INFO_GROUP + 3 * G
    block, batch, kv_head = key_tile(params, tile)
    first, count = read_info(info, INFO_FIRST, 4), read_info(info, INFO_COUNT, 4)
    begin, end = read_info(info, group, 4), read_info(info, group + 1, 4)
    return KeyTile(block, batch, kv_head, first, count, begin, end, read_info(info, group + 2, 4) > 0)


@gluon.jit
def is_partial(b, slot, begin, end, n, BM: gl.constexpr, MASK: gl.constexpr):
    """Whether the mask hides keys of a group from rows of a block; `begin` and `end` are its common rows."""
    partial = (b * BM < begin) | (gl.minimum(b * BM + BM, n) > end)
    if MASK == _BITS:
        partial = partial | (slot >= 0)
    return partial


@gluon.jit
def load_mask(batch, h, b, j, slot, partial, params, TRAITS: gl.constexpr):
    """What the mask says of keys j [ROWS] in a partial block: the first row that sees a key and one past the last, or 64 bits in two words."""
    order = params.dq_order
    low, high = j, j
    if TRAITS.MASK != _NONE:
        if partial:
            some = j < params.M
            if TRAITS.MASK == _BITS:
                gl.static_assert(TRAITS.BM == 64, "two words have the bits of 64 rows")
                at = order.bits + gl.maximum(slot, 0).to(gl.int64) * 512 + (j % 128) * 4 + b * TRAITS.BM % 128 // 32  # slot 0 shows all
                low, high = gl.load(at, mask=some, other=0), gl.load(at + 1, mask=some, other=0)
            else:
                at = mask_item(params.lists, batch) * order.span_item + h * order.span_head + j
                low, high = gl.load(order.begin + at, mask=some, other=0), gl.load(order.end + at, mask=some, other=0)
    return low, high


@gluon.jit
def apply_mask(S, tile, params, TRAITS: gl.constexpr):
    """S [BM, ROWS], −inf where the mask hides, and for keys past the end: `online_softmax.apply_mask`, by keys.

    A thread has two of eight neighbouring rows. So a row is where the thread begins plus a constant.
    """
    BM: gl.constexpr = TRAITS.BM
    c = gl.arange(0, BM, gl.SliceLayout(1, transposed_layout(BM)))  # [BM]
    begin = c & 6
    c = gl.broadcast(S, (c & -7)[:, None])[1]  # [BM, ROWS]
    if TRAITS.MASK == _BITS:
        word = gl.where(c < 32, tile.low[None, :], tile.high[None, :])
        S = gl.inline_asm_elementwise(MASK_BIT, "=f,f,r,r", [S, word >> begin[:, None], (c * 0 + 1) << (c % 32)], gl.float32, True, 1)
    elif TRAITS.MASK == _NONE:
        S = gl.where((tile.j < params.M)[None, :], S, float("-inf"))
    else:
        begin += tile.b * BM
        first, end = tile.low[None, :] - begin[:, None], tile.high[None, :] - begin[:, None]
        S = gl.inline_asm_elementwise(MASK_SPAN, "=f,f,r,r,r", [S, c, first, end], gl.float32, True, 1)
    return S


@gluon.jit
def load_bias(tile, params, TRAITS: gl.constexpr):
    """The bias of a tile [BM, ROWS]; rows and keys past the end get that of the last.

    Offsets have 31 bits: a thread holds 32 numbers, and has no registers for as many 64-bit addresses.
    """
    bias, b, j = params.bias, tile.b, tile.j
    BM: gl.constexpr = TRAITS.BM
    i = b * BM + gl.arange(0, BM, gl.SliceLayout(1, transposed_layout(BM)))  # [BM]
    if TRAITS.BIAS == _BIAS_ALIBI:
        slope = gl.load(bias_row_pointers(bias, tile.batch, tile.h, i, TRAITS.BIAS))
        c = gl.arange(0, BM, gl.SliceLayout(1, transposed_layout(BM))) & -7  # as in `online_softmax.distances`, by rows
        X = -slope * gl.abs(((j - bias.offset)[None, :] - (i - c)[:, None]).to(gl.float32) - c.to(gl.float32)[:, None])
    else:
        at = bias.at + tile.h.to(gl.int64) * bias.head + tile.batch.to(gl.int64) * bias.item
        if TRAITS.BIAS == _BIAS_TENSOR:
            each = gl.minimum(i, params.n - 1)[:, None] * bias.row + gl.minimum(j, params.M - 1)[None, :] * bias.key  # [BM, ROWS]
        else:
            ahead = j[None, :] - (i[:, None] + bias.offset)
            each = gl.minimum(gl.maximum(ahead, -bias.reach), bias.reach) + bias.reach
        LOAD: gl.constexpr = bias_load(bias.at.dtype.element_ty)
        X = gl.inline_asm_elementwise(LOAD, "=f,l,r", [at.to(gl.int64, bitcast=True), each], gl.float32, True, 1)
    return X


@gluon.jit
def load_rows(b, h, batch, empty, visit, params, descriptors, TRAITS: gl.constexpr):
    """Load Q, dO and the statistics of row block b for a visit, as soon as there is room. Q and dO may share a barrier.

    `q_ready` has one barrier more than stages: through it queries are loaded that must be cleaned.
    """
    smem, barriers, row_stats = params.smem, params.barriers, params.row_stats
    DA: gl.constexpr = TRAITS.DA
    DB: gl.constexpr = TRAITS.DB
    EA: gl.constexpr = TRAITS.EA
    EB: gl.constexpr = TRAITS.EB
    BM: gl.constexpr = TRAITS.BM
    stage, phase = buffer_and_phase(visit, TRAITS.STAGES)
    o_stage, o_phase = buffer_and_phase(visit, TRAITS.O_STAGES)
    at = (batch * params.num_heads + h) * params.padded_n + b * BM
    o_ready = barriers.o_ready.index(o_stage)
    q_loaded = barriers.q_ready.index(gl.where(empty > 0, TRAITS.STAGES, stage))
    mbarrier.wait(barriers.q_free.index(stage), phase ^ 1)
    mbarrier.expect(q_loaded, BM * (DA + DB) * 2 + BM * 4)
    tma_load(descriptors.q, [batch, h, b * BM, 0], q_loaded, smem.Q.index(stage))
    if DB > 0:
        tma_load(descriptors.qb, [batch, h, b * BM, DA], q_loaded, smem.QB.index(stage))
    tma_load(descriptors.lse, [at], q_loaded, row_stats.lse.index(stage))
    if TRAITS.O_STAGES < TRAITS.STAGES:
        mbarrier.wait(barriers.o_free.index(o_stage), o_phase ^ 1)
    mbarrier.expect(o_ready, BM * (EA + EB) * 2 + BM * 4 * (2 if TRAITS.ENTROPY else 1))
    tma_load(descriptors.do, [batch, h, b * BM, 0], o_ready, smem.dO.index(o_stage))
    if EB > 0:
        tma_load(descriptors.dob, [batch, h, b * BM, EA], o_ready, smem.dOB.index(o_stage))
    tma_load(descriptors.delta, [at], o_ready, row_stats.delta.index(o_stage))
    if TRAITS.ENTROPY:
        tma_load(descriptors.g_entropy, [at], o_ready, row_stats.g_entropy.index(o_stage))
    if empty > 0:
        clean_queries(stage, params, TRAITS)


@gluon.jit
def load_tile(tile, taken, visit, params, descriptors, TRAITS: gl.constexpr):
    """Load K and V of a tile, then the rows of its visits, which are counted from `visit`. The result is the number of the visit after them."""
    smem = params.smem
    DA: gl.constexpr = TRAITS.DA
    DB: gl.constexpr = TRAITS.DB
    EA: gl.constexpr = TRAITS.EA
    EB: gl.constexpr = TRAITS.EB
    BM: gl.constexpr = TRAITS.BM
    MASK: gl.constexpr = TRAITS.MASK
    block, batch, kv_head = key_tile(params, tile)
    heads = heads_together(params, MASK)
    first, count = row_block_range(params, batch, kv_head * params.heads_per_kv, block, BM, MASK)
    if not TRAITS.ONE_TILE:
        write_key_tile(tile, taken, first, count, batch, kv_head, block * GROUPS * ROWS, params, TRAITS)
    k_ready = params.barriers.k_ready
    mbarrier.expect(k_ready, GROUPS * ROWS * (DA + EA + DB + EB) * 2)
    for g in gl.static_range(GROUPS):
        key = (block * GROUPS + g) * ROWS
        tma_load(descriptors.k, [batch, kv_head, key, 0], k_ready, smem.K.index(g))
        tma_load(descriptors.v, [batch, kv_head, key, 0], k_ready, smem.V.index(g))
        if DB > 0:
            tma_load(descriptors.kb, [batch, kv_head, key, DA], k_ready, smem.KB.index(g))
        if EB > 0:
            tma_load(descriptors.vb, [batch, kv_head, key, EA], k_ready, smem.VB.index(g))
    for u in range(params.heads_per_kv // heads):
        first_head = kv_head * params.heads_per_kv + u * heads
        if u > 0:
            first, count = row_block_range(params, batch, first_head, block, BM, MASK)
        t, h = first + count - 1, first_head
        b, empty = t, 0
        if count > 0:
            b, slot = row_block_at(params, t, MASK)
            empty = some_empty(b, batch, h, params, TRAITS)
        for v in range(visit, visit + count * heads):
            t, next_h = next_visit(t, h, first_head, heads)
            next_b, slot = row_block_at(params, gl.maximum(t, first), MASK)
            next_empty = some_empty(next_b, batch, next_h, params, TRAITS)  # one visit early, so that nobody waits for it
            load_rows(b, h, batch, empty, v, params, descriptors, TRAITS)
            b, h, empty = next_b, next_h, next_empty
        visit += count * heads
    return visit


@gluon.jit
def take_tile(params, TRAITS: gl.constexpr):
    """The number of the next tile that no program has taken, from a counter behind the semaphores of dQ."""
    counter = params.semaphores + params.batch_kv_heads * params.heads_per_kv * gl.cdiv(params.n, TRAITS.BM)
    counted = gl.inline_asm_elementwise(COUNT, "=r,l", [counter], gl.int32, False, 1)
    return gl.inline_asm_elementwise(BROADCAST, "=r,r", [counted], gl.int32, False, 1)


@gluon.jit
def producer(params, descriptors, TRAITS: gl.constexpr):
    """The producer warp: it loads K and V of a key block, then Q, dO and the statistics of each row block that sees it.

    It takes the next tile once all rows of this one are being loaded, and no earlier: later tiles in the order of dQ wait for the visits of a
    tile that was taken. With ONE_TILE a program has only the tile of its number, and the `while` runs once. Without it Triton 3.6 would not add
    up the visits, which only bounds of `for` loops read.
    """
    tiles = params.key_blocks * params.batch_kv_heads
    taken = 0
    visit = 0
    tile = gl.program_id(0) if TRAITS.ONE_TILE else take_tile(params, TRAITS)
    while tile < tiles:
        visit = load_tile(tile, taken, visit, params, descriptors, TRAITS)
        taken += 1
        tile = tiles if TRAITS.ONE_TILE else take_tile(params, TRAITS)
    if not TRAITS.ONE_TILE:
        mbarrier.wait(params.barriers.k_free, taken & 1 ^ 1)
        write_info(params.tile_info, INFO_TILE, tile, 1)
        mbarrier.arrive(params.barriers.k_ready)
