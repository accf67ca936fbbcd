"""What a program loads of its head, and how it makes logits: shared by all kernels that keep to one head at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from .aggregates import RowStats, RowTile
from .tile_ops import (
    _BIAS_NONE,
    _NONE,
    LN2,
    LOG2E,
    add_sink,
    bias_row_pointers,
    block_list_start,
    block_range,
    dropout_row_keys,
    full_block,
    load_rows,
    logits,
    mask_tile,
    partial_block,
    quick_tanh,
    row_max_residual,
    row_offset,
    row_spans,
)


# Functions return numbers and pointers alone, from which kernels make a Head and Matrices: Triton 3.6 returns no None, and turns constants
# that are returned, such as a stride of 1, into numbers.
@triton.jit
def head_at(args, sizes, batch, index, kv_index, C: tl.constexpr):
    """The first fields of `Head`, up to the unit, for a query head of a batch item."""
    scale = args.score.scale
    if C.SCALES:
        scale = tl.load(args.score.scales + index)
    first_row = (batch.to(tl.int64) * sizes.heads + index) * sizes.n
    return batch, index, kv_index, first_row, scale, scale * LOG2E


@triton.jit
def program_head(args, sizes, owner, C: tl.constexpr):
    """The same for the batch item and head of a program, as `program_tile` has them."""
    index = owner % sizes.heads
    return head_at(args, sizes, owner // sizes.heads, index, index // sizes.groups, C)


@triton.jit
def at_head(x, batch, index, stride_batch, stride_head, C: tl.constexpr):
    """A pointer to a head of x; a descriptor stays as it is."""
    if not C.TMA:
        x = x + batch.to(tl.int64) * stride_batch + index.to(tl.int64) * stride_head
    return x


@triton.jit
def q_at(q, head, strides, C: tl.constexpr):
    return at_head(q, head.batch, head.index, strides.q_batch, strides.q_head, C)


@triton.jit
def k_at(k, head, strides, C: tl.constexpr):
    return at_head(k, head.batch, head.kv_index, strides.k_batch, strides.k_head, C)


@triton.jit
def v_at(v, head, strides, C: tl.constexpr):
    return at_head(v, head.batch, head.kv_index, strides.v_batch, strides.v_head, C)


@triton.jit
def do_at(do, head, strides, C: tl.constexpr):
    return at_head(do, head.batch, head.index, strides.batch, strides.head, C)


@triton.jit
def load_q(x, head, i0, C: tl.constexpr):
    """The queries i0 … i0 + BM, [BM, DP]; i0 if there are none. The additive score loads its own."""
    if x.q is None or C.HIDDEN_DIM > 0:
        Q = i0
    elif C.TMA:
        Q = x.q.load([head.batch, head.index, i0, 0]).reshape(C.BM, C.DP)
    else:
        i = i0 + tl.arange(0, C.BM)
        Q = load_rows(x.q, i.to(tl.int64) * x.strides.q_row, i < head.sizes.n, C.D, x.strides.q_dim, C.DP, True)
    return Q


@triton.jit
def load_do(x, head, i0, C: tl.constexpr):
    """dO of the rows i0 … i0 + BM, [BM, DVP]; i0 if there is none."""
    if x.do is None:
        dO = i0
    elif C.TMA:
        dO = x.do.load([head.batch, head.index, i0, 0]).reshape(C.BM, C.DVP)
    else:
        i = i0 + tl.arange(0, C.BM)
        dO = load_rows(x.do, i.to(tl.int64) * x.do_strides.row, i < head.sizes.n, C.DV, x.do_strides.dim, C.DVP, True)
    return dO


@triton.jit
def load_k(x, head, j0, C: tl.constexpr, GUARDED: tl.constexpr):
    """The keys j0 … j0 + BN, [BN, DP]; if GUARDED, zeros beyond the last. j0 if there are none, or for the additive score."""
    if x.k is None or C.HIDDEN_DIM > 0:
        K = j0
    elif C.TMA:
        K = x.k.load([head.batch, head.kv_index, j0, 0]).reshape(C.BN, C.DP)
    else:
        j = j0 + tl.arange(0, C.BN)
        K = load_rows(x.k, j.to(tl.int64) * x.strides.k_row, j < head.sizes.m, C.D, x.strides.k_dim, C.DP, GUARDED)
    return K


@triton.jit
def load_k_rest(x, j, m, C: tl.constexpr):
    """The dims of keys j beyond DP, [BN, DR]; there is no TMA descriptor of these."""
    REST: tl.constexpr = C.D - C.DP
    return load_rows(x.k + C.DP * x.strides.k_dim, j.to(tl.int64) * x.strides.k_row, j < m, REST, x.strides.k_dim, C.DR, True)


@triton.jit
def add_rest(S, x, head, i, j, C: tl.constexpr):
    """S [BM, BN] with the products of the dims beyond DP added."""
    REST: tl.constexpr = C.D - C.DP
    Q = load_rows(x.q + C.DP * x.strides.q_dim, i.to(tl.int64) * x.strides.q_row, i < head.sizes.n, REST, x.strides.q_dim, C.DR, True)
    return tl.dot(Q, tl.trans(load_k_rest(x, j, head.sizes.m, C)), S, input_precision=C.PRECISION)


@triton.jit
def load_v(x, head, j0, C: tl.constexpr, GUARDED: tl.constexpr, column=0):
    """The values j0 … j0 + BN from a column on, [BN, DVP]; if GUARDED, zeros beyond the last. j0 if there are none."""
    if x.v is None:
        V = j0
    elif C.TMA:
        V = x.v.load([head.batch, head.kv_index, j0, column]).reshape(C.BN, C.DVP)
    else:
        j = j0 + tl.arange(0, C.BN)
        V = load_rows(x.v + column * x.strides.v_dim, j.to(tl.int64) * x.strides.v_row, j < head.sizes.m, C.DV, x.strides.v_dim, C.DVP, GUARDED)
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
def over_keys(STEP: tl.constexpr, state, given, head, block, C: tl.constexpr):
    """Let STEP add every block of keys that block `block` of the rows needs: first the full ones, then the partial ones."""
    m = head.sizes.m
    first, full, full_end, partials = needed_blocks(head, block, tl.cdiv(m, C.BN), m // C.BN, C)
    for t in range(full, full_end):
        state = STEP(state, *given, full_block(head.blocks, t, C.MASK), 0, C, False)
    for t in range(partials):
        b, slot = partial_block(head.blocks, t, first, full, full_end, C.MASK)
        state = STEP(state, *given, b, slot, C, True)
    return state


@triton.jit
def over_rows(STEP: tl.constexpr, state, given, head, block, C: tl.constexpr):
    """The same for the blocks of rows that block `block` of the keys needs."""
    count = tl.cdiv(head.sizes.n, C.BM)
    first, full, full_end, partials = needed_blocks(head, block, count, count, C)
    for t in range(full, full_end):
        state = STEP(state, *given, full_block(head.blocks, t, C.MASK), 0, C, False)
    if C.MASK != _NONE:
        for t in range(partials):
            b, slot = partial_block(head.blocks, t, first, full, full_end, C.MASK)
            state = STEP(state, *given, b, slot, C, True)
    return state


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
def raw_scores(Q, K, x, head, i, j, C: tl.constexpr):
    """Scores [BM, BN] of rows i and keys j, before scale and cap."""
    if C.HIDDEN_DIM > 0:
        S = additive_scores(x, head, i, j, C)
    else:
        S = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)
        if C.DR > 0:
            S = add_rest(S, x, head, i, j, C)
    return S


@triton.jit
def raw_scores_transposed(Q, K, x, head, i, j, C: tl.constexpr):
    """The same [BN, BM]."""
    if C.HIDDEN_DIM > 0:
        S = tl.trans(additive_scores(x, head, i, j, C))
    else:
        S = tl.dot(K, tl.trans(Q), input_precision=C.PRECISION)
        if C.DR > 0:
            S = tl.trans(add_rest(tl.trans(S), x, head, i, j, C))
    return S


@triton.jit
def pointwise(FUNCTION: tl.constexpr, S, i, j, head, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A generated function of scaled scores S [BM, BN], or [BN, BM] if TRANSPOSED. Rows and keys past the end are those of the last."""
    given = head.score.pointwise
    i, j = tl.minimum(i, head.sizes.n - 1), tl.minimum(j, head.sizes.m - 1)
    index = head.index
    if C.MIXED_HEADS:
        index = index[:, None]
    if TRANSPOSED:
        S = FUNCTION(S, head.batch, index, i[None, :], j[:, None], given.floats, given.whole, given.sizes)
    else:
        S = FUNCTION(S, head.batch, index, i[:, None], j[None, :], given.floats, given.whole, given.sizes)
    return S


