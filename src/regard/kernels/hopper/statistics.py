"""Statistics of the weights on Hopper, in Gluon: `received` and `pooled` of the portable kernels, with a producer warp.

A program has BN keys of one head in shared memory. A producer warp loads the queries that see them, ROWS at a time; one consumer
group multiplies and exponentiates. It has two tiles of logits, so that the product of one runs while the exponentials of the
other are taken. Two programs share a multiprocessor. Letters and units are those of the portable kernel, and a dim of 96 or 192 is
split into two chunks, as in the forward.

P = exp2(S·unit − row max) · share, where the share of a row is 1 / l. Both numbers come from the forward pass.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...compat.gluon import tma_load, warp_specialize
from ..portable.tile_ops import (
    _BITS,
    _NONE,
    LOG2E,
    bias_row_pointers,
    block_list_start,
    block_range,
    mask_item,
    mask_tile,
    row_offset,
    row_spans,
)
from .aggregates import ForwardDescriptors, ForwardSmem, KeyBlocks, traits_of
from .forward import flat
from .online_softmax import exp2, may_hide, score
from .register_layouts import mma_layout
from .statistics_params import Barriers, Grid, Head, MapPart, MapState, Params
from .tile_scheduler import ROWS, advance, entry_at, new_barriers, work_tile

PAIR = gl.constexpr(2 * ROWS.value)  # rows of a block in the lists: two tiles
PRODUCER = gl.constexpr(24)  # registers per producer thread


@gluon.jit
def row_block_range(lists, batch, h, block, n, MASK: gl.constexpr):
    """The row blocks that a key block visits, as the fields of `KeyBlocks`."""
    first, full, full_end, rest = block_range(lists, block_list_start(lists, batch, h, MASK), block, gl.cdiv(n, PAIR), gl.cdiv(n, PAIR), MASK)
    return first, full, full_end, full_end - full, full_end - full + rest


@gluon.jit
def row_block_at(lists, t, row_blocks, MASK: gl.constexpr):
    """The t-th visited row block, the full ones last, and the slot of its bits."""
    b, at, partial = entry_at(lists, t, row_blocks, MASK)
    slot = 0
    if MASK == _BITS:
        slot = gl.load(lists.slot + at, mask=partial, other=0)  # slot 0 is all ones
    return b, slot


@gluon.jit
def load_queries(batch, h, i0, stage, phase, params, TRAITS: gl.constexpr):
    """Load the queries from row i0 on into a stage, as soon as it is free."""
    descriptors, smem, barriers = params.descriptors, params.smem, params.barriers
    mbarrier.wait(barriers.free.index(stage), phase)
    mbarrier.expect(barriers.ready.index(stage), ROWS * (TRAITS.DA + TRAITS.DB) * 2)
    tma_load(descriptors.q, [batch, h, i0, 0], barriers.ready.index(stage), smem.Q.index(stage))
    if TRAITS.DB > 0:
        tma_load(descriptors.qb, [batch, h, i0, TRAITS.DA], barriers.ready.index(stage), smem.QB.index(stage))


@gluon.jit
def load_keys(batch, kv_head, j0, params, TRAITS: gl.constexpr):
    """Load the keys of a program."""
    descriptors, smem, k_ready = params.descriptors, params.smem, params.barriers.k_ready
    mbarrier.expect(k_ready, TRAITS.BN * (TRAITS.DA + TRAITS.DB) * 2)
    tma_load(descriptors.k, [batch, kv_head, j0, 0], k_ready, smem.K)
    if TRAITS.DB > 0:
        tma_load(descriptors.kb, [batch, kv_head, j0, TRAITS.DA], k_ready, smem.KB)


@gluon.jit
def start_S(i, stage, phase, zero, head, params, TRAITS: gl.constexpr):
    """Start S = Q Kᵀ of a stage [ROWS, BN], and load the statistics of its rows i."""
    smem = params.smem
    DA: gl.constexpr = TRAITS.DA
    DB: gl.constexpr = TRAITS.DB
    BN: gl.constexpr = TRAITS.BN
    row_max = gl.load(params.row_max + head.row_offset + i, mask=i < params.n, other=float("-inf"))  # [ROWS]
    log_row_sum = gl.load(params.log_row_sum + head.row_offset + i, mask=i < params.n, other=0.0)
    mbarrier.wait(params.barriers.ready.index(stage), phase)
    S = warpgroup_mma(flat(smem.Q.index(stage), ROWS, DA), flat(smem.K, BN, DA).permute((1, 0)), zero, use_acc=False, is_async=True)
    if DB > 0:
        S = warpgroup_mma(flat(smem.QB.index(stage), ROWS, DB), flat(smem.KB, BN, DB).permute((1, 0)), S, is_async=True)
    return S, row_max, log_row_sum


@gluon.jit
def logits_of(S, i, head, params, TRAITS: gl.constexpr):
    """Products [ROWS, BN] to logits, −inf where a bias hides them; FAST leaves them raw products."""
    if not TRAITS.FAST:
        bias_at = bias_row_pointers(params.bias, head.batch, head.h, i, TRAITS.BIAS)
        S, show = score(S, head.scale, params.cap, params.bias, bias_at, i, head.j, head.j0, params.n, params.M, TRAITS.CAP, TRAITS.BIAS)
        if may_hide(TRAITS.BIAS):
            S = gl.where(show, S, float("-inf"))
    return S


@gluon.jit
def exponentials(S, row_max, log_row_sum, unit, FAST: gl.constexpr):
    """exp of logits [ROWS, BN] relative to the row max, and the share [ROWS] that normalises each row."""
    level = row_offset(row_max, FAST)  # [ROWS]
    if FAST:
        T = S * unit - level[:, None]
    else:
        T = (S - level[:, None]) * LOG2E
    return exp2(T), exp2(log_row_sum * -LOG2E)


@gluon.jit
def column_sums(X, BN: gl.constexpr):
    """[ROWS, BN] summed over the two rows of each thread: [4, 8, BN]."""
    return gl.sum(X.reshape([4, 2, 8, BN]), 1)


@gluon.jit
def wait_S(S, k_ready):
    """S, once its product is done. The barrier completed long ago; it keeps compilers from moving the wait up."""
    mbarrier.wait(k_ready, 0)
    return warpgroup_mma_wait(0, deps=[S])


@gluon.jit
def key_tile(params):
    """A program's key block, batch item and head. The first keys come first: under a causal mask most rows see them."""
    block, batch_head = work_tile(gl.program_id(0), params.blocks, params.batch_heads, params.swizzle)
    return params.blocks - 1 - block, batch_head // params.num_heads, batch_head % params.num_heads


