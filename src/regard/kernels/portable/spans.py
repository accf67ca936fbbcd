"""One small kernel that turns a mask of one interval per row into everything that other kernels read of it.

A mask is an `&` of conditions on row i and key j, each with two ends that never fall from row to row (`SpanTerms`). So the
keys of a row are an interval, and so are the rows of a key. Both are computed directly, by `_keys_of` and `_rows_of`, and no
program waits for another. Tensors come as addresses and all else as 64-bit integers, so nothing is compiled for a mask.
"""

# fmt: off
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..span_terms import ENDS, FAR, LENGTHS, NO_TABLE, SORTED_IDS, SPAN_TABLE

__all__ = ["CHUNK", "Terms", "spans"]

CHUNK = 128  # rows or keys of a program
_SIZE = tl.constexpr(CHUNK)
_PAIRS = tl.constexpr(CHUNK // 2)  # blocks of a program: it evaluates the first and the last row or key of each
_NOWHERE = tl.constexpr(2**31 - 1)
_FAR = tl.constexpr(FAR)
_NO_TABLE, _LENGTHS, _ENDS, _SORTED_IDS, _SPAN_TABLE = (tl.constexpr(kind) for kind in (NO_TABLE, LENGTHS, ENDS, SORTED_IDS, SPAN_TABLE))


class Terms(NamedTuple):
    """`SpanTerms` in a kernel: addresses, and steps from item to item; a step of −1 means that there is no tensor."""

    least: Any
    most: Any
    until: Any
    offset: Any
    offset_step: Any
    offset_least: Any
    offset_most: Any
    length: Any
    length_step: Any
    size: Any
    block_offset: Any
    block_offsets: Any
    block_step: Any
    table: Any
    rows: Any
    rows_step: Any  # in bytes, as that of the keys
    keys: Any
    keys_step: Any
    count: Any  # of documents
    wide: Any  # whether rows and keys are int64 and not int32
    n: Any
    m: Any
    steps: Any  # of a bisection over rows or keys


@triton.jit
def _read(address, at, mask, wide):
    """Integers of 32 or 64 bits, as int64; 0 outside of the mask."""
    is_wide = at * 0 + wide != 0  # of the mask's shape: Triton's interpreter cannot broadcast a bool
    narrow = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask=mask & ~is_wide, other=0)
    return tl.load(address.to(tl.pointer_type(tl.int64)) + at, mask=mask & is_wide, other=0) + narrow


@triton.jit
def _count_below(address, size, x, wide, steps):
    """How many of `size` numbers that never fall are less than x, by bisection."""
    low = (x * 0).to(tl.int32)
    high = low + size.to(tl.int32)
    for _ in range(steps):
        middle = (low + high) >> 1
        searching = low < high
        below = _read(address, middle, searching, wide) < x
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & below, high, middle)
    return low


@triton.jit
def _per_item(address, item, step, other):
    """The number of an item; `other` if there is no tensor."""
    return tl.load(address.to(tl.pointer_type(tl.int64)) + item * step, mask=step >= 0, other=other)


@triton.jit
def _start_of_block(x, size):
    x = tl.minimum(tl.maximum(x, -_FAR), _FAR).to(tl.int32)
    rest = x % size.to(tl.int32)
    return x - tl.where(rest < 0, rest + size.to(tl.int32), rest)


@triton.jit
def _from_table(x, source, target, size, last, terms):
    """By the table: the first and the end, in rows or keys, of what row or key x sees; or of its document, and `last` for tokens after all."""
    ends = terms.table == _ENDS
    first, end = x, x
    if terms.table == _LENGTHS:
        first, total = x * 0, terms.count * 0
        end = first - 1
        for d in range(terms.count):
            begin = total
            total += tl.load(source.to(tl.pointer_type(tl.int64)) + d)
            inside = (begin <= x) & (x < total)
            first, end = tl.where(inside, begin, first), tl.where(inside, total, end)
        total = tl.where(last < 0, total, last)
        first, end = tl.where(end < 0, total, first), tl.where(end < 0, total, end)
    else:
        searched = tl.where(ends, source, target)
        value = tl.where(ends, x, _read(source, x, x * 0 + terms.table == _SORTED_IDS, terms.wide))
        size = tl.where(ends, terms.count, size)
        below, until = _count_below(searched, size, value, terms.wide, terms.steps), _count_below(searched, size, value + 1, terms.wide, terms.steps)
        is_end = x * 0 + terms.table == _ENDS
        before = _read(target, until - 1, is_end & (until > 0), terms.wide)
        after = _read(target, until, is_end & (until < terms.count), terms.wide)
        beyond = tl.where(last < 0, before, last)  # where the last document ends
        first = tl.where(ends, tl.where(until < terms.count, before, beyond), below)
        end = tl.where(ends, tl.where(until < terms.count, after, beyond), until)
    return first, end


