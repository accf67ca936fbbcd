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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..tile import _BITS, _NONE, _PLAIN, LOG2E, bias_rows, level_of, met, seat, shown, span_rows
from .fold import scored
from .forward import flat
from .layouts import product
from .walk import ROWS, advance, entry_at, new_barriers, place, tma_load

PAIR = gl.constexpr(2 * ROWS.value)  # rows of a block in the lists: two tiles
COPYING = gl.constexpr(24)  # registers of a thread that copies


@gluon.jit
def walk_of(where, item, h, block, n, MASK: gl.constexpr):
    """The blocks of rows that a block of keys meets: (first partial, first full, behind the full, how many full, how many)."""
    first, full, until, rest = met(where, seat(where, item, h, MASK), block, gl.cdiv(n, PAIR), gl.cdiv(n, PAIR), MASK)
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
def fetch(described, X, barriers, item, h, i0, stage, parity, DA: gl.constexpr, DB: gl.constexpr):
    """The queries from row i0 on into a stage, as soon as it is free."""
    q, qb, k, kb = described
    Q, QB, K, KB = X
    k_ready, ready, free = barriers
    mbarrier.wait(free.index(stage), parity)
    mbarrier.expect(ready.index(stage), ROWS * (DA + DB) * 2)
    tma_load(q, [item, h, i0, 0], ready.index(stage), Q.index(stage))
    if DB > 0:
        tma_load(qb, [item, h, i0, DA], ready.index(stage), QB.index(stage))


@gluon.jit
def fetch_keys(described, X, barriers, item, kv, j0, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr):
    """The keys of a program."""
    q, qb, k, kb = described
    Q, QB, K, KB = X
    k_ready, ready, free = barriers
    mbarrier.expect(k_ready, BN * (DA + DB) * 2)
    tma_load(k, [item, kv, j0, 0], k_ready, K)
    if DB > 0:
        tma_load(kb, [item, kv, j0, DA], k_ready, KB)


@gluon.jit
def begin(X, barriers, facts, rows, i, n, stage, parity, none, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr):
    """S = Q Kᵀ of a stage [ROWS, BN], begun; and what the forward pass found of its rows i, on its way."""
    Q, QB, K, KB = X
    k_ready, ready, free = barriers
    peak, spread = facts
    top = gl.load(peak + rows + i, mask=i < n, other=float("-inf"))  # [ROWS]
    above = gl.load(spread + rows + i, mask=i < n, other=0.0)
    mbarrier.wait(ready.index(stage), parity)
    S = warpgroup_mma(flat(Q.index(stage), ROWS, DA), flat(K, BN, DA).permute((1, 0)), none, use_acc=False, is_async=True)
    if DB > 0:
        S = warpgroup_mma(flat(QB.index(stage), ROWS, DB), flat(KB, BN, DB).permute((1, 0)), S, is_async=True)
    return S, top, above


@gluon.jit
def scores(S, i, j, item, h, scale, cap, bias, n, M, BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr):
    """Products [ROWS, BN] to logits, −inf where a bias hides them; FAST leaves them raw products."""
    if not FAST:
        S, show = scored(S, scale, cap, bias, bias_rows(bias, item, h, i, BIAS), i, j, n, M, CAP, BIAS)
        if BIAS != _PLAIN:
            S = gl.where(show, S, float("-inf"))
    return S


