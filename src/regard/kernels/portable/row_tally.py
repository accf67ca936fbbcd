"""Count rows: their statistics, histograms and sums of these by bucket, what tokens receive, and the best rows.

Every sum is one of whole numbers, so atomics give the same in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...chunked.statistics import SATURATED
from .tile_ops import program_tile

_SATURATED = tl.constexpr(SATURATED)
_ONE = tl.constexpr(2**48)  # counts one in a packed sum, beside a sum within ±2^46
_HALF = tl.constexpr(2**47)
_LARGEST = tl.constexpr(2.0**36)  # units of a row, at most: 1024 of them are within ±2^46
_ROUNDING = tl.constexpr(1.5 * 2.0**52)  # float64 plus this has no bits below 1
_LOW = tl.constexpr(0xFFFFFFFF)
_LOG, _ASINH = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def rounded(x):
    """The whole number next to float64 x, within ±2^51; ties to even: int64."""
    return ((x + _ROUNDING) - _ROUNDING).to(tl.int64)


@triton.jit
def store_value(out, at, size, value, applies, broken, inside):
    """Store a statistic: NaN in rows that are broken, −inf where it does not apply. Returns the next place, and what was stored."""
    value = tl.where(applies, tl.where(broken, float("nan"), value), float("-inf"))
    tl.store(out + at, value, mask=inside)
    return out + size, value


@triton.jit
def store_score(out, at, size, score, inside):
    """Store a score, −1 for none, and return the next place."""
    tl.store(out + at, tl.where(score > 0, score, tl.where(score == 0, 0.0, -1.0)), mask=inside)
    return out + size


@triton.jit
def add_to_column(table, column, x, unit, chosen):
    """Add numbers x [BR], as whole numbers of a unit, to columns of a head's row of a table."""
    finite = (x == x) & (tl.abs(x) != float("inf"))
    whole = rounded(tl.where(finite, x, 0.0).to(tl.float64) * unit)
    tl.atomic_add(table + column, whole, mask=chosen & (whole != 0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "m", "heads", "items", "width"])
def row_values(stats, survey, repeats, labels, tables, sink, values, scores, n, m, heads, items, width, unit: tl.constexpr, BR: tl.constexpr):
    """Each statistic of BR rows in the order of a census, and their scores: program (block of rows, batch item and head).

    Statistics come as (L, H, N) and leave as (statistics, H, L · N). What the row's token receives as a key, and how active the head
    is where it is the query, is added to the column of the token.
    """
    block, owner = program_tile(tl.cdiv(n, BR))
    item, head = owner // heads, owner % heads
    i = block * BR + tl.arange(0, BR)
    inside = i < n
    row = item.to(tl.int64) * n + i  # among the rows of the batch
    at = owner.to(tl.int64) * n + i
    size = items.to(tl.int64) * n * heads
    out_at = head.to(tl.int64) * items * n + row
    counted = inside
    if labels.counted is not None:
        counted = tl.load(labels.counted + row, mask=inside, other=0) != 0
    entropy = tl.load(stats.entropy + at, mask=inside, other=0.0)
    lse = tl.load(stats.lse + at, mask=inside, other=0.0)
    row_max = tl.load(stats.row_max + at, mask=inside, other=0.0)
    visible = tl.load(survey.visible + at, mask=inside, other=0).to(tl.int32)
    key = tl.load(survey.key + at, mask=inside, other=-1).to(tl.int32)
    largest = tl.load(survey.largest + at, mask=inside, other=0.0)
    place = i + m - n  # of the row among the keys
    some, several = counted & (visible > 0), counted & (visible > 1)
    broken = (entropy != entropy) | (row_max == float("inf"))
    keys = tl.log(tl.maximum(visible, 2).to(tl.float32))
    total = tl.full([BR], 1.0, tl.float32)
    if sink is not None:
        total -= tl.exp(tl.load(sink + head) - lse)
    out, stored_entropy = store_value(values, out_at, size, entropy, some, broken, inside)
    out, _ = store_value(out, out_at, size, entropy / keys, several, broken, inside)
    out, _ = store_value(out, out_at, size, tl.exp(entropy), some, broken, inside)
    out, _ = store_value(out, out_at, size, row_max, some, broken, inside)
    out, _ = store_value(out, out_at, size, tl.load(survey.first + at, mask=inside, other=0.0), some, broken, inside)
    out, _ = store_value(out, out_at, size, tl.load(survey.own + at, mask=inside, other=0.0), some & (place >= 0), broken, inside)
    out, _ = store_value(out, out_at, size, tl.load(survey.previous + at, mask=inside, other=0.0), some & (place >= 1), broken, inside)
    out, _ = store_value(out, out_at, size, (tl.exp(row_max - lse) > _SATURATED).to(tl.float32), several, broken, inside)
    out, distance = store_value(out, out_at, size, tl.load(survey.distance + at, mask=inside, other=0.0), some, broken, inside)
    health = tl.load(survey.health + at, mask=inside, other=0.0)
    out, _ = store_value(out, out_at, size, total - health, some, broken, inside)
    induction, duplicate = total, total
    after, same = some & False, some & False
    if repeats is not None:
        induction = tl.load(repeats.induction + at, mask=inside, other=0.0)
        duplicate = tl.load(repeats.duplicate + at, mask=inside, other=0.0)
        back = tl.load(labels.induction_back + row, mask=inside, other=0).to(tl.int32)
        after = some & (back > 0) & (back < visible)
        back = tl.load(labels.duplicate_back + row, mask=inside, other=0).to(tl.int32)
        same = some & (back > 0) & (back < visible)
    out, induction = store_value(out, out_at, size, induction, after, broken, inside)
    out, duplicate = store_value(out, out_at, size, duplicate, same, broken, inside)
    seen_from = tl.load(labels.seen_from + item).to(tl.int32)
    first = tl.where(seen_from > 0, m - seen_from, 0)
    away = (key >= 0) & (tl.abs(key - place) > 1) & (key != first)
    active = tl.where(away & (largest == largest), largest, 0.0)
    out = store_score(scores, out_at, size, tl.where(counted & (active > 0), active, -1.0), inside)
    out = store_score(out, out_at, size, tl.where(several, keys - entropy, -1.0), inside)
    out = store_score(out, out_at, size, induction, inside)
    out = store_score(out, out_at, size, duplicate, inside)
    out = store_score(out, out_at, size, distance, inside)
    out = store_score(out, out_at, size, stored_entropy, inside)
    if labels.column is not None:
        column = tl.load(labels.column + row, mask=counted, other=0) + head.to(tl.int64) * width
        add_to_column(tables.active, column, active, unit, counted)
        if tables.received is not None:
            received = tl.load(survey.received + owner.to(tl.int64) * m + i, mask=inside, other=0.0)
            add_to_column(tables.received, column, received, unit, counted)