@triton.jit
def _keys_of(i, lead, terms):
    """The keys from lo to hi that row i sees."""
    lo, hi = i + terms.least, tl.minimum(i + terms.most, terms.until)
    at = i + _per_item(terms.offset, lead, terms.offset_step, 0)
    lo, hi = tl.maximum(lo, at + terms.offset_least), tl.minimum(hi, at + terms.offset_most)
    hi = tl.minimum(hi, _per_item(terms.length, lead, terms.length_step, _FAR))
    start = _start_of_block(i + _per_item(terms.block_offsets, lead, terms.block_step, terms.block_offset), terms.size)
    lo, hi = tl.maximum(lo, start), tl.minimum(hi, start + terms.size)
    rows, keys = terms.rows + lead * terms.rows_step, terms.keys + lead * terms.keys_step
    if terms.table == _SPAN_TABLE:
        lo, hi = tl.maximum(lo, _read(rows, i, i >= 0, terms.wide)), tl.minimum(hi, _read(keys, i, i >= 0, terms.wide))
    elif terms.table != _NO_TABLE:
        first, end = _from_table(i, rows, keys, terms.m, terms.count * 0 - 1, terms)
        lo, hi = tl.maximum(lo, first), tl.minimum(hi, end)
    return tl.minimum(tl.maximum(lo, 0), terms.m).to(tl.int32), tl.minimum(tl.maximum(hi, 0), terms.m).to(tl.int32)


@triton.jit
def _rows_of(j, lead, terms):
    """How many rows have hi ≤ j, and how many have lo ≤ j: the rows from the first number to the second see key j."""
    begin, end = j - terms.most + 1, j - terms.least + 1
    begin = tl.where(terms.until <= j, terms.n, begin)
    at = j - _per_item(terms.offset, lead, terms.offset_step, 0)
    begin, end = tl.maximum(begin, at - terms.offset_most + 1), tl.minimum(end, at - terms.offset_least + 1)
    begin = tl.where(_per_item(terms.length, lead, terms.length_step, _FAR) <= j, terms.n, begin)
    start = _start_of_block(j, terms.size) - _per_item(terms.block_offsets, lead, terms.block_step, terms.block_offset)
    begin, end = tl.maximum(begin, start), tl.minimum(end, start + terms.size)
    rows, keys = terms.rows + lead * terms.rows_step, terms.keys + lead * terms.keys_step
    if terms.table == _SPAN_TABLE:
        begin = tl.maximum(begin, _count_below(keys, terms.n, j + 1, terms.wide, terms.steps))
        end = tl.minimum(end, _count_below(rows, terms.n, j + 1, terms.wide, terms.steps))
    elif terms.table != _NO_TABLE:
        first, behind = _from_table(j, keys, rows, terms.n, terms.n, terms)
        begin, end = tl.maximum(begin, first), tl.minimum(end, behind)
    return tl.minimum(tl.maximum(begin, 0), terms.n).to(tl.int32), tl.minimum(tl.maximum(end, 0), terms.n).to(tl.int32)


@triton.jit
def _up(x, size):
    return (x + size - 1) // size


@triton.jit
def _halves(x):
    """The numbers of the first and of the last row or key of each block, [_PAIRS] each."""
    return tl.split(tl.reshape(x, [_PAIRS, 2]))


@triton.jit
def _visible_before(until, start, first, behind):
    """How many of the key blocks from `start` on are visible to some row and before block `until`."""
    begin, _ = _halves(first)
    _, end = _halves(behind)
    block = start + tl.arange(0, _PAIRS)
    return tl.sum(((block[None, :] < until[:, None]) & (end > begin)[None, :]).to(tl.int32), 1)