@gluon.jit
def head_numbers(batch, h, params, TRAITS: gl.constexpr):
    """The last fields of `Head`: where the statistics of its rows begin, its scale, and that in log2 units."""
    scale = params.scale
    if TRAITS.SCALES:
        scale = gl.load(params.scales + h)
    unit = scale * LOG2E
    return (batch.to(gl.int64) * params.num_heads + h) * params.n, scale, unit


@gluon.jit
def received_producer(params, TRAITS: gl.constexpr):
    """The producer warp: it loads the keys, then the queries of each visited row block."""
    block, batch, h = key_tile(params)
    load_keys(batch, h // params.heads_per_kv, block * TRAITS.BN, params, TRAITS)
    row_blocks = KeyBlocks(*row_block_range(params.lists, batch, h, block, params.n, TRAITS.MASK))
    stage = 0
    phase = 1  # a new barrier counts as free: the phase before its first is complete
    for t in range(row_blocks.total):
        b, slot = row_block_at(params.lists, t, row_blocks, TRAITS.MASK)
        for half in gl.static_range(2):
            load_queries(batch, h, b * PAIR + half * ROWS, stage, phase, params, TRAITS)
            stage, phase = advance(stage, phase, TRAITS.STAGES)


@gluon.jit
def add_weights(S, row_max, log_row_sum, total, i, slot, head, params, TRAITS: gl.constexpr, MASKED: gl.constexpr):
    """Add the weights of products [ROWS, BN] to the total of their keys [4, 8, BN]."""
    S = logits_of(S, i, head, params, TRAITS)
    if MASKED:
        lo, hi = row_spans(params.lists, head.batch, head.h, i, params.n, params.M, TRAITS.MASK)
        S = gl.where(mask_tile(params.lists, lo, hi, slot, i, head.j, TRAITS.MASK), S, float("-inf"))
    P, share = exponentials(S, row_max, log_row_sum, head.unit, TRAITS.FAST)
    return total + column_sums(P * share[:, None], TRAITS.BN)


@gluon.jit
def mma_one_block(t, total, stage, phase, zero, row_blocks, head, params, TRAITS: gl.constexpr, MASKED: gl.constexpr):
    """The t-th row block: two tiles, the product of the second beside the exponentials of the first."""
    barriers = params.barriers
    b, slot = row_block_at(params.lists, t, row_blocks, TRAITS.MASK)
    i = b * PAIR + gl.arange(0, ROWS, gl.SliceLayout(1, zero.type.layout))  # [ROWS]
    stage2, phase2 = advance(stage, phase, TRAITS.STAGES)
    S, row_max, log_row_sum = start_S(i, stage, phase, zero, head, params, TRAITS)
    S2, row_max2, log_row_sum2 = start_S(i + ROWS, stage2, phase2, zero, head, params, TRAITS)
    S = warpgroup_mma_wait(2 if TRAITS.DB > 0 else 1, deps=[S])
    mbarrier.arrive(barriers.free.index(stage))
    total = add_weights(S, row_max, log_row_sum, total, i, slot, head, params, TRAITS, MASKED)
    S2 = wait_S(S2, barriers.k_ready)
    mbarrier.arrive(barriers.free.index(stage2))
    total = add_weights(S2, row_max2, log_row_sum2, total, i + ROWS, slot, head, params, TRAITS, MASKED)
    stage, phase = advance(stage2, phase2, TRAITS.STAGES)
    return total, stage, phase


@gluon.jit
def received_consumer(params, TRAITS: gl.constexpr):
    """The consumer group: Σ over rows of the weights of BN keys, in registers until the end."""
    BN: gl.constexpr = TRAITS.BN
    SL: gl.constexpr = mma_layout(BN)
    block, batch, h = key_tile(params)
    numbers = head_numbers(batch, h, params, TRAITS)
    row_blocks = KeyBlocks(*row_block_range(params.lists, batch, h, block, params.n, TRAITS.MASK))
    head = Head(batch, h, block * BN, block * BN + gl.arange(0, BN, gl.SliceLayout(0, SL)), *numbers)
    zero = gl.zeros([ROWS, BN], gl.float32, SL)
    total = column_sums(zero, BN)  # [4, 8, BN]
    stage = 0
    phase = 0
    mbarrier.wait(params.barriers.k_ready, 0)
    if TRAITS.MASK != _NONE:
        for t in range(row_blocks.total - row_blocks.num_full):
            total, stage, phase = mma_one_block(t, total, stage, phase, zero, row_blocks, head, params, TRAITS, True)
    for t in range(row_blocks.total - row_blocks.num_full, row_blocks.total):
        total, stage, phase = mma_one_block(t, total, stage, phase, zero, row_blocks, head, params, TRAITS, False)
    CL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    j = block * BN + gl.arange(0, BN, CL)
    gl.store(params.out + (batch.to(gl.int64) * params.num_heads + h) * params.M + j, gl.convert_layout(gl.sum(total.reshape([32, BN]), 0), CL),
             mask=j < params.M)


@gluon.jit
def allocate(descriptors, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for a program's keys and the stages of queries, and the barriers."""
    q, qb, k, kb = descriptors
    Q = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, DA], q.layout)
    K = gl.allocate_shared_memory(k.dtype, [1, 1, BN, DA], k.layout)
    QB = Q
    KB = K
    if DB > 0:
        QB = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, DB], qb.layout)
        KB = gl.allocate_shared_memory(k.dtype, [1, 1, BN, DB], kb.layout)
    k_ready = new_barriers(1, 1).index(0)
    ready = new_barriers(STAGES, 1)
    free = new_barriers(STAGES, 1)
    fence_async_shared()
    return (Q, QB, K, KB), (k_ready, ready, free)


