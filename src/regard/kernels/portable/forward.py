"""Attention's forward pass: output, lse, row max and entropy of every row, in one pass over the keys.

    S = Q Kᵀ · scale        m: running max      l = Σ exp(S − m)      e = Σ exp(S − m)·(S − m)
    O = Σ exp(S − m) V      lse = m + ln l      entropy = ln l − e / l

One program holds BM rows of one head. It takes first the blocks of keys that all of its rows attend to whole, then the
partial ones with their mask. Exponentials are taken by exp2. FAST keeps S as raw products and multiplies once, inside the
exponent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..arguments import Sizes
from .aggregates import Head, Matrices
from .program import (
    additive_scores,
    at_head,
    head_scale,
    load_k,
    load_q,
    load_row_tile,
    load_v,
    needed_blocks,
    visible_logits,
)
from .tile_ops import (
    _BIAS_NONE,
    DEEP,
    LN2,
    LOG2E,
    LOWEST,
    add_sink,
    dropout_keep,
    full_block,
    partial_block,
    program_tile,
    row_max_residual,
    zero_hidden_keys,
)


class State(NamedTuple):
    """The running sums of BM rows."""

    O: Any  # [BM, DVP]
    m: Any  # [BM]
    l: Any  # [BM]
    e: Any  # [BM]


@triton.jit
def online_softmax(S, show, m, l, e, unit, C: tl.constexpr, HIDES: tl.constexpr):
    """Add logits S [BM, BN] to m, l, e [BM]: the weights P relative to the new max, and what rescales the past."""
    if HIDES:
        S = tl.where(show, S, float("-inf"))
    if C.FAST:
        m_new = tl.maximum(m, tl.max(S, 1) * unit)  # [BM] in log2 units
        T = S * unit - m_new[:, None]  # [BM, BN]
        shift = m - m_new  # [BM]
    else:
        m_new = tl.maximum(m, tl.max(S, 1))  # [BM] in natural units
        T = (S - m_new[:, None]) * LOG2E
        shift = (m - m_new) * LOG2E
    if HIDES:
        T = tl.maximum(T, DEEP)  # finite, so that P·T is 0 and not NaN
    shift = tl.maximum(shift, DEEP)
    P = tl.exp2(T)  # [BM, BN]
    a = tl.exp2(shift)  # [BM]
    if C.ENTROPY:
        e = a * (e + shift * l) + tl.sum(P * T, 1)
    l = a * l + tl.sum(P, 1)
    return P, m_new, l, e, a


@triton.jit
def forward_step(state, Q, x, head, rows, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add block b of the keys."""
    m = head.sizes.m
    j0 = b * C.BN
    j = j0 + tl.arange(0, C.BN)  # [BN]
    if C.HIDDEN_DIM > 0:
        S = additive_scores(x, head, rows.i, j, C)
    else:
        K = load_k(x, head.batch, head.kv_index, j0, m, C, MASKED)
        S = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)  # [BM, BN]
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    S, show = visible_logits(S, rows, j, slot, head, C, MASKED)
    P, row_max, l, e, a = online_softmax(S, show, state.m, state.l, state.e, head.unit, C, HIDES)
    O = state.O * a[:, None]
    if C.DROP:
        P = tl.where(dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound), P, 0.0)
    V = load_v(x, head.batch, head.kv_index, j0, m, C, MASKED)
    if HIDES:
        V = zero_hidden_keys(V, show, head.blocks, head.batch, head.index, j, m, C.MASK, C.BIAS)
    O = tl.dot(P.to(V.dtype), V, O, input_precision=C.PRECISION)
    return State(O, row_max, l, e)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "row_blocks"])
def forward(q, k, v, out, args, sinks, n, m, heads, groups, row_blocks, C: tl.constexpr):
    """Program (block of rows, batch item and head); the last rows first, which under a causal mask have most to do."""
    strides, score, blocks, dropout = args.strides, args.score, args.blocks, args.dropout
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(row_blocks)
    block = row_blocks - 1 - block
    batch, index = owner // heads, owner % heads
    kv_index = index // groups
    scale = head_scale(score, index, C)
    first_row = (batch.to(tl.int64) * heads + index) * n
    head = Head(batch, index, kv_index, first_row, scale, scale * LOG2E, score, blocks, dropout, sizes)
    q = at_head(q, batch, index, strides.q_batch, strides.q_head, C)
    k = at_head(k, batch, kv_index, strides.k_batch, strides.k_head, C)
    v = at_head(v, batch, kv_index, strides.v_batch, strides.v_head, C)
    x = Matrices(q, k, v, None, strides, None)
    i = block * C.BM + tl.arange(0, C.BM)  # [BM]
    Q = i
    if C.HIDDEN_DIM == 0:
        Q = load_q(x, head, block * C.BM, C)
    rows = load_row_tile(head, i, C, True)
    first, full, full_end, partials = needed_blocks(head, block, tl.cdiv(m, C.BN), m // C.BN, C)
    zeros = tl.zeros([C.BM], tl.float32)
    state = State(tl.zeros([C.BM, C.DVP], tl.float32), tl.full([C.BM], LOWEST, tl.float32), zeros, zeros)
    for t in range(full, full_end):
        state = forward_step(state, Q, x, head, rows, full_block(blocks, t, C.MASK), 0, C, False)
    for t in range(partials):
        b, slot = partial_block(blocks, t, first, full, full_end, C.MASK)
        state = forward_step(state, Q, x, head, rows, b, slot, C, True)

    empty = state.l == 0.0
    l = tl.where(empty, 1.0, state.l)
    row_max = state.m * LN2 if C.FAST else state.m  # [BM] natural units
    denominator = l
    if C.SINK:
        denominator = l + tl.exp2((tl.load(sinks + index) - row_max) * LOG2E)  # with the sink's share
    O = state.O * (dropout.factor / denominator)[:, None] if C.DROP else state.O * (1.0 / denominator)[:, None]
    d = tl.arange(0, C.DVP)
    to = batch.to(tl.int64) * strides.o_batch + index.to(tl.int64) * strides.o_head
    to = out.output + to + i.to(tl.int64)[:, None] * strides.o_row + d[None, :]
    tl.store(to, O.to(out.output.dtype.element_ty), mask=(i < n)[:, None] & (d < C.DV)[None, :])
    at = first_row + i
    ln_l = tl.log2(l) * LN2
    log_row_sum = ln_l + row_max_residual(state.m, row_max, empty, C.FAST)
    lse = tl.where(empty, float("-inf"), row_max + log_row_sum)
    entropy = ln_l - state.e / l * LN2
    if C.SINK:
        lse, entropy, log_row_sum = add_sink(tl.load(sinks + index), lse, entropy, log_row_sum, empty)
    tl.store(out.lse + at, lse, mask=i < n)
    tl.store(out.max_logit + at, tl.where(empty, float("-inf"), row_max), mask=i < n)
    tl.store(out.log_row_sum + at, log_row_sum, mask=i < n)
    if C.ENTROPY:
        tl.store(out.entropy + at, entropy, mask=i < n)
