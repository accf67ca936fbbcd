"""The tile scheduler of the Hopper forward: which rows a work tile has, which key blocks they visit; and the producer warp."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...compat.gluon import tma_load
from ..portable.tile_ops import _BITS, _SPANS, block_list_start, block_range, mask_item
from . import ptx
from .aggregates import KeyBlocks
from .configs import ROWS as _ROWS

ROWS = gl.constexpr(_ROWS)
INFO = gl.constexpr(20)  # numbers in the tile info of a row block
TILE, SAFE, BATCH, HEAD = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
FIRST, FULL, FULL_END, TOTAL = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)
GROUP_INFO = gl.constexpr(8)  # from here on three numbers per group: its first row, and its `group_range`
RETRY = gl.constexpr(17)  # from here on one number per group, which the group writes: whether its rows need a retry
RETRY_SHARE = gl.constexpr(4)  # a head takes the safe loop once one in so many of its row blocks needed a retry
BLOCKS_LEFT_AT_TAKE = gl.constexpr(4)  # key blocks to load while a program waits for the number of its next tile
COUNT, BROADCAST = gl.constexpr(ptx.COUNT), gl.constexpr(ptx.BROADCAST)


@gluon.jit
def work_tile(t, blocks, batch_heads, swizzle):
    """The block and the batch-head of the t-th work tile. `swizzle` batch-heads share the cache; their last blocks come first."""
    section = t // (swizzle * blocks)
    t -= section * (swizzle * blocks)
    width = gl.minimum(swizzle, batch_heads - section * swizzle)
    return blocks - 1 - t // width, section * swizzle + t % width


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, arrivals: gl.constexpr, arrivals_of_last: gl.constexpr = 0):
    """NUMBER barriers, each of which completes after so many arrivals; the last one may have a number of its own."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(s), count=arrivals_of_last if arrivals_of_last > 0 and s == NUMBER - 1 else arrivals)
    return barriers


