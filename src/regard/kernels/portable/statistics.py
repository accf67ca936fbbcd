"""Statistics of the weights, from q, k and what the forward pass found: passes that never hold n × m numbers.

P = exp(S − row max − log row sum), with the largest logit and ln of the denominator of each row: exact even where logits
are large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...chunked.statistics import SATURATED, RowTotals
from ..arguments import Sizes
from .aggregates import Head, Matrices
from .program import (
    head_logits,
    k_at,
    load_k,
    load_q,
    load_row_tile,
    over_keys,
    over_rows,
    program_head,
    q_at,
    raw_scores,
    raw_scores_transposed,
)
from .tile_ops import _BIAS_NONE, _BITS, LOG2E, mask_tile, program_tile, row_offset, unaligned_mask_tile

_SATURATED = tl.constexpr(SATURATED)
_TOTALS = tl.constexpr(len(RowTotals._fields))


@triton.jit
def masked_logits(Q, x, head, rows, j0, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """The logits [BM, BN] of rows and the keys j0 … j0 + BN, −inf where hidden; FAST leaves them raw products."""
    j = j0 + tl.arange(0, C.BN)
    S = raw_scores(Q, load_k(x, head, j0, C, True), x, head, rows.i, j, C)
    if not C.FAST:
        S, show = head_logits(S, rows, j, head, C)
        if C.BIAS != _BIAS_NONE:
            S = tl.where(show, S, float("-inf"))
    if MASKED:
        S = tl.where(mask_tile(head.blocks, rows.lo, rows.hi, slot, rows.i, j, C.MASK), S, float("-inf"))
    return S


@triton.jit
def load_normalizer(stats, head, i, C: tl.constexpr):
    """What is subtracted from the logits of rows i, and the log row sum in log2 units: [BM] each."""
    n = head.sizes.n
    first = head.first_row
    offset = row_offset(tl.load(stats.row_max + first + i, mask=i < n, other=float("-inf")), C.FAST)
    return offset, tl.load(stats.log_row_sum + first + i, mask=i < n, other=0.0) * LOG2E


@triton.jit
def weights(S, stats, head, i, C: tl.constexpr):
    """The weights [BM, BN] of logits; 0 in a row that attends to nothing."""
    offset, log_sum = load_normalizer(stats, head, i, C)
    T = S * head.unit - offset[:, None] if C.FAST else (S - offset[:, None]) * LOG2E
    return tl.exp2(T - log_sum[:, None])


@triton.jit
def received_step(total, K, x, head, stats, j, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add the weights [BN, BM] of keys j and block b of the rows."""
    i = b * C.BM + tl.arange(0, C.BM)
    rows = load_row_tile(head, i, C, MASKED)
    S = raw_scores_transposed(load_q(x, head, b * C.BM, C), K, x, head, i, j, C)
    offset, log_sum = load_normalizer(stats, head, i, C)
    if C.FAST:
        T = S * head.unit - offset[None, :]
    else:
        S, show = head_logits(tl.trans(S), rows, j, head, C)
        if C.BIAS != _BIAS_NONE:
            S = tl.where(show, S, float("-inf"))
        T = (tl.trans(S) - offset[None, :]) * LOG2E
    P = tl.exp2(T - log_sum[None, :])
    if MASKED:
        P = tl.where(tl.trans(mask_tile(head.blocks, rows.lo, rows.hi, slot, i, j, C.MASK)), P, 0.0)
    return total + P


@triton.jit(do_not_specialize=["n", "m", "heads", "groups"])
def received(q, k, out, stats, args, n, m, heads, groups, C: tl.constexpr):
    """Σ over rows of the weight of BN keys: program (block of keys, batch item and query head); summed once, at the end."""
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(tl.cdiv(m, C.BN))
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
    j = block * C.BN + tl.arange(0, C.BN)
    K = load_k(x, head, block * C.BN, C, True)
    total = over_rows(received_step, tl.zeros([C.BN, C.BM], tl.float32), (K, x, head, stats, j), head, block, C)
    tl.store(out + (head.batch.to(tl.int64) * heads + head.index) * m + j, tl.sum(total, 1), mask=j < m)