@gluon.jit(do_not_specialize=["lists", "n", "M", "blocks", "batch_heads", "num_heads", "heads_per_kv", "swizzle"])
def received(q, qb, k, kb, out, row_max, log_row_sum, scale, scales, cap, bias, lists, n, M, blocks, batch_heads, num_heads, heads_per_kv, swizzle,
             DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr,
             CAP: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr):
    """Σ over rows of the weight of each key: program (key block, batch item and query head)."""
    smem, barriers = allocate((q, qb, k, kb), DA, DB, BN, STAGES)
    params = Params(ForwardDescriptors(q, qb, k, kb, None, None), ForwardSmem(*smem, None, None), Barriers(*barriers), row_max, log_row_sum, out, scale, scales, cap, bias, lists, n, M,
                    blocks, batch_heads, num_heads, heads_per_kv, swizzle)
    TRAITS: gl.constexpr = traits_of(DA=DA, DB=DB, BN=BN, STAGES=STAGES, MASK=MASK, BIAS=BIAS, CAP=CAP, SCALES=SCALES, FAST=FAST)
    warp_specialize([(received_consumer, (params, TRAITS)), (received_producer, (params, TRAITS))], [1], [PRODUCER])


@gluon.jit
def edge(x, cells, length):
    """The first of `length` rows or keys in the x-th of `cells`."""
    return (x * length + cells - 1) // cells


