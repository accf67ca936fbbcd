"""What a program loads of its head, and how it makes logits: shared by all kernels that keep to one head at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from .aggregates import RowStats, RowTile
from .tile_ops import (
    _BIAS_NONE,
    LOG2E,
    bias_row_pointers,
    block_list_start,
    block_range,
    dropout_row_keys,
    load_rows,
    logits,
    mask_tile,
    quick_tanh,
    row_offset,
    row_spans,
)


@triton.jit
def head_scale(score, index, C: tl.constexpr):
    """The scale of a head."""
    scale = score.scale
    if C.SCALES:
        scale = tl.load(score.scales + index)
    return scale


@triton.jit
def at_head(x, batch, index, stride_batch, stride_head, C: tl.constexpr):
    """A pointer to a head of x; a descriptor stays as it is."""
    if not C.TMA:
        x = x + batch.to(tl.int64) * stride_batch + index.to(tl.int64) * stride_head
    return x


@triton.jit
def load_q(x, head, i0, C: tl.constexpr):
    """The queries i0 … i0 + BM, [BM, DP]."""
    if C.TMA:
        Q = x.q.load([head.batch, head.index, i0, 0]).reshape(C.BM, C.DP)
    else:
        i = i0 + tl.arange(0, C.BM)
        Q = load_rows(x.q, i.to(tl.int64) * x.strides.q_row, i < head.sizes.n, C.D, x.strides.q_dim, C.DP, True)
    return Q


@triton.jit
def load_do(x, head, i0, C: tl.constexpr):
    """dO of the rows i0 … i0 + BM, [BM, DVP]."""
    if C.TMA:
        dO = x.do.load([head.batch, head.index, i0, 0]).reshape(C.BM, C.DVP)
    else:
        i = i0 + tl.arange(0, C.BM)
        dO = load_rows(x.do, i.to(tl.int64) * x.do_strides.row, i < head.sizes.n, C.DV, x.do_strides.dim, C.DVP, True)
    return dO


@triton.jit
def load_k(x, batch, kv_index, j0, m, C: tl.constexpr, GUARDED: tl.constexpr):
    """The keys j0 … j0 + BN, [BN, DP]; if GUARDED, zeros beyond the last."""
    if C.TMA:
        K = x.k.load([batch, kv_index, j0, 0]).reshape(C.BN, C.DP)
    else:
        j = j0 + tl.arange(0, C.BN)
        K = load_rows(x.k, j.to(tl.int64) * x.strides.k_row, j < m, C.D, x.strides.k_dim, C.DP, GUARDED)
    return K


@triton.jit
def load_v(x, batch, kv_index, j0, m, C: tl.constexpr, GUARDED: tl.constexpr):
    """The values j0 … j0 + BN, [BN, DVP]; if GUARDED, zeros beyond the last."""
    if C.TMA:
        V = x.v.load([batch, kv_index, j0, 0]).reshape(C.BN, C.DVP)
    else:
        j = j0 + tl.arange(0, C.BN)
        V = load_rows(x.v, j.to(tl.int64) * x.strides.v_row, j < m, C.DV, x.strides.v_dim, C.DVP, GUARDED)
    return V


@triton.jit
def load_row_tile(head, i, C: tl.constexpr, MASKED: tl.constexpr):
    """Rows i with what their logits and dropout need; the spans if MASKED."""
    n, m = head.sizes.n, head.sizes.m
    lo, hi = i, i
    if MASKED:
        lo, hi = row_spans(head.blocks, head.batch, head.index, i, n, m, C.MASK)
    low, high = i, i
    if C.DROP:
        low, high = dropout_row_keys(head.dropout, head.batch, head.index, head.sizes.heads, i, n)
    return RowTile(i, lo, hi, bias_row_pointers(head.score.bias, head.batch, head.index, i, C.BIAS), low, high)


@triton.jit
def load_row_stats(stats, head, i, C: tl.constexpr):
    """What the backward passes know of rows i: RowStats, [BM] each.

    EXACT (float32) subtracts the row max from logits, then lse, which keeps all digits; otherwise lse at once, which
    saves an operation and a register for each number.
    """
    n = head.sizes.n
    first = head.first_row
    if C.EXACT:
        offset = row_offset(tl.load(stats.row_max + first + i, mask=i < n, other=float("-inf")), C.FAST)
        log_sum = tl.load(stats.log_row_sum + first + i, mask=i < n, other=0.0) * LOG2E
    else:  # `row_max` holds lse here
        offset = tl.load(stats.row_max + first + i, mask=i < n, other=float("inf"))
        log_sum = offset
    delta = tl.load(stats.delta + first + i, mask=i < n, other=0.0)
    g_entropy, mean = delta, delta
    if C.ENTROPY:
        g_entropy = tl.load(stats.g_entropy + first + i, mask=i < n, other=0.0)
        mean = tl.load(stats.mean + first + i, mask=i < n, other=0.0)
    return RowStats(offset, log_sum, delta, g_entropy, mean)


@triton.jit
def needed_blocks(head, block, count, whole, C: tl.constexpr):
    """The blocks that block `block` of a head needs, as `block_range` has them."""
    at = block_list_start(head.blocks, head.batch, head.index, C.MASK)
    return block_range(head.blocks, at, block, count, whole, C.MASK)


@triton.jit
def additive_scores(x, head, i, j, C: tl.constexpr):
    """Σ_c vector[c] · tanh(q[i, c] + k[j, c]): [BM, BN]."""
    n, m, strides, vector = head.sizes.n, head.sizes.m, x.strides, head.score.vector
    S = tl.zeros([C.BM, C.BN], tl.float32)
    q, k = x.q + i.to(tl.int64) * strides.q_row, x.k + j.to(tl.int64) * strides.k_row
    WHOLE: tl.constexpr = C.HIDDEN_DIM // 4 * 4
    for c in range(0, WHOLE, 4):
        for u in tl.static_range(4):  # four units together, so that their loads are in flight together
            a = tl.load(q + (c + u) * strides.q_dim, mask=i < n, other=0.0)  # [BM]
            b = tl.load(k + (c + u) * strides.k_dim, mask=j < m, other=0.0)  # [BN]
            S += tl.load(vector + c + u) * quick_tanh(a[:, None] + b[None, :], C.APPROXIMATE)
    for c in range(WHOLE, C.HIDDEN_DIM):
        a = tl.load(q + c * strides.q_dim, mask=i < n, other=0.0)
        b = tl.load(k + c * strides.k_dim, mask=j < m, other=0.0)
        S += tl.load(vector + c) * quick_tanh(a[:, None] + b[None, :], C.APPROXIMATE)
    return S


@triton.jit
def head_logits(S, rows, j, head, C: tl.constexpr):
    """Scores [BM, BN] to logits, and which pairs the bias leaves visible, if there is one."""
    score = head.score
    return logits(S, head.scale, score.cap, score.bias, rows.bias, rows.i, j, head.sizes.n, head.sizes.m, C.CAP, C.BIAS)


@triton.jit
def visible_logits(S, rows, j, slot, head, C: tl.constexpr, MASKED: tl.constexpr):
    """Logits of scores S [BM, BN], which FAST leaves raw, and which pairs bias and mask show; only where one may hide."""
    show = j
    if not C.FAST:
        S, show = head_logits(S, rows, j, head, C)
    if MASKED:
        # Asking S as well keeps the compiler from holding the mask of a whole tile while S is still being multiplied.
        masked = (S != float("-inf")) & mask_tile(head.blocks, rows.lo, rows.hi, slot, rows.i, j, C.MASK)
        show = masked if C.BIAS == _BIAS_NONE else show & masked
    return S, show


@triton.jit
def visible_logits_transposed(S, rows, j, slot, head, C: tl.constexpr, MASKED: tl.constexpr):
    """The same for transposed scores S [BN, BM]."""
    show = j
    if not C.FAST:
        S, show = head_logits(tl.trans(S), rows, j, head, C)
        S = tl.trans(S)
        if C.BIAS != _BIAS_NONE:
            show = tl.trans(show)
    if MASKED:
        masked = (S != float("-inf")) & tl.trans(mask_tile(head.blocks, rows.lo, rows.hi, slot, rows.i, j, C.MASK))
        show = masked if C.BIAS == _BIAS_NONE else show & masked
    return S, show
