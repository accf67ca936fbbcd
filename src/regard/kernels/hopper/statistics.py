"""What the weights say, on Hopper, in Gluon: `received` and `pooled` of `kernels/passes.py`, with a warp that copies.

A program has BN keys of one head in shared memory. One warp copies the queries that see them, ROWS at a time; one warp
group multiplies and exponentiates. It has two tiles of logits, so that the product of one is computed while the
exponentials of the other are taken. Two programs share a multiprocessor. Letters and units are the portable kernel's,
and a dim of 96 or 192 is taken in two chunks, as in the forward.

P = exp2(S·unit − level) · share, where the share of a row is 1 / l. Both numbers come from the forward pass.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..portable.tile_ops import (
    _BIAS_NONE,
    _BITS,
    _NONE,
    LOG2E,
    bias_row_pointers,
    block_list_start,
    block_range,
    mask_tile,
    row_offset,
    row_spans,
)
from .aggregates import kind_of
from .forward import flat
from .online_softmax import scored
from .register_layouts import product
from .tile_scheduler import ROWS, advance, entry_at, new_barriers, place, tma_load

PAIR = gl.constexpr(2 * ROWS.value)  # rows of a block in the lists: two tiles
COPYING = gl.constexpr(24)  # registers of a thread that copies


class Given(NamedTuple):
    """What every warp of a program is told."""

    described: Any  # q and k, each in two chunks
    X: Any  # Q and K in shared memory, each in two chunks
    barriers: Any
    facts: Any  # what the forward pass found of every row: peak, spread
    out: Any
    scale: Any
    scales: Any
    cap: Any
    bias: Any
    where: Any
    n: Any
    M: Any
    blocks: Any  # of keys, or columns of a map
    owners: Any
    heads: Any
    groups: Any  # heads that share keys
    section: Any


class Grid(NamedTuple):
    """The cells of a map, and how programs share them."""

    height: Any
    width: Any
    cells: Any  # columns of a program
    parts: Any  # programs of a column
    bands: Any  # rows of cells of a program
    key_blocks: Any  # blocks of keys that a mask's table has


class Head(NamedTuple):
    """Whose weights a program looks at, and how their logits are made."""

    item: Any
    h: Any
    j: Any  # [BN] its keys
    rows: Any  # where the facts of its head begin
    scale: Any
    unit: Any  # scale in log2 units


class Part(NamedTuple):
    """The part of a map that a program makes."""

    y0: Any  # its first row of cells
    x: Any  # its first column
    nth: Any  # which part of that
    start: Any  # its keys, from here …
    stop: Any  # … to here
    low: Any  # its rows, from here …
    high: Any  # … to here


@gluon.jit
def walk_of(where, item, h, block, n, MASK: gl.constexpr):
    """The blocks of rows that a block of keys meets: (first partial, first full, behind the full, how many full, how many)."""
    first, full, until, rest = block_range(where, block_list_start(where, item, h, MASK), block, gl.cdiv(n, PAIR), gl.cdiv(n, PAIR), MASK)
    return first, full, until, until - full, until - full + rest


@gluon.jit
def block_at(where, t, met_by, MASK: gl.constexpr):
    """The t-th block of rows that is met, the full ones last, and the slot of its bits; behind the last any block."""
    b, at, partial = entry_at(where, t, *met_by, MASK)
    slot = 0
    if MASK == _BITS:
        slot = gl.load(where.slot + at, mask=partial, other=0)  # slot 0 is all ones
    return b, slot


@gluon.jit
def fetch(item, h, i0, stage, parity, given, KIND: gl.constexpr):
    """The queries from row i0 on into a stage, as soon as it is free."""
    q, qb, k, kb = given.described
    Q, QB, K, KB = given.X
    k_ready, ready, free = given.barriers
    mbarrier.wait(free.index(stage), parity)
    mbarrier.expect(ready.index(stage), ROWS * (KIND.DA + KIND.DB) * 2)
    tma_load(q, [item, h, i0, 0], ready.index(stage), Q.index(stage))
    if KIND.DB > 0:
        tma_load(qb, [item, h, i0, KIND.DA], ready.index(stage), QB.index(stage))


@gluon.jit
def fetch_keys(item, kv, j0, given, KIND: gl.constexpr):
    """The keys of a program."""
    q, qb, k, kb = given.described
    Q, QB, K, KB = given.X
    k_ready, ready, free = given.barriers
    mbarrier.expect(k_ready, KIND.BN * (KIND.DA + KIND.DB) * 2)
    tma_load(k, [item, kv, j0, 0], k_ready, K)
    if KIND.DB > 0:
        tma_load(kb, [item, kv, j0, KIND.DA], k_ready, KB)


@gluon.jit
def begin(i, stage, parity, none, head, given, KIND: gl.constexpr):
    """S = Q Kᵀ of a stage [ROWS, BN], begun; and what the forward pass found of its rows i, on its way."""
    Q, QB, K, KB = given.X
    k_ready, ready, free = given.barriers
    row_max, log_row_sum = given.facts
    DA: gl.constexpr = KIND.DA
    DB: gl.constexpr = KIND.DB
    BN: gl.constexpr = KIND.BN
    top = gl.load(row_max + head.rows + i, mask=i < given.n, other=float("-inf"))  # [ROWS]
    above = gl.load(log_row_sum + head.rows + i, mask=i < given.n, other=0.0)
    mbarrier.wait(ready.index(stage), parity)
    S = warpgroup_mma(flat(Q.index(stage), ROWS, DA), flat(K, BN, DA).permute((1, 0)), none, use_acc=False, is_async=True)
    if DB > 0:
        S = warpgroup_mma(flat(QB.index(stage), ROWS, DB), flat(KB, BN, DB).permute((1, 0)), S, is_async=True)
    return S, top, above


@gluon.jit
def scores(S, i, head, given, KIND: gl.constexpr):
    """Products [ROWS, BN] to logits, −inf where a bias hides them; FAST leaves them raw products."""
    if not KIND.FAST:
        at = bias_row_pointers(given.bias, head.item, head.h, i, KIND.BIAS)
        S, show = scored(S, head.scale, given.cap, given.bias, at, i, head.j, given.n, given.M, KIND.CAP, KIND.BIAS)
        if KIND.BIAS != _BIAS_NONE:
            S = gl.where(show, S, float("-inf"))
    return S


@gluon.jit
def powers(S, top, above, unit, FAST: gl.constexpr):
    """Logits [ROWS, BN] to weights that lack their rows' share; and that share [ROWS]."""
    level = row_offset(top, FAST)  # [ROWS]
    if FAST:
        T = S * unit - level[:, None]
    else:
        T = (S - level[:, None]) * LOG2E
    return gl.exp2(T), gl.exp2(above * -LOG2E)