@gluon.jit
def map_row_blocks(grid, batch, h, column, band, params, MASK: gl.constexpr):
    """The row blocks from `begin` to `end` that a program of `pooled` visits, of which those from `full` to `full_end` are full;
    and its rows from `low` to `high`, those of `bands` rows of cells."""
    lists, n = params.lists, params.n
    if MASK == _BITS:
        first, full, full_end, last = 0, 0, 0, gl.cdiv(n, PAIR)
    else:
        first, full, full_end, rest = block_range(lists, block_list_start(lists, batch, h, MASK), column, gl.cdiv(n, PAIR), gl.cdiv(n, PAIR), MASK)
        last = first + full_end - full + rest
    low, high = edge(band * grid.bands, grid.height, n), edge(gl.minimum((band + 1) * grid.bands, grid.height), grid.height, n)
    return gl.maximum(first, low // PAIR), full, full_end, gl.minimum(last, gl.cdiv(high, PAIR)), low, high


@gluon.jit
def map_tile(grid, params):
    """A program's column, band, batch item and head."""
    t, batch_head = work_tile(gl.program_id(0), params.blocks * gl.cdiv(grid.height, grid.bands), params.batch_heads, params.swizzle)
    return t % params.blocks, t // params.blocks, batch_head // params.num_heads, batch_head % params.num_heads


@gluon.jit
def map_keys(grid, column, M, TRAITS: gl.constexpr):
    """A program's first column of cells, its part of that, and its keys from `start` to `stop`; by bands, a block of keys."""
    BN: gl.constexpr = TRAITS.BN
    x, part = column // grid.parts * grid.cells, column % grid.parts
    if TRAITS.BY_BANDS:
        start, stop = column * BN, gl.minimum(column * BN + BN, M)
    else:
        start = edge(x, grid.width, M) + part * BN
        stop = gl.minimum(start + BN, edge(gl.minimum(x + grid.cells, grid.width), grid.width, M))
    return x, part, start, stop


@gluon.jit
def pooled_producer(params, grid, TRAITS: gl.constexpr):
    """The producer warp: it loads the keys, then the queries, from the first row to the last."""
    column, band, batch, h = map_tile(grid, params)
    x, part, start, stop = map_keys(grid, column, params.M, TRAITS)
    load_keys(batch, h // params.heads_per_kv, start, params, TRAITS)
    begin, full, full_end, end, low, high = map_row_blocks(grid, batch, h, column, band, params, TRAITS.MASK)
    stage = 0
    phase = 1
    for b in range(begin, end):
        for half in gl.static_range(2):
            load_queries(batch, h, b * PAIR + half * ROWS, stage, phase, params, TRAITS)
            stage, phase = advance(stage, phase, TRAITS.STAGES)


@gluon.jit
def store_cells(cells, first, count, map_part, head, grid, params):
    """Store `count` finished cells of [4, 32], summed over warps; they are those from `first` on, by rows of the grid."""
    height, width, n, M = grid.height, grid.width, params.n, params.M
    AL: gl.constexpr = cells.type.layout
    s = gl.arange(0, 32, gl.SliceLayout(0, AL))
    y = map_part.y0 + (first + s) // grid.cells
    c = map_part.x + (first + s) % grid.cells
    top = edge(y, height, n)
    area = (edge(y + 1, height, n) - top).to(gl.float32) * (edge(c + 1, width, M) - edge(c, width, M)).to(gl.float32)
    at = (((head.batch.to(gl.int64) * params.num_heads + head.h) * height + y) * width + c) * grid.parts + map_part.part
    gl.store(params.out + at, gl.sum(cells, 0) / area, mask=(s < count) & (top < map_part.high) & (c < width))


@gluon.jit
def finish_row(total, cells, first, count, map_part, head, grid, params, BN: gl.constexpr):
    """Sum the total of a row of cells [4, 8, BN] into its cells, which stay in registers until there are 32."""
    x, width, M = map_part.x, grid.width, params.M
    AL: gl.constexpr = cells.type.layout
    TL: gl.constexpr = total.type.layout
    j = map_part.start + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(1, TL)))
    s = gl.arange(0, 32, gl.SliceLayout(0, AL))
    for c in range(grid.cells):
        left, right = edge(x + c, width, M), gl.minimum(edge(x + c + 1, width, M), map_part.stop)
        inside = (j >= left) & (j < right)
        one = gl.sum(gl.sum(gl.where(inside[None, None, :], total, 0.0), 2), 1)  # [4], one per warp
        cells = gl.where((s == count)[None, :], gl.convert_layout(one, gl.SliceLayout(1, AL))[:, None], cells)
        count += 1
        if count == 32:
            store_cells(cells, first, count, map_part, head, grid, params)
            first += 32
            count = 0
    return cells, first, count