@triton.jit
def _store_bounds(address, lead, block, blocks, first, full, until, behind):
    """Put the full blocks inside of those that are met; without any, both their ends are at the first."""
    full, until = tl.maximum(full, first), tl.minimum(until, behind)
    none = until <= full
    full, until = tl.where(none, first, full), tl.where(none, first, until)
    padded = (blocks + 3) // 4 * 4  # their numbers are a multiple of 16
    at = address.to(tl.pointer_type(tl.int32)) + lead * padded * 4 + block * 4
    some, inside = block < blocks, block < padded
    tl.store(at, tl.where(some, first, 0), mask=inside)
    tl.store(at + 1, tl.where(some, full, 0), mask=inside)
    tl.store(at + 2, tl.where(some, until, 0), mask=inside)
    tl.store(at + 3, tl.where(some, behind, 0), mask=inside)


@triton.jit
def _store_padded(address, lead, i, size, x):
    """Store numbers of an item and head, and zeros up to a multiple of 16."""
    padded = (size + 15) // 16 * 16
    tl.store(address.to(tl.pointer_type(tl.int32)) + lead * padded + i, tl.where(i < size, x, 0), mask=i < padded)


@triton.jit
def _store_seen(seen, ticket, flag, lead, j, m, visible, programs):
    """Store which keys some row sees, and once all programs have, whether that is so for every key of every item."""
    padded = (m + 15) // 16 * 16
    tl.store(seen.to(tl.pointer_type(tl.int8)) + lead * padded + j, visible.to(tl.int8), mask=j < padded)
    # One number counts the programs that are done and, above bit 32, those that found a hidden key. The last one resets it.
    counter = ticket.to(tl.int64).to(tl.pointer_type(tl.int64))
    more = tl.max((~visible & (j < m)).to(tl.int64), 0) * 4294967296 + 1
    done = tl.atomic_add(counter, more, sem="relaxed") + more
    if done % 4294967296 == programs:
        tl.store(flag.to(tl.pointer_type(tl.int32)), (done < 4294967296).to(tl.int32))
        tl.store(counter, done * 0)


@triton.jit(do_not_specialize=[
    "out", "lo", "hi", "bounds", "seen", "flag", "begin", "end", "rank", "base", "ticket", "least", "most", "until", "offset", "offset_step",
    "offset_least", "offset_most", "length", "length_step", "size", "block_offset", "block_offsets", "block_step", "table", "rows", "rows_step", "keys",
    "keys_step", "count", "wide", "n", "m", "steps", "BM", "BN", "before", "leads", "row_programs", "key_programs", "bound_programs",
    "order_programs"])