@gluon.jit
def powers(S, top, above, unit, FAST: gl.constexpr):
    """Logits [ROWS, BN] to weights that lack their rows' share; and that share [ROWS]."""
    level = level_of(top, FAST)  # [ROWS]
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
def copy_received(given, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr):
    """The warp that copies: the keys, then the queries of each block that is met."""
    described, X, barriers, facts, out, numbers, bias, where, n, M, blocks, owners, heads, groups, section = given
    block, own = place(gl.program_id(0), blocks, owners, section)
    block = blocks - 1 - block
    item, h = own // heads, own % heads
    fetch_keys(described, X, barriers, item, h // groups, block * BN, DA, DB, BN)
    met_by = walk_of(where, item, h, block, n, MASK)
    stage = 0
    parity = 1  # of a free stage: the phase before the first counts as done
    for t in range(met_by[4]):
        b, slot = block_at(where, t, met_by, MASK)
        for half in gl.static_range(2):
            fetch(described, X, barriers, item, h, b * PAIR + half * ROWS, stage, parity, DA, DB)
            stage, parity = advance(stage, parity, STAGES)


@gluon.jit
def summed(S, top, above, total, i, j, slot, item, h, scale, unit, cap, bias, where, n, M, BN: gl.constexpr, MASK: gl.constexpr,
           BIAS: gl.constexpr, CAP: gl.constexpr, FAST: gl.constexpr, MASKED: gl.constexpr):
    """The weights of products [ROWS, BN], added to the total of their keys [4, 8, BN]."""
    S = scores(S, i, j, item, h, scale, cap, bias, n, M, BIAS, CAP, FAST)
    if MASKED:
        lo, hi = span_rows(where, item, h, i, n, M, MASK)
        S = gl.where(shown(where, lo, hi, slot, i, j, MASK), S, float("-inf"))
    P, share = powers(S, top, above, unit, FAST)
    return total + columns(P * share[:, None], BN)


@gluon.jit
def meet(t, total, stage, parity, none, j, X, barriers, facts, met_by, rows, item, h, scale, unit, cap, bias, where, n, M,
         DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr,
         FAST: gl.constexpr, MASKED: gl.constexpr, SL: gl.constexpr):
    """The t-th block of rows: two tiles, the second multiplied while the first is exponentiated."""
    k_ready, ready, free = barriers
    b, slot = block_at(where, t, met_by, MASK)
    i = b * PAIR + gl.arange(0, ROWS, gl.SliceLayout(1, SL))  # [ROWS]
    after, after_parity = advance(stage, parity, STAGES)
    S, top, above = begin(X, barriers, facts, rows, i, n, stage, parity, none, DA, DB, BN)
    S2, top2, above2 = begin(X, barriers, facts, rows, i + ROWS, n, after, after_parity, none, DA, DB, BN)
    S = warpgroup_mma_wait(2 if DB > 0 else 1, deps=[S])
    mbarrier.arrive(free.index(stage))
    total = summed(S, top, above, total, i, j, slot, item, h, scale, unit, cap, bias, where, n, M, BN, MASK, BIAS, CAP, FAST, MASKED)
    S2 = ready_for(S2, k_ready)
    mbarrier.arrive(free.index(after))
    total = summed(S2, top2, above2, total, i + ROWS, j, slot, item, h, scale, unit, cap, bias, where, n, M, BN, MASK, BIAS, CAP, FAST, MASKED)
    stage, parity = advance(after, after_parity, STAGES)
    return total, stage, parity


@gluon.jit
def sum_received(given, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr,
                 CAP: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr):
    """The warp group: Σ over rows of the weights of BN keys, in registers until the end."""
    described, X, barriers, facts, out, numbers, bias, where, n, M, blocks, owners, heads, groups, section = given
    k_ready, ready, free = barriers
    scale, scales, cap = numbers
    SL: gl.constexpr = product(BN)
    block, own = place(gl.program_id(0), blocks, owners, section)
    block = blocks - 1 - block  # the first keys first: under a causal mask most rows see them
    item, h = own // heads, own % heads
    if SCALES:
        scale = gl.load(scales + h)
    unit = scale * LOG2E
    rows = (item.to(gl.int64) * heads + h) * n
    met_by = walk_of(where, item, h, block, n, MASK)
    j = block * BN + gl.arange(0, BN, gl.SliceLayout(0, SL))  # [BN]
    none = gl.zeros([ROWS, BN], gl.float32, SL)
    total = columns(none, BN)  # [4, 8, BN]
    stage = 0
    parity = 0
    mbarrier.wait(k_ready, 0)
    if MASK != _NONE:
        for t in range(met_by[4] - met_by[3]):
            total, stage, parity = meet(
                t, total, stage, parity, none, j, X, barriers, facts, met_by, rows, item, h, scale, unit, cap, bias, where, n, M,
                DA, DB, BN, STAGES, MASK, BIAS, CAP, FAST, True, SL)
    for t in range(met_by[4] - met_by[3], met_by[4]):
        total, stage, parity = meet(
            t, total, stage, parity, none, j, X, barriers, facts, met_by, rows, item, h, scale, unit, cap, bias, where, n, M,
            DA, DB, BN, STAGES, MASK, BIAS, CAP, FAST, False, SL)
    CL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    j = block * BN + gl.arange(0, BN, CL)
    gl.store(out + (item.to(gl.int64) * heads + h) * M + j, gl.convert_layout(gl.sum(total.reshape([32, BN]), 0), CL), mask=j < M)


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
def received(q, qb, k, kb, out, peak, spread, scale, scales, cap, bias, where, n, M, blocks, owners, heads, groups, section,
             DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr,
             CAP: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr):
    """Σ over rows of the weight of each key: program (block of keys, item and query head)."""
    X, barriers = rooms(q, qb, k, kb, DA, DB, BN, STAGES)
    given = ((q, qb, k, kb), X, barriers, (peak, spread), out, (scale, scales, cap), bias, where, n, M, blocks, owners, heads, groups, section)
    gl.warp_specialize([
        (sum_received, (given, DA, DB, BN, STAGES, MASK, BIAS, CAP, SCALES, FAST)),
        (copy_received, (given, DA, DB, BN, STAGES, MASK)),
    ], [1], [COPYING])


@gluon.jit
def edge(x, cells, length):
    """Where the x-th of `cells` begins among `length` rows or keys."""
    return (x * length + cells - 1) // cells


@gluon.jit
def seat_of(grid, where, item, h, column, band, n, MASK: gl.constexpr):
    """The blocks of rows from `begin` to `end` that a program of `pooled` walks; those from `full` to `until` it sees whole.

    Its rows are those of `bands` rows of cells.
    """
    height, width, cells, parts, bands = grid
    if MASK == _BITS:
        first, full, until, behind = 0, 0, 0, gl.cdiv(n, PAIR)
    else:
        first, full, until, rest = met(where, seat(where, item, h, MASK), column, gl.cdiv(n, PAIR), gl.cdiv(n, PAIR), MASK)
        behind = first + until - full + rest
    low, high = edge(band * bands, height, n), edge(gl.minimum((band + 1) * bands, height), height, n)
    return gl.maximum(first, low // PAIR), full, until, gl.minimum(behind, gl.cdiv(high, PAIR)), low, high


@gluon.jit
def whose(grid, heads, owners, columns_, section):
    """Which program this is: column, band, item and head."""
    height, width, cells, parts, bands = grid
    t, own = place(gl.program_id(0), columns_ * gl.cdiv(height, bands), owners, section)
    return t % columns_, t // columns_, own // heads, own % heads


@gluon.jit
def keys_of(grid, column, M, BN: gl.constexpr):
    """The first cell of a program, its part of that, and its keys from `start` to `stop`."""
    height, width, cells, parts, bands = grid
    x, part = column // parts * cells, column % parts
    start = edge(x, width, M) + part * BN
    return x, part, start, gl.minimum(start + BN, edge(gl.minimum(x + cells, width), width, M))


@gluon.jit
def copy_pooled(given, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr):
    """The warp that copies: the keys, then the queries, from the first row to the last."""
    described, X, barriers, facts, out, numbers, bias, where, n, M, grid, key_blocks, columns_, owners, heads, groups, section = given
    column, band, item, h = whose(grid, heads, owners, columns_, section)
    x, part, start, stop = keys_of(grid, column, M, BN)
    fetch_keys(described, X, barriers, item, h // groups, start, DA, DB, BN)
    b0, full, until, b1, low, high = seat_of(grid, where, item, h, column, band, n, MASK)
    stage = 0
    parity = 1
    for b in range(b0, b1):
        for half in gl.static_range(2):
            fetch(described, X, barriers, item, h, b * PAIR + half * ROWS, stage, parity, DA, DB)
            stage, parity = advance(stage, parity, STAGES)


@gluon.jit
def write_cells(cells_, first, spot, y0, x, part, out, grid, item, h, heads, high, n, M):
    """Up to 32 finished cells [4, 32], the sum over warps; they are the ones from `first` on, by rows of the grid."""
    height, width, cells, parts, bands = grid
    AL: gl.constexpr = cells_.type.layout
    s = gl.arange(0, 32, gl.SliceLayout(0, AL))
    y = y0 + (first + s) // cells
    c = x + (first + s) % cells
    top = edge(y, height, n)
    area = (edge(y + 1, height, n) - top).to(gl.float32) * (edge(c + 1, width, M) - edge(c, width, M)).to(gl.float32)
    at = (((item.to(gl.int64) * heads + h) * height + y) * width + c) * parts + part
    gl.store(out + at, gl.sum(cells_, 0) / area, mask=(s < spot) & (top < high) & (c < width))


@gluon.jit
def put(total, cells_, first, spot, y0, x, part, start, stop, out, grid, item, h, heads, high, n, M, BN: gl.constexpr):
    """The total of a row of cells [4, 8, BN] into its cells, in registers until there are 32 of them."""
    height, width, cells, parts, bands = grid
    AL: gl.constexpr = cells_.type.layout
    TL: gl.constexpr = total.type.layout
    j = start + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(1, TL)))
    s = gl.arange(0, 32, gl.SliceLayout(0, AL))
    for c in range(cells):
        left, right = edge(x + c, width, M), gl.minimum(edge(x + c + 1, width, M), stop)
        inside = (j >= left) & (j < right)
        one = gl.sum(gl.sum(gl.where(inside[None, None, :], total, 0.0), 2), 1)  # [4], one of each warp
        cells_ = gl.where((s == spot)[None, :], gl.convert_layout(one, gl.SliceLayout(1, AL))[:, None], cells_)
        spot += 1
        if spot == 32:
            write_cells(cells_, first, spot, y0, x, part, out, grid, item, h, heads, high, n, M)
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
def settle(S, top, above, total, cells_, first, spot, y, bottom, y0, i0, i, j, x, part, start, stop, low, high, masked, slots, grid, out, item,
           h, heads, scale, unit, cap, bias, where, n, M, BN: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr,
           FAST: gl.constexpr):
    """The weights of products [ROWS, BN], each to the row of cells that it is in; those that end here are put away."""
    S = scores(S, i, j, item, h, scale, cap, bias, n, M, BIAS, CAP, FAST)
    if MASK != _NONE:
        if masked:
            lo, hi = span_rows(where, item, h, i, n, M, MASK)
            show = shown(where, lo, hi, gl.maximum(slots[0], 0), i, j, MASK)
            if MASK == _BITS:
                right = shown(where, lo, hi, gl.maximum(slots[1], 0), i, j, MASK)
                left = (j // PAIR == start // PAIR)[None, :]
                show = (left & show & (slots[0] >= 0)) | ((left == 0) & right & (slots[1] >= 0))
            S = gl.where(show, S, float("-inf"))
    P, share = powers(S, top, above, unit, FAST)
    share = gl.where(i >= low, share, 0.0)
    end = i0 + ROWS
    while i0 < end:
        total += columns(P * gl.where(i < bottom, share, 0.0)[:, None], BN)
        share = gl.where(i < bottom, 0.0, share)
        i0 = bottom
        if bottom <= end:
            cells_, first, spot = put(total, cells_, first, spot, y0, x, part, start, stop, out, grid, item, h, heads, high, n, M, BN)
            total = total * 0.0
            y += 1
            bottom = edge(y + 1, grid[0], n)
    return total, cells_, first, spot, y, bottom


@gluon.jit
def sum_pooled(given, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr,
               CAP: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr):
    """The warp group: the weights of a program's keys, row after row, summed by cells."""
    described, X, barriers, facts, out, numbers, bias, where, n, M, grid, key_blocks, columns_, owners, heads, groups, section = given
    k_ready, ready, free = barriers
    scale, scales, cap = numbers
    SL: gl.constexpr = product(BN)
    column, band, item, h = whose(grid, heads, owners, columns_, section)
    x, part, start, stop = keys_of(grid, column, M, BN)
    b0, full, until, b1, low, high = seat_of(grid, where, item, h, column, band, n, MASK)
    if SCALES:
        scale = gl.load(scales + h)
    unit = scale * LOG2E
    rows = (item.to(gl.int64) * heads + h) * n
    j = start + gl.arange(0, BN, gl.SliceLayout(0, SL))  # [BN]
    none = gl.zeros([ROWS, BN], gl.float32, SL)
    total = columns(none, BN)  # [4, 8, BN]
    cells_ = gl.zeros([4, 32], gl.float32, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    y0 = gl.maximum(b0 * PAIR, low) * grid[0] // n
    y = y0
    bottom = edge(y + 1, grid[0], n)
    first = 0
    spot = 0
    stage = 0
    parity = 0
    mbarrier.wait(k_ready, 0)
    for b in range(b0, b1):
        i = b * PAIR + gl.arange(0, ROWS, gl.SliceLayout(1, SL))  # [ROWS]
        slots, masked = hides(where, item, h, b, full, until, start, stop, key_blocks, MASK)
        after, after_parity = advance(stage, parity, STAGES)
        S, top, above = begin(X, barriers, facts, rows, i, n, stage, parity, none, DA, DB, BN)
        S2, top2, above2 = begin(X, barriers, facts, rows, i + ROWS, n, after, after_parity, none, DA, DB, BN)
        S = warpgroup_mma_wait(2 if DB > 0 else 1, deps=[S])
        mbarrier.arrive(free.index(stage))
        total, cells_, first, spot, y, bottom = settle(
            S, top, above, total, cells_, first, spot, y, bottom, y0, b * PAIR, i, j, x, part, start, stop, low, high, masked, slots, grid, out,
            item, h, heads, scale, unit, cap, bias, where, n, M, BN, MASK, BIAS, CAP, FAST)
        S2 = ready_for(S2, k_ready)
        mbarrier.arrive(free.index(after))
        total, cells_, first, spot, y, bottom = settle(
            S2, top2, above2, total, cells_, first, spot, y, bottom, y0, b * PAIR + ROWS, i + ROWS, j, x, part, start, stop, low, high, masked,
            slots, grid, out, item, h, heads, scale, unit, cap, bias, where, n, M, BN, MASK, BIAS, CAP, FAST)
        stage, parity = advance(after, after_parity, STAGES)
    cells_, first, spot = put(total, cells_, first, spot, y0, x, part, start, stop, out, grid, item, h, heads, high, n, M, BN)
    write_cells(cells_, first, spot, y0, x, part, out, grid, item, h, heads, high, n, M)


@gluon.jit(do_not_specialize=["where", "n", "M", "height", "width", "cells", "parts", "bands", "key_blocks", "columns_", "owners", "heads", "groups", "section"])
def pooled(q, qb, k, kb, out, peak, spread, scale, scales, cap, bias, where, n, M, height, width, cells, parts, bands, key_blocks, columns_, owners,
           heads, groups, section, DA: gl.constexpr, DB: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
           BIAS: gl.constexpr, CAP: gl.constexpr, SCALES: gl.constexpr, FAST: gl.constexpr):
    """The mean weight in each cell of a grid over n × M: program (some columns of cells or a part of one, some rows, item and head).

    Row i is in row ⌊i·height/n⌋ of the grid, key j in column ⌊j·width/M⌋. A program has the keys of `cells` columns, or of
    one of the `parts` of a column that is wider than BN; and `bands` rows of cells, of which it writes all that it meets.
    """
    X, barriers = rooms(q, qb, k, kb, DA, DB, BN, STAGES)
    grid = (height, width, cells, parts, bands)
    given = ((q, qb, k, kb), X, barriers, (peak, spread), out, (scale, scales, cap), bias, where, n, M, grid, key_blocks, columns_, owners, heads,
             groups, section)
    gl.warp_specialize([
        (sum_pooled, (given, DA, DB, BN, STAGES, MASK, BIAS, CAP, SCALES, FAST)),
        (copy_pooled, (given, DA, DB, BN, STAGES, MASK)),
    ], [1], [COPYING])