@gluon.jit
def store_band(total, y, map_part, head, grid, params, BN: gl.constexpr):
    """Store what the keys received from the rows of band y, from the total [4, 8, BN]."""
    CL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    j = map_part.start + gl.arange(0, BN, CL)
    at = ((head.batch.to(gl.int64) * params.num_heads + head.h) * grid.height + y) * params.M + j
    inside = (j < map_part.stop) & (edge(y, grid.height, params.n) < map_part.high)
    gl.store(params.out + at, gl.convert_layout(gl.sum(total.reshape([32, BN]), 0), CL), mask=inside)


@gluon.jit
def mask_slots(b, full, full_end, map_part, head, grid, params, MASK: gl.constexpr):
    """The slots of the mask's bits for a row block and the program's keys, which touch two key blocks; and whether anything is hidden."""
    lists, start, stop = params.lists, map_part.start, map_part.stop
    slots = (0, 0)
    masked = (b < full) | (b >= full_end)
    if MASK == _BITS:
        left = start // PAIR
        at = lists.table + mask_item(lists, head.batch).to(gl.int64) * lists.table_item + head.h * lists.table_head + b * grid.key_blocks + left
        slots = (gl.load(at, mask=start < stop, other=0), gl.load(at + 1, mask=(stop - 1) // PAIR > left, other=0))
        masked = (slots[0] != 0) | (slots[1] != 0)  # slot 0 is all ones
    return slots, masked


@gluon.jit
def add_to_cells(S, row_max, log_row_sum, state, i0, i, masked, slots, map_part, head, grid, params, TRAITS: gl.constexpr):
    """Add the weights of products [ROWS, BN] to their rows of cells; rows of cells that end here are finished."""
    lists, n = params.lists, params.n
    total, cells, first, count, y, bottom = state
    MASK: gl.constexpr = TRAITS.MASK
    S = logits_of(S, i, head, params, TRAITS)
    if MASK != _NONE:
        if masked:
            lo, hi = row_spans(lists, head.batch, head.h, i, n, params.M, MASK)
            show = mask_tile(lists, lo, hi, gl.maximum(slots[0], 0), i, head.j, MASK)
            if MASK == _BITS:
                right = mask_tile(lists, lo, hi, gl.maximum(slots[1], 0), i, head.j, MASK)
                left = (head.j // PAIR == map_part.start // PAIR)[None, :]
                show = (left & show & (slots[0] >= 0)) | ((left == 0) & right & (slots[1] >= 0))
            S = gl.where(show, S, float("-inf"))
    P, share = exponentials(S, row_max, log_row_sum, head.unit, TRAITS.FAST)
    share = gl.where(i >= map_part.low, share, 0.0)
    end = i0 + ROWS
    while i0 < end:
        total += column_sums(P * gl.where(i < bottom, share, 0.0)[:, None], TRAITS.BN)
        share = gl.where(i < bottom, 0.0, share)
        i0 = bottom
        if bottom <= end:
            if TRAITS.BY_BANDS:
                store_band(total, y, map_part, head, grid, params, TRAITS.BN)
            else:
                cells, first, count = finish_row(total, cells, first, count, map_part, head, grid, params, TRAITS.BN)
            total = total * 0.0
            y += 1
            bottom = edge(y + 1, grid.height, n)
    return total, cells, first, count, y, bottom


@gluon.jit
def pooled_consumer(params, grid, TRAITS: gl.constexpr):
    """The consumer group: the weights of a program's keys, row after row, summed by cells."""
    barriers, n = params.barriers, params.n
    BN: gl.constexpr = TRAITS.BN
    SL: gl.constexpr = mma_layout(BN)
    column, band, batch, h = map_tile(grid, params)
    x, nth, start, stop = map_keys(grid, column, params.M, TRAITS)
    begin, full, full_end, block_end, low, high = map_row_blocks(grid, batch, h, column, band, params, TRAITS.MASK)
    numbers = head_numbers(batch, h, params, TRAITS)
    head = Head(batch, h, start, start + gl.arange(0, BN, gl.SliceLayout(0, SL)), *numbers)
    zero = gl.zeros([ROWS, BN], gl.float32, SL)
    total = column_sums(zero, BN)  # [4, 8, BN]
    cells = gl.zeros([4, 32], gl.float32, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    y = gl.maximum(begin * PAIR, low) * grid.height // n
    map_part = MapPart(y, x, nth, start, stop, low, high)
    bottom = edge(y + 1, grid.height, n)
    first = 0
    count = 0
    stage = 0
    phase = 0
    mbarrier.wait(barriers.k_ready, 0)
    for b in range(begin, block_end):
        i = b * PAIR + gl.arange(0, ROWS, gl.SliceLayout(1, SL))  # [ROWS]
        slots, masked = mask_slots(b, full, full_end, map_part, head, grid, params, TRAITS.MASK)
        stage2, phase2 = advance(stage, phase, TRAITS.STAGES)
        S, row_max, log_row_sum = start_S(i, stage, phase, zero, head, params, TRAITS)
        S2, row_max2, log_row_sum2 = start_S(i + ROWS, stage2, phase2, zero, head, params, TRAITS)
        S = warpgroup_mma_wait(2 if TRAITS.DB > 0 else 1, deps=[S])
        mbarrier.arrive(barriers.free.index(stage))
        total, cells, first, count, y, bottom = add_to_cells(
            S, row_max, log_row_sum, MapState(total, cells, first, count, y, bottom), b * PAIR, i, masked, slots, map_part, head, grid, params, TRAITS)
        S2 = wait_S(S2, barriers.k_ready)
        mbarrier.arrive(barriers.free.index(stage2))
        total, cells, first, count, y, bottom = add_to_cells(
            S2, row_max2, log_row_sum2, MapState(total, cells, first, count, y, bottom), b * PAIR + ROWS, i + ROWS, masked, slots, map_part, head, grid,
            params, TRAITS)
        stage, phase = advance(stage2, phase2, TRAITS.STAGES)
    if TRAITS.BY_BANDS:
        store_band(total, y, map_part, head, grid, params, BN)
    else:
        cells, first, count = finish_row(total, cells, first, count, map_part, head, grid, params, BN)
        store_cells(cells, first, count, map_part, head, grid, params)


@gluon.jit(do_not_specialize=["lists", "n", "M", "height", "width", "cells", "parts", "bands", "key_blocks", "columns", "batch_heads", "num_heads",
                              "heads_per_kv", "swizzle"])
def pooled(q, qb, k, kb, out, row_max, log_row_sum, scale, scales, cap, bias, lists, n, M, height, width, cells, parts, bands, key_blocks, columns,
           batch_heads, num_heads, heads_per_kv, swizzle, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
           MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr, BY_BANDS: gl.constexpr):
    """The mean weight in each cell of a grid over n × M: program (columns of cells or a part of one, a band of rows, batch item and head).

    Row i is in row ⌊i·height/n⌋ of the grid, key j in column ⌊j·width/M⌋. A program has the keys of `cells` columns, or of one of
    the `parts` of a column that is wider than BN; and `bands` rows of cells, of which it stores all that it visits.

    BY_BANDS stores no means: a program has BN keys, and stores what each receives from each row of cells.
    """
    smem, barriers = allocate((q, qb, k, kb), DA, DB, BN, STAGES)
    grid = Grid(height, width, cells, parts, bands, key_blocks)
    params = Params(ForwardDescriptors(q, qb, k, kb, None, None), ForwardSmem(*smem, None, None), Barriers(*barriers), row_max, log_row_sum, out, scale, scales, cap, bias, lists, n, M,
                    columns, batch_heads, num_heads, heads_per_kv, swizzle)
    TRAITS: gl.constexpr = traits_of(DA=DA, DB=DB, BN=BN, STAGES=STAGES, MASK=MASK, BIAS=BIAS, CAP=CAP, SCALES=SCALES, FAST=FAST, BY_BANDS=BY_BANDS)
    warp_specialize([(pooled_consumer, (params, grid, TRAITS)), (pooled_producer, (params, grid, TRAITS))], [1], [PRODUCER])
