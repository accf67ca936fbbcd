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
    k_at,
    load_k,
    load_q,
    load_row_tile,
    load_v,
    over_keys,
    program_head,
    q_at,
    raw_scores,
    store_statistics,
    v_at,
    visible_logits,
)
from .tile_ops import _BIAS_NONE, LN2, LOG2E, LOWEST, clamp_exponent, dropout_keep, program_tile, zero_hidden_keys


class State(NamedTuple):
    """The running sums of BM rows."""

    O: Any  # [BM, DVP]
    m: Any  # [BM]
    l: Any  # [BM]
    e: Any  # [BM]


@triton.jit
def online_softmax(S, show, m, l, e, unit, C: tl.constexpr, HIDES: tl.constexpr):
    """Add logits S [BM, BN] to m, l, e [BM]: the weights P relative to the new max, and what rescales the past; with the log2 of both."""
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
    if HIDES or C.POINTWISE:
        T = clamp_exponent(T)  # finite, so that P·T is 0 and not NaN
    shift = clamp_exponent(shift)
    P = tl.exp2(T)  # [BM, BN]
    a = tl.exp2(shift)  # [BM]
    if C.ENTROPY:
        e = a * (e + shift * l) + tl.sum(P * T, 1)
    l = a * l + tl.sum(P, 1)
    return P, m_new, l, e, a, T, shift


@triton.jit
def forward_step(state, Q, x, head, rows, column, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add block b of the keys."""
    j0 = b * C.BN
    j = j0 + tl.arange(0, C.BN)  # [BN]
    S = raw_scores(Q, load_k(x, head, j0, C, MASKED), x, head, rows.i, j, C)  # [BM, BN]
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    S, show = visible_logits(S, rows, j, slot, head, C, MASKED)
    P, row_max, l, e, a, _, _ = online_softmax(S, show, state.m, state.l, state.e, head.unit, C, HIDES)
    O = state.O * a[:, None]
    if C.DROP:
        P = tl.where(dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound), P, 0.0)
    V = load_v(x, head, j0, C, MASKED, column)
    if HIDES:
        V = zero_hidden_keys(V, show, head.blocks, head.batch, head.index, j, head.sizes.m, C.MASK, C.BIAS)
    O = tl.dot(P.to(V.dtype), V, O, input_precision=C.PRECISION)
    return State(O, row_max, l, e)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "row_blocks"])
def forward(q, k, v, out, args, sinks, n, m, heads, groups, row_blocks, C: tl.constexpr):
    """Program (part of the values' columns, block of rows, batch item and head); the last rows first, which under a causal mask
    have most to do."""
    strides, dropout = args.strides, args.dropout
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(row_blocks * C.PARTS)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    column = block % C.PARTS * C.DVP
    block = row_blocks - 1 - block // C.PARTS
    x = Matrices(q_at(q, head, strides, C), k_at(k, head, strides, C), v_at(v, head, strides, C), None, strides, None)
    i = block * C.BM + tl.arange(0, C.BM)  # [BM]
    Q = load_q(x, head, block * C.BM, C)
    rows = load_row_tile(head, i, C, True)
    zeros = tl.zeros([C.BM], tl.float32)
    state = State(tl.zeros([C.BM, C.DVP], tl.float32), tl.full([C.BM], LOWEST, tl.float32), zeros, zeros)
    state = over_keys(forward_step, state, (Q, x, head, rows, column), head, block, C)

    empty = state.l == 0.0
    l = tl.where(empty, 1.0, state.l)
    row_max = state.m * LN2 if C.FAST else state.m  # [BM] natural units
    denominator = l
    if C.SINK:
        denominator = l + tl.exp2((tl.load(sinks + head.index) - row_max) * LOG2E)  # with the sink's share
    O = state.O * (dropout.factor / denominator)[:, None] if C.DROP else state.O * (1.0 / denominator)[:, None]
    d = column + tl.arange(0, C.DVP)
    to = head.batch.to(tl.int64) * strides.o_batch + head.index.to(tl.int64) * strides.o_head
    to = out.output + to + i.to(tl.int64)[:, None] * strides.o_row + d[None, :]
    tl.store(to, O.to(out.output.dtype.element_ty), mask=(i < n)[:, None] & (d < C.DV)[None, :])
    stores = i < tl.where(column == 0, n, 0)  # once
    store_statistics(out, head.first_row + i, stores, state.m, row_max, l, state.e, empty, sinks, head.index, C)
