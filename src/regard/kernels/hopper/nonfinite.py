"""Which keys a bias hides from every row. A weight of 0 times NaN is NaN, so hidden keys with NaN or inf must be knbatch_head."""
# Written for Triton's compiler, which has types of its batch_head.
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
def add_visible(some, b, slot, bias, lists, batch, h, j, n, M, BM: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr):
    """`some` [BN], with 1 for keys j that some row of a block may attend to."""
    i = b * BM + tl.arange(0, BM)
    show = (bias_tile(bias, bias_row_pointers(bias, batch, h, i, BIAS), i, j, n, M, BIAS) != float("-inf")) & (i < n)[:, None]  # [BM, BN]
    if MASKED:
        lo, hi = row_spans(lists, batch, h, i, n, M, MASK)
        show = show & mask_tile(lists, lo, hi, slot, i, j, MASK)
    return some | tl.max(show.to(tl.int32), 0)


@triton.jit(do_not_specialize=["n", "M", "lists", "num_heads", "heads_per_kv"])
def attended(k, strides, seen, bias, lists, n, M, num_heads, heads_per_kv,
             D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr):
    """Whether some row may attend to each of BN keys of a head, int8. Only keys that hold NaN or inf are looked up; all others get 1."""
    block, batch_head = program_tile(tl.cdiv(M, BN))
    h = batch_head % num_heads
    batch = batch_head // num_heads
    j = block * BN + tl.arange(0, BN)  # [BN]
    K = load_rows(k + batch.to(tl.int64) * strides[0] + (h // heads_per_kv).to(tl.int64) * strides[1], j.to(tl.int64) * strides[2], j < M, D, strides[3], DP, True)
    K = K.to(tl.float32)
    some = tl.min((K - K == 0.0).to(tl.int32), 1)  # [BN]
    if tl.min(some, 0) == 0:
        first, full, full_end, rest = block_range(lists, block_list_start(lists, batch, h, MASK), block, tl.cdiv(n, BM), tl.cdiv(n, BM), MASK)
        for t in range(full, full_end):
            some = add_visible(some, full_block(lists, t, MASK), 0, bias, lists, batch, h, j, n, M, BM, MASK, BIAS, False)
        for t in range(rest):
            b, slot = partial_block(lists, t, first, full, full_end, MASK)
            some = add_visible(some, b, slot, bias, lists, batch, h, j, n, M, BM, MASK, BIAS, MASK != _NONE)
    tl.store(seen + batch_head.to(tl.int64) * M + j, some.to(tl.int8), mask=j < M)