@gluon.jit
def columns(X, BN: gl.constexpr):
    """[ROWS, BN] summed over the two rows of each thread: [4, 8, BN]."""
    return gl.sum(X.reshape([4, 2, 8, BN]), 1)


@gluon.jit
def ready_for(S2, k_ready):
    """S2, when its product is done. The barrier was passed long ago; behind it no compiler waits before what stands above."""
    mbarrier.wait(k_ready, 0)
    return warpgroup_mma_wait(0, deps=[S2])


@gluon.jit
def copy_received(given, KIND: gl.constexpr):
    """The warp that copies: the keys, then the queries of each block that is met."""
    block, own = place(gl.program_id(0), given.blocks, given.owners, given.section)
    block = given.blocks - 1 - block
    item, h = own // given.heads, own % given.heads
    fetch_keys(item, h // given.groups, block * KIND.BN, given, KIND)
    met_by = walk_of(given.where, item, h, block, given.n, KIND.MASK)
    stage = 0
    parity = 1  # of a free stage: the phase before the first counts as done
    for t in range(met_by[4]):
        b, slot = block_at(given.where, t, met_by, KIND.MASK)
        for half in gl.static_range(2):
            fetch(item, h, b * PAIR + half * ROWS, stage, parity, given, KIND)
            stage, parity = advance(stage, parity, KIND.STAGES)


@gluon.jit
def summed(S, top, above, total, i, slot, head, given, KIND: gl.constexpr, MASKED: gl.constexpr):
    """The weights of products [ROWS, BN], added to the total of their keys [4, 8, BN]."""
    S = scores(S, i, head, given, KIND)
    if MASKED:
        lo, hi = row_spans(given.where, head.item, head.h, i, given.n, given.M, KIND.MASK)
        S = gl.where(mask_tile(given.where, lo, hi, slot, i, head.j, KIND.MASK), S, float("-inf"))
    P, share = powers(S, top, above, head.unit, KIND.FAST)
    return total + columns(P * share[:, None], KIND.BN)


@gluon.jit
def meet(t, total, stage, parity, none, met_by, head, given, KIND: gl.constexpr, MASKED: gl.constexpr):
    """The t-th block of rows: two tiles, the second multiplied while the first is exponentiated."""
    k_ready, ready, free = given.barriers
    b, slot = block_at(given.where, t, met_by, KIND.MASK)
    i = b * PAIR + gl.arange(0, ROWS, gl.SliceLayout(1, none.type.layout))  # [ROWS]
    after, after_parity = advance(stage, parity, KIND.STAGES)
    S, top, above = begin(i, stage, parity, none, head, given, KIND)
    S2, top2, above2 = begin(i + ROWS, after, after_parity, none, head, given, KIND)
    S = warpgroup_mma_wait(2 if KIND.DB > 0 else 1, deps=[S])
    mbarrier.arrive(free.index(stage))
    total = summed(S, top, above, total, i, slot, head, given, KIND, MASKED)
    S2 = ready_for(S2, k_ready)
    mbarrier.arrive(free.index(after))
    total = summed(S2, top2, above2, total, i + ROWS, slot, head, given, KIND, MASKED)
    stage, parity = advance(after, after_parity, KIND.STAGES)
    return total, stage, parity


@gluon.jit
def sum_received(given, KIND: gl.constexpr):
    """The warp group: Σ over rows of the weights of BN keys, in registers until the end."""
    k_ready, ready, free = given.barriers
    n, M, heads = given.n, given.M, given.heads
    BN: gl.constexpr = KIND.BN
    SL: gl.constexpr = product(BN)
    block, own = place(gl.program_id(0), given.blocks, given.owners, given.section)
    block = given.blocks - 1 - block  # the first keys first: under a causal mask most rows see them
    item, h = own // heads, own % heads
    scale = given.scale
    if KIND.SCALES:
        scale = gl.load(given.scales + h)
    unit = scale * LOG2E
    rows = (item.to(gl.int64) * heads + h) * n
    met_by = walk_of(given.where, item, h, block, n, KIND.MASK)
    head = Head(item, h, block * BN + gl.arange(0, BN, gl.SliceLayout(0, SL)), rows, scale, unit)
    none = gl.zeros([ROWS, BN], gl.float32, SL)
    total = columns(none, BN)  # [4, 8, BN]
    stage = 0
    parity = 0
    mbarrier.wait(k_ready, 0)
    if KIND.MASK != _NONE:
        for t in range(met_by[4] - met_by[3]):
            total, stage, parity = meet(t, total, stage, parity, none, met_by, head, given, KIND, True)
    for t in range(met_by[4] - met_by[3], met_by[4]):
        total, stage, parity = meet(t, total, stage, parity, none, met_by, head, given, KIND, False)
    CL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    j = block * BN + gl.arange(0, BN, CL)
    gl.store(given.out + (item.to(gl.int64) * heads + h) * M + j, gl.convert_layout(gl.sum(total.reshape([32, BN]), 0), CL), mask=j < M)


@gluon.jit
def rooms(q, qb, k, kb, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for a program's keys and the stages of queries, and the barriers."""
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


@gluon.jit(do_not_specialize=["where", "n", "M", "blocks", "owners", "heads", "groups", "section"])
def received(q, qb, k, kb, out, row_max, log_row_sum, scale, scales, cap, bias, where, n, M, blocks, owners, heads, groups, section,
             DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr,
             CAP: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr):
    """Σ over rows of the weight of each key: program (block of keys, item and query head)."""
    X, barriers = rooms(q, qb, k, kb, DA, DB, BN, STAGES)
    given = Given((q, qb, k, kb), X, barriers, (row_max, log_row_sum), out, scale, scales, cap, bias, where, n, M, blocks, owners, heads, groups, section)
    KIND: gl.constexpr = kind_of(DA=DA, DB=DB, BN=BN, STAGES=STAGES, MASK=MASK, BIAS=BIAS, CAP=CAP, SCALES=SCALES, FAST=FAST)
    gl.warp_specialize([(sum_received, (given, KIND)), (copy_received, (given, KIND))], [1], [COPYING])


@gluon.jit
def edge(x, cells, length):
    """Where the x-th of `cells` begins among `length` rows or keys."""
    return (x * length + cells - 1) // cells


@gluon.jit
def walk_in(grid, item, h, column, band, given, MASK: gl.constexpr):
    """The blocks of rows from `begin` to `end` that a program of `pooled` walks; those from `full` to `until` it sees whole.

    Its rows, from `low` to `high`, are those of `bands` rows of cells.
    """
    where, n = given.where, given.n
    if MASK == _BITS:
        first, full, until, behind = 0, 0, 0, gl.cdiv(n, PAIR)
    else:
        first, full, until, rest = block_range(where, block_list_start(where, item, h, MASK), column, gl.cdiv(n, PAIR), gl.cdiv(n, PAIR), MASK)
        behind = first + until - full + rest
    low, high = edge(band * grid.bands, grid.height, n), edge(gl.minimum((band + 1) * grid.bands, grid.height), grid.height, n)
    return gl.maximum(first, low // PAIR), full, until, gl.minimum(behind, gl.cdiv(high, PAIR)), low, high


@gluon.jit
def whose(grid, given):
    """Which program this is: column, band, item and head."""
    t, own = place(gl.program_id(0), given.blocks * gl.cdiv(grid.height, grid.bands), given.owners, given.section)
    return t % given.blocks, t // given.blocks, own // given.heads, own % given.heads


@gluon.jit
def keys_of(grid, column, M, BN: gl.constexpr):
    """The first cell of a program, its part of that, and its keys from `start` to `stop`."""
    x, part = column // grid.parts * grid.cells, column % grid.parts
    start = edge(x, grid.width, M) + part * BN
    return x, part, start, gl.minimum(start + BN, edge(gl.minimum(x + grid.cells, grid.width), grid.width, M))


@gluon.jit
def copy_pooled(given, grid, KIND: gl.constexpr):
    """The warp that copies: the keys, then the queries, from the first row to the last."""
    column, band, item, h = whose(grid, given)
    x, part, start, stop = keys_of(grid, column, given.M, KIND.BN)
    fetch_keys(item, h // given.groups, start, given, KIND)
    b0, full, until, b1, low, high = walk_in(grid, item, h, column, band, given, KIND.MASK)
    stage = 0
    parity = 1
    for b in range(b0, b1):
        for half in gl.static_range(2):
            fetch(item, h, b * PAIR + half * ROWS, stage, parity, given, KIND)
            stage, parity = advance(stage, parity, KIND.STAGES)


@gluon.jit
def write_cells(cells_, first, spot, part, head, grid, given):
    """Up to 32 finished cells [4, 32], the sum over warps; they are the ones from `first` on, by rows of the grid."""
    height, width, n, M = grid.height, grid.width, given.n, given.M
    AL: gl.constexpr = cells_.type.layout
    s = gl.arange(0, 32, gl.SliceLayout(0, AL))
    y = part.y0 + (first + s) // grid.cells
    c = part.x + (first + s) % grid.cells
    top = edge(y, height, n)
    area = (edge(y + 1, height, n) - top).to(gl.float32) * (edge(c + 1, width, M) - edge(c, width, M)).to(gl.float32)
    at = (((head.item.to(gl.int64) * given.heads + head.h) * height + y) * width + c) * grid.parts + part.nth
    gl.store(given.out + at, gl.sum(cells_, 0) / area, mask=(s < spot) & (top < part.high) & (c < width))


@gluon.jit
def put(total, cells_, first, spot, part, head, grid, given, BN: gl.constexpr):
    """The total of a row of cells [4, 8, BN] into its cells, in registers until there are 32 of them."""
    x, width, M = part.x, grid.width, given.M
    AL: gl.constexpr = cells_.type.layout
    TL: gl.constexpr = total.type.layout
    j = part.start + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(1, TL)))
    s = gl.arange(0, 32, gl.SliceLayout(0, AL))
    for c in range(grid.cells):
        left, right = edge(x + c, width, M), gl.minimum(edge(x + c + 1, width, M), part.stop)
        inside = (j >= left) & (j < right)
        one = gl.sum(gl.sum(gl.where(inside[None, None, :], total, 0.0), 2), 1)  # [4], one of each warp
        cells_ = gl.where((s == spot)[None, :], gl.convert_layout(one, gl.SliceLayout(1, AL))[:, None], cells_)
        spot += 1
        if spot == 32:
            write_cells(cells_, first, spot, part, head, grid, given)
            first += 32
            spot = 0
    return cells_, first, spot


@gluon.jit
def hides(where, item, h, b, full, until, start, stop, key_blocks, MASK: gl.constexpr):
    """The slots of the bits of a block of rows and the keys from `start` on, in two blocks; and whether anything is hidden."""
    slots = (0, 0)
    masked = (b < full) | (b >= until)
    if MASK == _BITS:
        left = start // PAIR
        at = where.table + (item // gl.load(where.inner)).to(gl.int64) * where.table_item + h * where.table_head + b * key_blocks + left
        slots = (gl.load(at, mask=start < stop, other=0), gl.load(at + 1, mask=(stop - 1) // PAIR > left, other=0))
        masked = (slots[0] != 0) | (slots[1] != 0)  # slot 0 is all ones
    return slots, masked


@gluon.jit
def settle(S, top, above, total, cells_, first, spot, y, bottom, i0, i, masked, slots, part, head, grid, given, KIND: gl.constexpr):
    """The weights of products [ROWS, BN], each to the row of cells that it is in; those that end here are put away."""
    where, n = given.where, given.n
    MASK: gl.constexpr = KIND.MASK
    S = scores(S, i, head, given, KIND)
    if MASK != _NONE:
        if masked:
            lo, hi = row_spans(where, head.item, head.h, i, n, given.M, MASK)
            show = mask_tile(where, lo, hi, gl.maximum(slots[0], 0), i, head.j, MASK)
            if MASK == _BITS:
                right = mask_tile(where, lo, hi, gl.maximum(slots[1], 0), i, head.j, MASK)
                left = (head.j // PAIR == part.start // PAIR)[None, :]
                show = (left & show & (slots[0] >= 0)) | ((left == 0) & right & (slots[1] >= 0))
            S = gl.where(show, S, float("-inf"))
    P, share = powers(S, top, above, head.unit, KIND.FAST)
    share = gl.where(i >= part.low, share, 0.0)
    end = i0 + ROWS
    while i0 < end:
        total += columns(P * gl.where(i < bottom, share, 0.0)[:, None], KIND.BN)
        share = gl.where(i < bottom, 0.0, share)
        i0 = bottom
        if bottom <= end:
            cells_, first, spot = put(total, cells_, first, spot, part, head, grid, given, KIND.BN)
            total = total * 0.0
            y += 1
            bottom = edge(y + 1, grid.height, n)
    return total, cells_, first, spot, y, bottom


@gluon.jit
def sum_pooled(given, grid, KIND: gl.constexpr):
    """The warp group: the weights of a program's keys, row after row, summed by cells."""
    k_ready, ready, free = given.barriers
    where, n, heads = given.where, given.n, given.heads
    BN: gl.constexpr = KIND.BN
    SL: gl.constexpr = product(BN)
    column, band, item, h = whose(grid, given)
    x, nth, start, stop = keys_of(grid, column, given.M, BN)
    b0, full, until, b1, low, high = walk_in(grid, item, h, column, band, given, KIND.MASK)
    scale = given.scale
    if KIND.SCALES:
        scale = gl.load(given.scales + h)
    unit = scale * LOG2E
    rows = (item.to(gl.int64) * heads + h) * n
    head = Head(item, h, start + gl.arange(0, BN, gl.SliceLayout(0, SL)), rows, scale, unit)
    none = gl.zeros([ROWS, BN], gl.float32, SL)
    total = columns(none, BN)  # [4, 8, BN]
    cells_ = gl.zeros([4, 32], gl.float32, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    y = gl.maximum(b0 * PAIR, low) * grid.height // n
    part = Part(y, x, nth, start, stop, low, high)
    bottom = edge(y + 1, grid.height, n)
    first = 0
    spot = 0
    stage = 0
    parity = 0
    mbarrier.wait(k_ready, 0)
    for b in range(b0, b1):
        i = b * PAIR + gl.arange(0, ROWS, gl.SliceLayout(1, SL))  # [ROWS]
        slots, masked = hides(where, item, h, b, full, until, start, stop, grid.key_blocks, KIND.MASK)
        after, after_parity = advance(stage, parity, KIND.STAGES)
        S, top, above = begin(i, stage, parity, none, head, given, KIND)
        S2, top2, above2 = begin(i + ROWS, after, after_parity, none, head, given, KIND)
        S = warpgroup_mma_wait(2 if KIND.DB > 0 else 1, deps=[S])
        mbarrier.arrive(free.index(stage))
        total, cells_, first, spot, y, bottom = settle(
            S, top, above, total, cells_, first, spot, y, bottom, b * PAIR, i, masked, slots, part, head, grid, given, KIND)
        S2 = ready_for(S2, k_ready)
        mbarrier.arrive(free.index(after))
        total, cells_, first, spot, y, bottom = settle(
            S2, top2, above2, total, cells_, first, spot, y, bottom, b * PAIR + ROWS, i + ROWS, masked, slots, part, head, grid, given, KIND)
        stage, parity = advance(after, after_parity, KIND.STAGES)
    cells_, first, spot = put(total, cells_, first, spot, part, head, grid, given, BN)
    write_cells(cells_, first, spot, part, head, grid, given)


@gluon.jit(do_not_specialize=["where", "n", "M", "height", "width", "cells", "parts", "bands", "key_blocks", "columns_", "owners", "heads", "groups", "section"])
def pooled(q, qb, k, kb, out, row_max, log_row_sum, scale, scales, cap, bias, where, n, M, height, width, cells, parts, bands, key_blocks, columns_, owners,
           heads, groups, section, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
           BIAS: gl.constexpr, CAP: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr):
    """The mean weight in each cell of a grid over n × M: program (some columns of cells or a part of one, some rows, item and head).

    Row i is in row ⌊i·height/n⌋ of the grid, key j in column ⌊j·width/M⌋. A program has the keys of `cells` columns, or of
    one of the `parts` of a column that is wider than BN; and `bands` rows of cells, of which it writes all that it meets.
    """
    X, barriers = rooms(q, qb, k, kb, DA, DB, BN, STAGES)
    grid = Grid(height, width, cells, parts, bands, key_blocks)
    given = Given((q, qb, k, kb), X, barriers, (row_max, log_row_sum), out, scale, scales, cap, bias, where, n, M, columns_, owners, heads, groups, section)
    KIND: gl.constexpr = kind_of(DA=DA, DB=DB, BN=BN, STAGES=STAGES, MASK=MASK, BIAS=BIAS, CAP=CAP, SCALES=SCALES, FAST=FAST)
    gl.warp_specialize([(sum_pooled, (given, grid, KIND)), (copy_pooled, (given, grid, KIND))], [1], [COPYING])