@triton.jit
def scores_and_slope(raw, i, j, head, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    """What the chain rule needs of products: the scores before the cap, and the slope of the function that gave them."""
    S = raw * head.scale
    slope = S
    if C.SLOPED:
        slope = pointwise(C.SLOPE, S, i, j, head, C, TRANSPOSED)
    if C.POINTWISE and C.CAP:
        S = pointwise(C.VALUE, S, i, j, head, C, TRANSPOSED)
    return S, slope


@triton.jit
def head_logits(S, rows, j, head, C: tl.constexpr):
    """Scores [BM, BN] to logits, and which pairs the bias leaves visible, if there is one."""
    score = head.score
    scale = head.scale
    if C.POINTWISE:
        S = pointwise(C.VALUE, S * scale, rows.i, j, head, C, False)
        scale = 1.0
    return logits(S, scale, score.cap, score.bias, rows.bias, rows.i, j, head.sizes.n, head.sizes.m, C.CAP, C.BIAS)


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
    if C.POINTWISE and not C.CAP and C.BIAS == _BIAS_NONE:  # as the slope is computed, so that both share what they can
        S = pointwise(C.VALUE, S * head.scale, rows.i, j, head, C, True)
    elif not C.FAST:
        S, show = head_logits(tl.trans(S), rows, j, head, C)
        S = tl.trans(S)
        if C.BIAS != _BIAS_NONE:
            show = tl.trans(show)
    if MASKED:
        masked = (S != float("-inf")) & tl.trans(mask_tile(head.blocks, rows.lo, rows.hi, slot, rows.i, j, C.MASK))
        show = masked if C.BIAS == _BIAS_NONE else show & masked
    return S, show


@triton.jit
def store_rows(to, X, first, i, n, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store X [BM or BN, PADDED] as rows i of a contiguous matrix that begins at row `first`."""
    d = tl.arange(0, PADDED)
    at = (first + i.to(tl.int64))[:, None] * DIM + d[None, :]
    tl.store(to + at, X.to(to.dtype.element_ty), mask=(i < n)[:, None] & (d < DIM)[None, :])


@triton.jit
def store_statistics(out, at, valid, m, row_max, l, e, empty, sinks, index, C: tl.constexpr):
    """Store lse, row max, log row sum and entropy, with the sink's share: from m, l and e as the forward pass has them."""
    ln_l = tl.log2(l) * LN2
    log_row_sum = ln_l + row_max_residual(m, row_max, empty, C.FAST)
    lse = tl.where(empty, float("-inf"), row_max + log_row_sum)
    entropy = ln_l - e / l * LN2
    if C.SINK:
        lse, entropy, log_row_sum = add_sink(tl.load(sinks + index), lse, entropy, log_row_sum, empty)
    tl.store(out.lse + at, lse, mask=valid)
    tl.store(out.max_logit + at, tl.where(empty, float("-inf"), row_max), mask=valid)
    tl.store(out.log_row_sum + at, log_row_sum, mask=valid)
    if C.ENTROPY:
        tl.store(out.entropy + at, entropy, mask=valid)