@gluon.jit
def first_row(block, n, row_blocks, G, GROUPS: gl.constexpr):
    """The first row of group G of a row block.

    If the rows do not fill all groups of the last row block, the groups without rows are the first ones of the first block
    instead, and get row numbers past the end: under a causal mask the first block is the shortest.
    """
    at = block * GROUPS + G
    if GROUPS == 3:
        at -= row_blocks * GROUPS - gl.cdiv(n, ROWS)
        at = gl.where(at < 0, at + row_blocks * GROUPS, at)
    return at * ROWS


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage; its barriers flip their phase each time round."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def key_block_range(lists, batch, h, block, M, BN: gl.constexpr, MASK: gl.constexpr):
    """The key blocks that a row block visits, as the fields of `KeyBlocks`."""
    first, full, full_end, rest = block_range(lists, block_list_start(lists, batch, h, MASK), block, gl.cdiv(M, BN), M // BN, MASK)
    return first, full, full_end, full_end - full, full_end - full + rest


@gluon.jit
def group_range(lists, batch, h, row, key_blocks, n, BN: gl.constexpr, MASK: gl.constexpr):
    """The first of the visited key blocks that a group's own ROWS rows see, and the first from which on they see all keys.

    For spans, the blocks that only the last rows of a row block see come first. A group skips these; and where its rows see
    the first block entirely, its own full blocks begin early. Groups whose rows see nothing, or are past the end, skip all.
    """
    first, full, _, num_full, total = key_blocks
    partial = total - num_full
    start, unmasked = 0, partial
    none = total == 0
    if MASK == _SPANS:
        at = mask_item(lists, batch).to(gl.int64) * lists.item + h * lists.head
        last = gl.minimum(row + ROWS, n) - 1
        begin, end_of_first, end = gl.load(lists.lo + at + last), gl.load(lists.hi + at + gl.minimum(row, n - 1)), gl.load(lists.hi + at + last)
        seen = gl.maximum(gl.cdiv(end, BN) - first, 0)  # blocks up to there
        start = gl.minimum(gl.maximum(total - seen, 0), partial - (full - first))
        unmasked = gl.where(begin <= first * BN, gl.minimum(gl.maximum(total - (end_of_first // BN - first), start), partial), partial)
        none = none | ((seen == 0) & (num_full == 0))
    none = gl.where(row < n, none, True)
    return gl.where(none, gl.maximum(total, 1), start), gl.where(none, gl.maximum(total, 1), unmasked)


@gluon.jit
def fixed_max_from(unmasked, count, num_full, total, safe):
    """The first of the visited key blocks from which on the row max stays fixed; `unmasked` is the group's first without a mask.

    The safe loop takes all blocks before it: those that are partial for some row of the row block, and the first full one.
    Attention sinks are there, and after it each row has a row max, even one past the end, which sees no partial block.
    If `safe`, it takes all.
    """
    return gl.where(safe > 0, count, gl.minimum(gl.maximum(unmasked, total - num_full + 1), count))


@gluon.jit
def retries_often(retries, block, row_blocks):
    """Whether so many of a head's row blocks from `block` on needed a retry that the safe loop is better for this one.

    A retry is a second pass, in the safe loop. One step there has about 1.4 times the instructions of a step with a fixed row max.
    """
    return gl.where(retries * RETRY_SHARE > row_blocks - block, 1, 0)


@gluon.jit
def entry_at(lists, t, key_blocks, MASK: gl.constexpr):
    """The t-th visited block: the partial ones backwards, then the full ones. With lists, also its position and whether it is partial."""
    first, full, full_end, num_full, total = key_blocks
    num_partial = total - num_full
    u = t - num_partial  # among the full ones
    if MASK == _BITS:
        at = first + num_partial - 1 - t
        partial = u < 0
        b = gl.load(lists.full_entry + full + u, mask=(u >= 0) & (t < total), other=0)
        b += gl.load(lists.entry + at, mask=partial, other=0)
    else:
        at = 0
        partial = True
        after = num_partial - (full - first)  # partial blocks after the full ones; the others come before them
        b = gl.where(u >= 0, full + u, gl.where(t < after, full_end + after - 1 - t, full + after - 1 - t))
    return b, at, partial


@gluon.jit
def block_at(lists, t, key_blocks, G, GROUPS: gl.constexpr, MASK: gl.constexpr):
    """The t-th visited block, and the slot of group G's bits, −1 where all of it is hidden; block 0 for rows that visit none."""
    b, at, partial = entry_at(lists, t, key_blocks, MASK)
    slot = 0
    if MASK == _BITS:
        PART: gl.constexpr = 128 if GROUPS == 2 else 64  # rows that share a slot
        SLOTS: gl.constexpr = GROUPS * ROWS // PART  # of an entry
        slot = gl.load(lists.slot + at * SLOTS + G * ROWS // PART, mask=partial, other=0)  # slot 0 is all ones
        slot = gl.where(key_blocks.total > 0, slot, -1)
    return b, slot


@gluon.jit
def write_info(tile_info, at, number, WARPS: gl.constexpr):
    """Write one number of the tile info, by so many warps."""
    tile_info.index(at).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon.jit
def read_info(tile_info, at, WARPS: gl.constexpr):
    """Read one number of the tile info, by so many warps."""
    return gl.max(tile_info.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def read_tile(tile_info, at, G: gl.constexpr):
    """The tile info of a row block for group G: (safe, batch, head, first, full, full_end, total, first row, and `group_range`)."""
    group = at + GROUP_INFO + 3 * G
    return (read_info(tile_info, at + SAFE, 4), read_info(tile_info, at + BATCH, 4), read_info(tile_info, at + HEAD, 4),
            read_info(tile_info, at + FIRST, 4), read_info(tile_info, at + FULL, 4), read_info(tile_info, at + FULL_END, 4),
            read_info(tile_info, at + TOTAL, 4), read_info(tile_info, group, 4), read_info(tile_info, group + 1, 4), read_info(tile_info, group + 2, 4))


@gluon.jit
def write_tile(at, tile, retry, block, batch, h, key_blocks, safe, params, TRAITS: gl.constexpr):
    """Write the tile info of a row block; in a retry, the groups that are done get rows past the end."""
    info, n, row_blocks = params.tile_info, params.n, params.row_blocks
    GROUPS: gl.constexpr = TRAITS.GROUPS
    write_info(info, at + TILE, tile, 1)
    write_info(info, at + SAFE, gl.where(retry > 0, 1, safe), 1)
    write_info(info, at + BATCH, batch, 1)
    write_info(info, at + HEAD, h, 1)
    write_info(info, at + FIRST, key_blocks.first, 1)
    write_info(info, at + FULL, key_blocks.full, 1)
    write_info(info, at + FULL_END, key_blocks.full_end, 1)
    write_info(info, at + TOTAL, key_blocks.total, 1)
    for g in gl.static_range(GROUPS):
        row = first_row(block, n, row_blocks, g, GROUPS)
        if retry > 0:
            row = gl.where(read_info(info, at + RETRY + g, 1) > 0, row, row_blocks * GROUPS * ROWS)
        start, unmasked = group_range(params.lists, batch, h, row, key_blocks, n, TRAITS.BN, TRAITS.MASK)
        group = at + GROUP_INFO + 3 * g
        write_info(info, group, row, 1)
        write_info(info, group + 1, start, 1)
        write_info(info, group + 2, unmasked, 1)


@gluon.jit
def load_queries(batch, h, block, q_buffer, params, descriptors, TRAITS: gl.constexpr):
    """Load the queries of all groups of a row block into a Q buffer."""
    GROUPS: gl.constexpr = TRAITS.GROUPS
    smem, ready = params.smem, params.barriers.q_ready.index(q_buffer)
    mbarrier.expect(ready, GROUPS * ROWS * (TRAITS.DA + TRAITS.DB) * 2)
    for g in gl.static_range(GROUPS):
        row = first_row(block, params.n, params.row_blocks, g, GROUPS)
        tma_load(descriptors.q, [batch, h, row, 0], ready, smem.Q.index(q_buffer * GROUPS + g))
        if TRAITS.DB > 0:
            tma_load(descriptors.qb, [batch, h, row, TRAITS.DA], ready, smem.QB.index(q_buffer * GROUPS + g))


@gluon.jit
def load_keys_and_values(batch, kv_head, b, stage, phase, params, descriptors, TRAITS: gl.constexpr):
    """Load the K and V of a key block into a stage, each as soon as its buffer is free."""
    smem, barriers = params.smem, params.barriers
    BN: gl.constexpr = TRAITS.BN
    mbarrier.wait(barriers.k_free.index(stage), phase)
    mbarrier.expect(barriers.k_ready.index(stage), BN * (TRAITS.DA + TRAITS.DB) * 2)
    tma_load(descriptors.k, [batch, kv_head, b * BN, 0], barriers.k_ready.index(stage), smem.K.index(stage))
    if TRAITS.DB > 0:
        tma_load(descriptors.kb, [batch, kv_head, b * BN, TRAITS.DA], barriers.k_ready.index(stage), smem.KB.index(stage))
    mbarrier.wait(barriers.v_free.index(stage), phase)
    mbarrier.expect(barriers.v_ready.index(stage), BN * (TRAITS.EA + TRAITS.EB) * 2)
    tma_load(descriptors.v, [batch, kv_head, b * BN, 0], barriers.v_ready.index(stage), smem.V.index(stage))
    if TRAITS.EB > 0:
        tma_load(descriptors.vb, [batch, kv_head, b * BN, TRAITS.EA], barriers.v_ready.index(stage), smem.VB.index(stage))


@gluon.jit
def producer(params, descriptors, TRAITS: gl.constexpr):
    """The producer warp: for each row block it loads Q, then K and V of all key blocks, as soon as a stage is free."""
    lists, row_blocks, batch_heads, counters, tile_info = params.lists, params.row_blocks, params.batch_heads, params.counters, params.tile_info
    barriers = params.barriers
    GROUPS: gl.constexpr = TRAITS.GROUPS
    PERSISTENT: gl.constexpr = TRAITS.PERSISTENT
    MASK: gl.constexpr = TRAITS.MASK
    stage = 0
    phase = 1  # a new barrier counts as free: the phase before its first is complete
    q_buffer = 0
    q_phase = 1
    Q_BUFFERS: gl.constexpr = TRAITS.Q_BUFFERS
    t = gl.program_id(0)
    if PERSISTENT:
        for u in gl.static_range(Q_BUFFERS):
            for g in gl.static_range(GROUPS):
                write_info(tile_info, u * INFO + RETRY + g, 0, 1)
    # How many times in a row there was no tile. With one Q buffer the groups have answered for the last row block by then.
    idle = 2 - Q_BUFFERS
    while idle < 2:
        tile = t
        retry = 0
        at = q_buffer * INFO
        if PERSISTENT:
            mbarrier.wait(barriers.q_free.index(q_buffer), q_phase)
            for g in gl.static_range(GROUPS):
                retry |= read_info(tile_info, at + RETRY + g, 1)
            tile = gl.where(retry > 0, read_info(tile_info, at + TILE, 1), t)
        if tile < row_blocks * batch_heads:
            block, batch_head = work_tile(tile, row_blocks, batch_heads, params.swizzle)
            batch, h = batch_head // params.num_heads, batch_head % params.num_heads
            kv_head = h // params.heads_per_kv
            key_blocks = KeyBlocks(*key_block_range(lists, batch, h, block, params.M, TRAITS.BN, MASK))
            taken = 0
            if PERSISTENT:
                retries = counters + 1 + batch_head  # row blocks of this head that needed a retry, in all programs
                if retry > 0:
                    gl.inline_asm_elementwise(COUNT, "=r,l", [retries], gl.int32, False, 1)
                safe = retries_often(gl.load(retries, volatile=True), block, row_blocks)
                write_tile(at, tile, retry, block, batch, h, key_blocks, safe, params, TRAITS)
            load_queries(batch, h, block, q_buffer, params, descriptors, TRAITS)
            visits = gl.maximum(key_blocks.total, 1)
            take_at = gl.where(retry > 0, visits, gl.maximum(visits - BLOCKS_LEFT_AT_TAKE, 0))
            for s in range(visits):
                if PERSISTENT:
                    if s == take_at:  # as late as hides the latency of the atomic: tiles then go to programs in the order in which they finish
                        taken = gl.inline_asm_elementwise(COUNT, "=r,l", [counters], gl.int32, False, 1)
                b, slot = block_at(lists, s, key_blocks, 0, GROUPS, MASK)
                load_keys_and_values(batch, kv_head, b, stage, phase, params, descriptors, TRAITS)
                stage, phase = advance(stage, phase, TRAITS.STAGES)
            idle = 2 - Q_BUFFERS
            if PERSISTENT:
                if retry == 0:
                    t = gl.num_programs(0) + gl.inline_asm_elementwise(BROADCAST, "=r,r", [taken], gl.int32, False, 1)
            else:
                idle = 2
        else:  # the first time, the groups answer for the previous row block; if none needs a retry, the second time ends them
            write_info(tile_info, at + TILE, row_blocks * batch_heads + idle, 1)
            mbarrier.arrive(barriers.q_ready.index(q_buffer))
            idle += 1
        q_buffer, q_phase = advance(q_buffer, q_phase, Q_BUFFERS)
