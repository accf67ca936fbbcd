"""Which keys a bias lets nobody see. A weight of 0 times NaN is NaN, so those that are no numbers must be known."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ..portable.tile_ops import (
    _NONE,
    bias_row_pointers,
    bias_tile,
    block_list_start,
    block_range,
    full_block,
    load_rows,
    mask_tile,
    partial_block,
    program_tile,
    row_spans,
)


@triton.jit
def some_row(some, b, slot, bias, where, item, h, j, n, M, BM: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr):
    """`some` [BN], and 1 for keys j that some row of a block may attend."""
    i = b * BM + tl.arange(0, BM)
    show = (bias_tile(bias, bias_row_pointers(bias, item, h, i, BIAS), i, j, n, M, BIAS) != float("-inf")) & (i < n)[:, None]  # [BM, BN]
    if MASKED:
        lo, hi = row_spans(where, item, h, i, n, M, MASK)
        show = show & mask_tile(where, lo, hi, slot, i, j, MASK)
    return some | tl.max(show.to(tl.int32), 0)


@triton.jit(do_not_specialize=["n", "M", "where", "heads", "groups"])
def attended(k, strides, seen, bias, where, n, M, heads, groups,
             D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr):
    """Whether some row may attend each of BN keys of a head, int8. Only for keys that hold NaN or inf is it looked up; all others say 1."""
    block, own = program_tile(tl.cdiv(M, BN))
    h = own % heads
    item = own // heads
    j = block * BN + tl.arange(0, BN)  # [BN]
    K = load_rows(k + item.to(tl.int64) * strides[0] + (h // groups).to(tl.int64) * strides[1], j.to(tl.int64) * strides[2], j < M, D, strides[3], DP, True)
    K = K.to(tl.float32)
    some = tl.min((K - K == 0.0).to(tl.int32), 1)  # [BN]
    if tl.min(some, 0) == 0:
        first, full, until, rest = block_range(where, block_list_start(where, item, h, MASK), block, tl.cdiv(n, BM), tl.cdiv(n, BM), MASK)
        for t in range(full, until):
            some = some_row(some, full_block(where, t, MASK), 0, bias, where, item, h, j, n, M, BM, MASK, BIAS, False)
        for t in range(rest):
            b, slot = partial_block(where, t, first, full, until, MASK)
            some = some_row(some, b, slot, bias, where, item, h, j, n, M, BM, MASK, BIAS, MASK != _NONE)
    tl.store(seen + own.to(tl.int64) * M + j, some.to(tl.int8), mask=j < M)