def spans(
    out: tl.int64, lo: tl.int64, hi: tl.int64, bounds: tl.int64, seen: tl.int64, flag: tl.int64, begin: tl.int64, end: tl.int64, rank: tl.int64, base: tl.int64,
    ticket: tl.int64, least: tl.int64, most: tl.int64, until: tl.int64, offset: tl.int64, offset_step: tl.int64, offset_least: tl.int64,
    offset_most: tl.int64, length: tl.int64, length_step: tl.int64, size: tl.int64, block_offset: tl.int64, block_offsets: tl.int64,
    block_step: tl.int64, table: tl.int64, rows: tl.int64, rows_step: tl.int64, keys: tl.int64, keys_step: tl.int64, count: tl.int64, wide: tl.int64,
    n: tl.int64, m: tl.int64, steps: tl.int64, BM: tl.int32, BN: tl.int32, before: tl.int32, leads: tl.int64,
    row_programs: tl.int32, key_programs: tl.int32, bound_programs: tl.int32, order_programs: tl.int32, BY_KEYS: tl.constexpr,
):
    """Each program computes one part for one item and head: spans of rows, the rows of keys, bounds of blocks, or the order of key blocks.

    From `lo` to `base` are places in `out`, counted in int32; −1 for a part that is not wanted.
    """
    out = out.to(tl.int64)
    terms = Terms(
        least, most, until, offset.to(tl.int64), offset_step, offset_least, offset_most, length.to(tl.int64), length_step, size, block_offset,
        block_offsets.to(tl.int64), block_step, table, rows.to(tl.int64), rows_step, keys.to(tl.int64), keys_step, count.to(tl.int64), wide,
        n.to(tl.int64), m.to(tl.int64), steps)
    n, m = n.to(tl.int32), m.to(tl.int32)
    parts = row_programs + key_programs + bound_programs + order_programs
    lead, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    e = tl.arange(0, _SIZE)
    x = part * _SIZE + e
    start = (part - row_programs - key_programs) * _PAIRS  # the first block of a program for bounds
    block = start + tl.arange(0, _PAIRS)
    if BY_KEYS:
        key_blocks, row_blocks = _up(m, BN), _up(n, BM)
        b = x - (row_programs + key_programs + bound_programs) * _SIZE  # for the order: key blocks first, then row blocks
        r = b - _up(key_blocks, _SIZE) * _SIZE
        orders = part >= row_programs + key_programs + bound_programs
        trips, before_block = 1, b
        if orders:  # how many key blocks are visible before each key block, and before the first that a row block visits
            lowest, _ = _keys_of(tl.minimum(tl.maximum(r, 0) * BM, n - 1).to(tl.int64), lead, terms)
            before_block = tl.minimum(tl.where(r < 0, b, tl.where(lowest < m, lowest // BN, key_blocks)), key_blocks)
            trips, start = _up(tl.max(before_block, 0), _PAIRS), start * 0
        found, first, behind = b * 0, b * 0, b * 0
        for trip in range(trips):
            left = (start + trip * _PAIRS + e // 2) * BN
            j = tl.where(part < row_programs + key_programs, x - row_programs * _SIZE, tl.where(e % 2 == 0, left, left + BN - 1))
            first, behind = _rows_of(tl.minimum(j, m - 1).to(tl.int64), lead, terms)
            if orders:
                found += _visible_before(before_block, trip * _PAIRS, first, behind)
        if part < row_programs + key_programs:
            j = x - row_programs * _SIZE
            _store_padded(out + begin * 4, lead, j, m, first)
            _store_padded(out + end * 4, lead, j, m, behind)
            if seen >= 0:
                _store_seen(out + seen * 4, ticket, out + flag * 4, lead, j, m, (behind > first) & (j < m), key_programs * leads)
        elif orders:
            _store_padded(out + rank * 4, lead, tl.where(r < 0, b, _NOWHERE), key_blocks, found)
            _store_padded(out + base * 4, lead, tl.where(r < 0, _NOWHERE, r), row_blocks, found)
        else:
            at_left, at_right = _halves(first)
            from_left, from_right = _halves(behind)
            some = from_right > at_left
            whole = tl.where(from_left == n, row_blocks, from_left // BM)  # the rows that a last block lacks see all
            _store_bounds(out + bounds * 4, lead, block, key_blocks, tl.where(some, at_left // BM, 0), _up(at_right, BM), whole,
                          tl.where(some, _up(from_right, BM), 0))
    elif (part >= row_programs) & (part < row_programs + key_programs):
        j = x - row_programs * _SIZE
        first, behind = _rows_of(tl.minimum(j, m - 1).to(tl.int64), lead, terms)
        _store_seen(out + seen * 4, ticket, out + flag * 4, lead, j, m, (behind > first) & (j < m), key_programs * leads)
    else:
        top = (start + e // 2) * BM - before
        i = tl.where(part < row_programs, x, tl.where(e % 2 == 0, tl.maximum(top, 0), top + BM - 1))
        first, behind = _keys_of(tl.minimum(i, n - 1).to(tl.int64), lead, terms)
        if part < row_programs:
            _store_padded(out + lo * 4, lead, x, n, first)
            _store_padded(out + hi * 4, lead, x, n, behind)
        else:
            first_lo, last_lo = _halves(first)
            first_hi, last_hi = _halves(behind)
            some = last_hi > first_lo
            _store_bounds(out + bounds * 4, lead, block, _up(n + before, BM), tl.where(some, first_lo // BN, 0), _up(last_lo, BN), first_hi // BN,
                          tl.where(some, _up(last_hi, BN), 0))

