"""Hidden keys and rows that hold NaN or inf in the Hopper kernels: which keys a bias hides from every row, and zeros in their place.

A weight of 0 times NaN is NaN, so they must be known.
"""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...compat.gluon import group_barrier, row_blocks
from ..portable.tile_ops import (
    _NONE,
    bias_row_pointers,
    bias_tile,
    block_list_start,
    block_range,
    full_block,
    load_rows,
    mask_item,
    mask_tile,
    partial_block,
    program_tile,
    row_spans,
)
from .online_softmax import may_hide
from .tile_scheduler import ROWS

CLEANED = gl.constexpr(16)  # rows that a group cleans together
CLEANED_BY_WARP = gl.constexpr(8)


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


@gluon.jit
def zero_empty_rows(X, lse):
    """Set the queries X [BM, C] of rows that see nothing to 0, since they may be NaN. One warp does."""
    BM: gl.constexpr = X.shape[0]
    C: gl.constexpr = X.shape[1]
    parts, lse_parts = row_blocks(X, CLEANED_BY_WARP), row_blocks(lse, CLEANED_BY_WARP)
    PANEL: gl.constexpr = parts.shape[2]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PANEL, PANEL // 8], [1, 1], [1, 0])
    for r in range(BM // CLEANED_BY_WARP):
        see = lse_parts.index(r).load(gl.SliceLayout(1, L)) < float("inf")
        for c in gl.static_range(C // PANEL):
            part = parts.index(c * (BM // CLEANED_BY_WARP) + r)
            part.store(gl.where(see[:, None], part.load(L), 0.0))


@gluon.jit
def some_empty(b, batch, h, params, TRAITS: gl.constexpr):
    """1 if a row of a block sees nothing, since the mask or the bias hides all keys from it, else 0."""
    empty = 0
    if TRAITS.MASK != _NONE or may_hide(TRAITS.BIAS):
        empty = gl.load(params.empty + (batch * params.num_heads + h) * gl.cdiv(params.n, TRAITS.BM) + b)
    return empty


@gluon.jit
def clean_queries(stage, params, TRAITS: gl.constexpr):
    """Set the queries of rows that see nothing to 0 once they are loaded, then say "ready". The producer warp does; consumers have no registers for it.

    All loads that need it share one barrier, the last. Here it also completes its second phase, so every load waits for the first one.
    """
    smem, lse, q_ready = params.smem, params.row_stats.lse.index(stage), params.barriers.q_ready
    loaded = q_ready.index(TRAITS.STAGES)
    mbarrier.wait(loaded, 0)
    mbarrier.arrive(loaded)
    zero_empty_rows(smem.Q.index(stage).reshape([TRAITS.BM, TRAITS.DA]), lse)
    if TRAITS.DB > 0:
        zero_empty_rows(smem.QB.index(stage).reshape([TRAITS.BM, TRAITS.DB]), lse)
    fence_async_shared()
    mbarrier.arrive(q_ready.index(stage))


@gluon.jit
def seen_by_some(params, batch, kv_head, j, HIDING: gl.constexpr):
    """Which keys j some row of some query head may attend to, int32; all of those past the end."""
    lists = params.lists
    some = j * 0
    for u in range(params.heads_per_kv):
        h = kv_head * params.heads_per_kv + u
        if HIDING:
            at = params.seen + (batch * params.num_heads + h).to(gl.int64) * params.M
        else:
            at = lists.seen + mask_item(lists, batch).to(gl.int64) * lists.seen_item + h * lists.seen_head
        some = some | gl.load(at + j, mask=j < params.M, other=1).to(gl.int32)
    return some


@gluon.jit
def some_unseen(batch, kv_head, j0, params, TRAITS: gl.constexpr, WARPS: gl.constexpr = 4):
    """Whether one of ROWS keys must be set to 0: no row may attend to it, so it may be NaN. `params.seen` says what a bias hides by −inf."""
    HIDING: gl.constexpr = may_hide(TRAITS.BIAS)
    unseen = j0 < 0
    if TRAITS.MASK != _NONE or HIDING:
        j = j0 + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [WARPS], [0]))  # each warp has them all
        unseen = gl.min(seen_by_some(params, batch, kv_head, j, HIDING), 0) == 0
    return unseen


@gluon.jit
def zero_unseen_keys(X, unseen, batch, kv_head, j0, params, TRAITS: gl.constexpr):
    """Zero the keys X [ROWS, C] that no row may attend to, if `some_unseen`."""
    C: gl.constexpr = X.shape[1]
    HIDING: gl.constexpr = may_hide(TRAITS.BIAS)
    if TRAITS.MASK != _NONE or HIDING:
        if unseen:
            parts = row_blocks(X, CLEANED)
            PANEL: gl.constexpr = parts.shape[2]
            L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PANEL, PANEL // 8], [4, 1], [1, 0])
            for r in range(ROWS // CLEANED):
                j = j0 + r * CLEANED + gl.arange(0, CLEANED, gl.SliceLayout(1, L))
                see = (seen_by_some(params, batch, kv_head, j, HIDING) != 0)[:, None]
                for c in gl.static_range(C // PANEL):
                    part = parts.index(c * (ROWS // CLEANED) + r)
                    part.store(gl.where(see, part.load(L), 0.0))
            fence_async_shared()
            group_barrier()


@gluon.jit
def seen_offset(lists, rows):
    """Where `lists.seen` begins for the rows' head: which keys are visible to some row."""
    return mask_item(lists, rows.batch).to(gl.int64) * lists.seen_item + rows.h * lists.seen_head


@gluon.jit
def find_unseen(show, rows, j0, params, TRAITS: gl.constexpr, MASKED: gl.constexpr):
    """Whether a block has a key that no row may attend to (with a bias that may hide, no row of the group), whose value may be NaN."""
    seen = 0
    dirty = 0
    if may_hide(TRAITS.BIAS):
        seen = gl.max(show.to(gl.int32), 0)
        dirty = 1 - gl.min(seen, 0)
    elif MASKED and TRAITS.MASK != _NONE:
        if rows.all_seen == 0:
            j = j0 + gl.arange(0, TRAITS.BN, gl.BlockedLayout([TRAITS.BN // 32], [32], [4], [0]))  # each warp has them all
            at = seen_offset(params.lists, rows)
            dirty = (gl.min(gl.load(params.lists.seen + at + j, mask=j < params.M, other=1).to(gl.int32), 0) == 0).to(gl.int32)
    return seen, dirty


@gluon.jit
def zero_unseen(X, into, seen, rows, j0, params, C: gl.constexpr, TRAITS: gl.constexpr):
    """Set the values X [BN, C] of unseen keys to 0: with a bias in a copy, the group's own block, else in place.

    Without a bias every group writes the same numbers to the same place, and reads them after its own writes.
    """
    if may_hide(TRAITS.BIAS):
        VL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
        into.store(gl.where((gl.convert_layout(seen, gl.SliceLayout(1, VL)) > 0)[:, None], X.load(VL), 0.0))
    else:
        at = seen_offset(params.lists, rows)
        parts = row_blocks(X, CLEANED)
        PANEL: gl.constexpr = parts.shape[2]
        PANELS: gl.constexpr = C // PANEL
        PL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PANEL, PANEL // 8], [4, 1], [1, 0])
        for r in range(gl.cdiv(gl.minimum(params.M - j0, TRAITS.BN), CLEANED)):
            j = j0 + r * CLEANED + gl.arange(0, CLEANED, gl.SliceLayout(1, PL))
            see = (gl.load(params.lists.seen + at + j, mask=j < params.M, other=1) != 0)[:, None]
            for c in gl.static_range(PANELS):
                part = parts.index(c * (TRAITS.BN // CLEANED) + r)
                part.store(gl.where(see, part.load(PL), 0.0))