@triton.jit
def add_by_bucket(packed, bucket, sums, counts):
    """Add packed numbers [BR], 0 for none, to the sum and the count of the bucket of each."""
    first = tl.min(tl.where(packed != 0, bucket, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(packed != 0, bucket, -1), 0)
    for b in range(first, last + 1):
        total = tl.sum(tl.where(bucket == b, packed, 0), 0)
        count = (total + _HALF) >> 48
        if count > 0:
            tl.atomic_add(counts + b, count, sem="relaxed")
            tl.atomic_add(sums + b, total - (count << 48), sem="relaxed")


@triton.jit
def bin_of(x, low, step, transform, BINS: tl.constexpr):
    """The bins of defined values [BR]."""
    transformed = x
    if transform == _LOG:
        transformed = tl.log(1.0 + x)
    elif transform == _ASINH:
        size = tl.abs(x)
        transformed = tl.log(size + tl.sqrt(size * size + 1.0))
        transformed = tl.where(x < 0, -transformed, transformed)
    return tl.minimum(tl.maximum((transformed - low) * step, 0.0), BINS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "heads", "lengths", "classes"])
def tally_values(values, scales, buckets, tally, rows, heads, lengths, classes, BINS: tl.constexpr, BR: tl.constexpr, STEPS: tl.constexpr):
    """Count STEPS · BR rows of one statistic of one head: program (block of rows, statistic and head).

    `scales` has low, bins per unit, transform and units per 1 of each statistic. One warp does it, so that none waits for another.
    """
    block, owner = program_tile(tl.cdiv(rows, STEPS * BR))
    scale = scales + (owner // heads) * 4
    low, step = tl.load(scale).to(tl.float32), tl.load(scale + 1).to(tl.float32)
    transform, unit = tl.load(scale + 2).to(tl.int32), tl.load(scale + 3)
    found = tl.zeros([BINS], tl.int32)
    broken = tl.zeros([BR], tl.int32)
    smallest, largest = tl.full([BR], float("inf"), tl.float32), tl.full([BR], float("-inf"), tl.float32)
    for part in range(STEPS):
        r = (block * STEPS + part) * BR + tl.arange(0, BR)
        inside = r < rows
        x = tl.load(values + owner.to(tl.int64) * rows + r, mask=inside, other=float("-inf"))
        defined = (x == x) & (tl.abs(x) != float("inf"))
        broken += (x != x).to(tl.int32)
        smallest = tl.minimum(smallest, tl.where(defined, x, float("inf")))
        largest = tl.maximum(largest, tl.where(defined, x, float("-inf")))
        x = tl.where(defined, x, 0.0)
        found += tl.histogram(bin_of(x, low, step, transform, BINS), BINS, mask=defined)
        units = tl.minimum(tl.maximum(x.to(tl.float64) * unit, -_LARGEST), _LARGEST)
        packed = tl.where(defined, rounded(units) + _ONE, 0)
        position = tl.load(buckets.position + r, mask=inside, other=0)
        add_by_bucket(packed, position, tally.position_sum + owner * lengths, tally.position_count + owner * lengths)
        length = tl.load(buckets.length + r, mask=inside, other=0)
        add_by_bucket(packed, length, tally.length_sum + owner * lengths, tally.length_count + owner * lengths)
        kind = tl.load(buckets.kind + r, mask=inside, other=0)
        add_by_bucket(packed, kind, tally.class_sum + owner * classes, tally.class_count + owner * classes)
    b = tl.arange(0, BINS)
    tl.atomic_add(tally.histogram + owner * (2 * BINS) + b, found.to(tl.int64), mask=found > 0, sem="relaxed")
    undefined = tl.sum(broken, 0)
    if undefined > 0:
        tl.atomic_add(tally.undefined + owner, undefined.to(tl.int64), sem="relaxed")
    highest = tl.max(largest, 0)
    if highest > float("-inf"):
        tl.atomic_min(tally.smallest + owner, tl.min(smallest, 0).to(tl.float64), sem="relaxed")
        tl.atomic_max(tally.largest + owner, highest.to(tl.float64), sem="relaxed")


@triton.jit(do_not_specialize=["size", "count"])
def best_rows(given, floor, out, size, count, PLACES: tl.constexpr, BR: tl.constexpr):
    """The ranks of the best of BR rows, the best first: program (block of rows, behaviour and head).

    A rank has the bits of a score above those of 2^32 − 1 − row, so that the first of equal rows wins; −1 is none. `given` are the
    scores of all rows, or ranks of some. What is below the floor of the behaviour and head is left out.
    """
    block, owner = program_tile(tl.cdiv(size, BR))
    r = block * BR + tl.arange(0, BR)
    at = given + owner.to(tl.int64) * size + r
    if given.dtype.element_ty == tl.int64:
        ranks = tl.load(at, mask=r < size, other=-1)
    else:
        x = tl.load(at, mask=r < size, other=-1.0)
        bits = x.to(tl.int32, bitcast=True).to(tl.int64)
        ranks = tl.where(x >= tl.maximum(tl.load(floor + owner), 0.0), (bits << 32) | (_LOW - r.to(tl.int64)), -1)
    out += (owner.to(tl.int64) * tl.cdiv(size, BR) + block) * count
    place = 0
    best = tl.max(ranks, 0)
    while (place < count) & (best >= 0):
        tl.store(out + place, best)
        ranks = tl.where(ranks == best, -1, ranks)
        best = tl.max(ranks, 0)
        place += 1
    rest = tl.arange(0, PLACES)
    tl.store(out + rest, tl.full([PLACES], -1, tl.int64), mask=(rest >= place) & (rest < count))


@triton.jit(do_not_specialize=["m", "groups", "step"], do_not_specialize_on_alignment=["at", "out", "out_lse"])
def row_products(query, key, lse, at, out, out_lse, strides, m, groups, step, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    """The products of one row with BN keys, and its lse: program (block of keys, row); `at` has heads, items and rows, `step` apart."""
    block, one = program_tile(tl.cdiv(m, BN))
    head, item, row = tl.load(at + one), tl.load(at + step + one), tl.load(at + 2 * step + one)
    q_strides, k_strides, l_strides = strides
    if block == 0:
        tl.store(out_lse + one, tl.load(lse + item * l_strides[0] + head * l_strides[1] + row * l_strides[2]))
    d = tl.arange(0, DP)
    j = block * BN + tl.arange(0, BN)
    inside = (j < m)[:, None] & (d < D)[None, :]
    Q = tl.load(query + item * q_strides[0] + head * q_strides[1] + row * q_strides[2] + d * q_strides[3], mask=d < D, other=0.0)
    to = key + item * k_strides[0] + head // groups * k_strides[1] + j.to(tl.int64)[:, None] * k_strides[2] + d[None, :] * k_strides[3]
    K = tl.load(to, mask=inside, other=0.0)  # [BN, DP]
    tl.store(out + one.to(tl.int64) * m + j, tl.sum(K.to(tl.float32) * Q.to(tl.float32)[None, :], 1), mask=j < m)