@triton.jit
def moments_step(sums, Q, x, head, stats, rows, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add block b of the keys."""
    free, far = sums
    j = b * C.BN + tl.arange(0, C.BN)
    P = weights(masked_logits(Q, x, head, rows, b * C.BN, slot, C, MASKED), stats, head, rows.i, C)
    free += tl.sum(P - P * P, 1)
    place = rows.i + head.sizes.m - head.sizes.n  # [BM], the row's own position among the keys: the ends of both are aligned
    far += tl.sum(P * tl.abs(place[:, None] - j[None, :]).to(tl.float32), 1)
    return free, far


@triton.jit(do_not_specialize=["n", "m", "heads", "groups"])
def moments(q, k, health, distance, stats, args, n, m, heads, groups, C: tl.constexpr):
    """Σ p (1 − p) and Σ p |i + m − n − j| of BM rows: program (block of rows, batch item and head)."""
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(tl.cdiv(n, C.BM))
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
    i = block * C.BM + tl.arange(0, C.BM)
    Q = load_q(x, head, block * C.BM, C)
    rows = load_row_tile(head, i, C, True)
    zero = tl.zeros([C.BM], tl.float32)
    free, far = over_keys(moments_step, (zero, zero), (Q, x, head, stats, rows), head, block, C)
    tl.store(health + head.first_row + i, free, mask=i < n)
    tl.store(distance + head.first_row + i, far, mask=i < n)


@triton.jit
def band_edge(x, cells, length):
    """The first of `length` rows or keys in the x-th of `cells`."""
    return ((x.to(tl.int64) * length + cells - 1) // cells).to(tl.int32)


@triton.jit
def part_of_weights(Q, x, head, rows, hi, j0, right, stats, key_blocks, C: tl.constexpr):
    """The weights [BM, BN] of rows up to their `hi`, and of the keys from j0 to `right`; 0 elsewhere. Any j0 will do."""
    j = j0 + tl.arange(0, C.BN)
    S = masked_logits(Q, x, head, rows, j0, 0, C, False)
    show = unaligned_mask_tile(head.blocks, head.batch, head.index, rows.lo, hi, rows.i, j, key_blocks, C.MASK)
    show = show & (j < right)[None, :] & (hi > rows.lo)[:, None]
    return tl.where(show, weights(S, stats, head, rows.i, C), 0.0)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "height", "width", "key_blocks"])
def pooled(q, k, out, stats, args, n, m, heads, groups, height, width, key_blocks, C: tl.constexpr):
    """The mean weight of one cell of a grid over n × m: program (cell, batch item and head).

    Row i is in row ⌊i·height/n⌋ of the grid, key j in column ⌊j·width/m⌋; a program goes over exactly its rows and keys.
    """
    sizes = Sizes(n, m, heads, groups)
    cell, owner = program_tile(height * width)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    row, column = cell // width, cell % width
    x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
    top, bottom = band_edge(row, height, n), band_edge(row + 1, height, n)
    left, right = band_edge(column, width, m), band_edge(column + 1, width, m)
    total = tl.zeros([C.BM, C.BN], tl.float32)
    for i0 in range(top, bottom, C.BM):
        i = i0 + tl.arange(0, C.BM)
        rows = load_row_tile(head, i, C, True)
        hi = tl.where(i < bottom, rows.hi, 0)  # the rows of the next cell are not ours
        start = tl.maximum(left, tl.min(tl.where(hi > rows.lo, rows.lo, m), 0))
        stop = tl.minimum(right, tl.max(hi, 0))
        if start < stop:
            Q = load_q(x, head, i0, C)
            for j0 in range(start, stop, C.BN):
                total += part_of_weights(Q, x, head, rows, hi, j0, right, stats, key_blocks, C)
    area = (bottom - top).to(tl.float32) * (right - left).to(tl.float32)
    at = ((head.batch.to(tl.int64) * heads + head.index) * height + row) * width + column
    tl.store(out + at, tl.sum(tl.sum(total, 1), 0) / area)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "bands", "key_blocks"])
def received_by_bands(q, k, out, stats, args, n, m, heads, groups, bands, key_blocks, C: tl.constexpr):
    """Σ over one band of rows of the weight of BN keys: program (block of keys, band, batch item and head).

    Row i is in band ⌊i·bands/n⌋; a program goes over exactly the rows of its band.
    """
    block, owner = program_tile(tl.cdiv(m, C.BN))
    band = owner % bands
    owner = owner // bands
    sizes = Sizes(n, m, heads, groups)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
    top, bottom = band_edge(band, bands, n), band_edge(band + 1, bands, n)
    j0 = block * C.BN
    j = j0 + tl.arange(0, C.BN)
    total = tl.zeros([C.BM, C.BN], tl.float32)
    for i0 in range(top, bottom, C.BM):
        i = i0 + tl.arange(0, C.BM)
        rows = load_row_tile(head, i, C, True)
        hi = tl.where(i < bottom, rows.hi, 0)  # the rows of the next band are not ours
        if (tl.min(tl.where(hi > rows.lo, rows.lo, m), 0) < j0 + C.BN) & (tl.max(hi, 0) > j0):
            Q = load_q(x, head, i0, C)
            total += part_of_weights(Q, x, head, rows, hi, j0, m, stats, key_blocks, C)
    at = ((head.batch.to(tl.int64) * heads + head.index) * bands + band) * m
    tl.store(out + at + j, tl.sum(total, 0), mask=j < m)


@triton.jit
def load_bands(bands, y, j, height, right, m):
    """What keys j receive from bands y, [BY, BX]; 0 beyond both."""
    inside = (y < height)[:, None] & (j < right)[None, :]
    return tl.load(bands + y.to(tl.int64)[:, None] * m + j[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["n", "m", "heads", "height", "width"])
def fold_bands(bands, received, cells, peaks, first, n, m, heads, height, width, BY: tl.constexpr, BX: tl.constexpr):
    """What keys receive from all bands, and the mean weights in cells: program (column of cells, batch item and head).

    `peaks` gets what the keys of each column receive in sum and at most (NaN if one is), and the first key with the most.
    `first` begins as 0, and ends as m less the first key that receives weight in any head of each batch item.
    """
    column, owner = program_tile(width)
    left, right = band_edge(column, width, m), band_edge(column + 1, width, m)
    bands += owner.to(tl.int64) * height * m
    nearest, sums, most, key, nans = m, 0.0, -1.0, 0, 0
    for j0 in range(left, right, BX):
        j = j0 + tl.arange(0, BX)
        total = tl.zeros([BX], tl.float32)
        for y0 in range(0, height, BY):
            total += tl.sum(load_bands(bands, y0 + tl.arange(0, BY), j, height, right, m), 0)
        tl.store(received + owner.to(tl.int64) * m + j, total, mask=j < right)
        nearest = tl.minimum(nearest, tl.min(tl.where(total > 0, j, m), 0))
        sums += tl.sum(total, 0)
        nans += tl.sum((total != total).to(tl.int32), 0)
        here = tl.max(tl.where((j < right) & (total == total), total, -1.0), 0)
        key = tl.where(here > most, tl.min(tl.where(total == here, j, m), 0), key)
        most = tl.maximum(most, here)
    at = peaks + (owner.to(tl.int64) * width + column) * 3
    tl.store(at, sums.to(tl.float64))
    tl.store(at + 1, tl.where(nans > 0, float("nan"), most).to(tl.float64))
    tl.store(at + 2, key.to(tl.float64))
    tl.atomic_max(first + owner // heads, (m - nearest).to(tl.int64), sem="relaxed")
    for y0 in range(0, height, BY):
        y = y0 + tl.arange(0, BY)
        total = tl.zeros([BY], tl.float32)
        for j0 in range(left, right, BX):
            total += tl.sum(load_bands(bands, y, j0 + tl.arange(0, BX), height, right, m), 1)
        area = (band_edge(y + 1, height, n) - band_edge(y, height, n)).to(tl.float32) * (right - left).to(tl.float32)
        tl.store(cells + (owner.to(tl.int64) * height + y) * width + column, total / area, mask=y < height)


@triton.jit
def row_survey_step(sums, Q, x, head, normalizer, rows, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add block b of the keys to the sums of a tile of rows."""
    free, far, on_first, own, previous, best, key, count = sums
    offset, log_sum, first = normalizer
    j0 = b * C.BN
    j = j0 + tl.arange(0, C.BN)
    S = masked_logits(Q, x, head, rows, j0, slot, C, MASKED)
    T = S * head.unit - offset[:, None] if C.FAST else (S - offset[:, None]) * LOG2E  # [BM, BN], log2 of p · row sum
    P = tl.exp2(T - log_sum[:, None])
    place = rows.i + head.sizes.m - head.sizes.n  # [BM], the row's own position among the keys
    apart = place.to(tl.float32)[:, None] - j.to(tl.float32)[None, :]
    free += tl.sum(P - P * P, 1)
    far += tl.sum(P * tl.abs(apart), 1)
    strongest = tl.max(T, 1)
    at = tl.min(tl.where(T == strongest[:, None], j[None, :], 0x7FFFFFFF), 1)
    # Blocks do not come in the order of their keys, so a tie is decided by the key.
    better = (strongest > best) | ((strongest == best) & (at < key))
    best, key = tl.where(better, strongest, best), tl.where(better, at, key)
    if (j0 <= tl.max(place, 0)) & (j0 + C.BN >= tl.min(place, 0)):  # the diagonal passes through the tile, or beside it
        own += tl.sum(tl.where(j[None, :] == place[:, None], P, 0.0), 1)
        previous += tl.sum(tl.where(j[None, :] == place[:, None] - 1, P, 0.0), 1)
    if (j0 <= first) & (first < j0 + C.BN):
        on_first += tl.sum(tl.where((j == first)[None, :], P, 0.0), 1)
    if (C.MASK == _BITS) | (C.BIAS != _BIAS_NONE) | C.POINTWISE:
        count += tl.sum((S != float("-inf")).to(tl.int32), 1)
    return free, far, on_first, own, previous, best, key, count


@triton.jit
def sum_over(x, chosen):
    """The sum of a statistic [BM] over the chosen rows."""
    return tl.sum(tl.where(chosen, x, 0.0), 0)


@triton.jit
def store_row_totals(out, sums, count, stats, head, i, log_sum):
    """Store the sums over rows i that `chunked.statistics.RowTotals` names, in its order."""
    free, far, on_first, own, previous, best, key, _ = sums
    inside, place = i < head.sizes.n, i + head.sizes.m - head.sizes.n
    some, several = inside & (count > 0), inside & (count > 1)
    entropy = tl.load(stats.entropy + head.first_row + i, mask=inside, other=0.0)
    row_max = tl.load(stats.row_max + head.first_row + i, mask=inside, other=float("-inf"))
    broken = tl.where(entropy != entropy, float("nan"), 0.0)  # rows whose logits are not finite have no weights
    shown = tl.maximum(count, 1).to(tl.float32)
    with_own, with_previous = some & (place >= 0), some & (place >= 1)
    saturated = (tl.exp2(-log_sum) > _SATURATED).to(tl.float32)
    highest = tl.max(tl.where(row_max == row_max, row_max, float("-inf")), 0)
    tl.store(out, tl.sum(some.to(tl.float32), 0))
    tl.store(out + 1, tl.sum(several.to(tl.float32), 0))
    tl.store(out + 2, tl.sum(with_own.to(tl.float32), 0))
    tl.store(out + 3, tl.sum(with_previous.to(tl.float32), 0))
    tl.store(out + 4, sum_over(entropy, some))
    tl.store(out + 5, sum_over(entropy / tl.log(tl.maximum(shown, 2.0)), several))
    tl.store(out + 6, sum_over(tl.exp(entropy), some))
    tl.store(out + 7, sum_over(on_first + broken, some))
    tl.store(out + 8, sum_over(own + broken, with_own))
    tl.store(out + 9, sum_over(previous + broken, with_previous))
    tl.store(out + 10, sum_over(saturated + broken, several))
    tl.store(out + 11, sum_over(far, some))
    tl.store(out + 12, sum_over(free, some))
    tl.store(out + 13, sum_over(1.0 / shown, some))
    tl.store(out + 14, tl.where(tl.max((row_max != row_max).to(tl.int32), 0) > 0, float("nan"), highest))


@triton.jit(do_not_specialize=["n", "m", "heads", "groups"])
def row_survey(q, k, out, first, stats, args, n, m, heads, groups, C: tl.constexpr):
    """Every sum over the keys of BM rows, and their strongest key: program (block of rows, batch item and head).

    `first` has m less the key of each batch item whose weight is stored for every row; 0 for none.
    """
    row_blocks = tl.cdiv(n, C.BM)
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(row_blocks)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    block = row_blocks - 1 - block  # under a causal mask the last rows have the most work, and start first
    x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
    i = block * C.BM + tl.arange(0, C.BM)
    Q = load_q(x, head, block * C.BM, C)
    rows = load_row_tile(head, i, C, True)
    offset, log_sum = load_normalizer(stats, head, i, C)
    normalizer = (offset, log_sum, m - tl.load(first + head.batch))
    zero = tl.zeros([C.BM], tl.float32)
    sums = (zero, zero, zero, zero, zero, zero + float("-inf"), i * 0 + 0x7FFFFFFF, i * 0)
    sums = over_keys(row_survey_step, sums, (Q, x, head, normalizer, rows), head, block, C)
    free, far, on_first, own, previous, best, key, count = sums
    if not ((C.MASK == _BITS) | (C.BIAS != _BIAS_NONE) | C.POINTWISE):
        count = tl.maximum(rows.hi - rows.lo, 0)
    at, inside = head.first_row + i, i < n
    tl.store(out.health + at, free, mask=inside)
    tl.store(out.distance + at, far, mask=inside)
    tl.store(out.first + at, on_first, mask=inside)
    tl.store(out.own + at, own, mask=inside)
    tl.store(out.previous + at, previous, mask=inside)
    tl.store(out.largest + at, tl.exp2(best - log_sum), mask=inside)
    tl.store(out.key + at, tl.where(best == float("-inf"), -1, key).to(tl.int64), mask=inside)
    tl.store(out.visible + at, count.to(tl.int64), mask=inside)
    place = owner.to(tl.int64) * row_blocks + block
    store_row_totals(out.totals + place * _TOTALS, sums, count, stats, head, i, log_sum)


@triton.jit
def rank(S, j):
    """Numbers that order pairs by (logit, then lower key): int64 [BM, BN]; the lowest of all for hidden pairs."""
    bits = (S + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(S == float("-inf"), -0x8000000000000000, (order << 32) | (0xFFFFFFFF - j.to(tl.int64))[None, :])


@triton.jit
def empty_ranks(k_best, C: tl.constexpr):
    """Ranks [BM, KP] that every pair beats in the first k_best places, and none in the others."""
    best = tl.full([C.BM, C.KP], -0x8000000000000000, tl.int64)
    return tl.where((tl.arange(0, C.KP) < k_best)[None, :], best, 0x7FFFFFFFFFFFFFFF)


@triton.jit
def insert(best, S, j):
    """Let the pairs of a tile compete with the best [BM, KP] so far, the strongest of each row at a time."""
    R = rank(S, j)  # [BM, BN]
    strongest = tl.max(R, 1)  # [BM]
    weakest = tl.min(best, 1)
    while tl.max((strongest > weakest).to(tl.int32), 0) > 0:
        better = strongest > weakest  # [BM]
        best = tl.where((best == weakest[:, None]) & (tl.cumsum((best == weakest[:, None]).to(tl.int32), 1) == 1) & better[:, None],
                        strongest[:, None], best)
        R = tl.where(R == strongest[:, None], -0x8000000000000000, R)
        strongest = tl.max(R, 1)
        weakest = tl.min(best, 1)
    return best


@triton.jit
def top_step(best, Q, x, head, rows, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Let block b of the keys compete."""
    return insert(best, masked_logits(Q, x, head, rows, b * C.BN, slot, C, MASKED), b * C.BN + tl.arange(0, C.BN))


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "k_best"])
def top(q, k, out, args, n, m, heads, groups, k_best, C: tl.constexpr):
    """The ranks of the KP strongest pairs of BM rows, in no order: program (block of rows, batch item and head)."""
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(tl.cdiv(n, C.BM))
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
    i = block * C.BM + tl.arange(0, C.BM)
    Q = load_q(x, head, block * C.BM, C)
    rows = load_row_tile(head, i, C, True)
    slots = tl.arange(0, C.KP)
    best = over_keys(top_step, empty_ranks(k_best, C), (Q, x, head, rows), head, block, C)
    at = (head.first_row + i)[:, None] * C.KP + slots[None, :]
    tl.store(out + at, best, mask=(i < n)[:, None])
