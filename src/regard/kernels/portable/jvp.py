"""Attention's tangent in one pass with its output: the same running max serves both.

With t = dS the tangent of the logits, and everything relative to the running max m as in the forward pass:

    u = Σ exp(S − m)·t        A = Σ exp(S − m)·(t V + dV)        c = Σ exp(S − m)·t·(S − m)
    d lse = u / l             dO = A / l − (u / l)·O             d entropy = −(c / l − (u / l)·(e / l)) = −Cov_p(t, S)

t = scale·(dQ·K + Q·dK), then through the cap, plus the bias's own tangent. Queries, keys, values, scales and bias without
a tangent cost nothing: theirs is None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..arguments import Sizes
from .aggregates import Head, Matrices
from .forward import online_softmax
from .program import (
    k_at,
    load_k,
    load_q,
    load_row_tile,
    load_v,
    over_keys,
    program_head,
    q_at,
    scores_and_slope,
    store_statistics,
    v_at,
    visible_logits,
)
from .tile_ops import (
    _BIAS_NONE,
    LN2,
    LOWEST,
    bias_row_pointers,
    bias_tile,
    dropout_keep,
    program_tile,
    tanh,
    zero_hidden_keys,
)


class State(NamedTuple):
    """The running sums of BM rows."""

    O: Any  # [BM, DVP]
    A: Any  # [BM, DVP]
    m: Any  # [BM], as all below
    l: Any
    e: Any
    u: Any
    c: Any


class ScoreDot(NamedTuple):
    """The tangent of what makes the logits of BM rows."""

    scale: Any  # a number, if scales is there
    scales: Any
    bias: Any
    bias_rows: Any  # pointers to the bias's tangent in these rows


@triton.jit
def logits_dot(raw, T, rows, j, head, dot, C: tl.constexpr):
    """The tangent t [BM, BN] of the logits, from products `raw` and their tangent T."""
    t = T * head.scale
    if dot.scales is not None:
        t += raw * dot.scale
    score, slope = scores_and_slope(raw, rows.i, j, head, C, False)
    if C.SLOPED:
        t = t * slope
    if C.CAP:
        th = tanh(score / head.score.cap)
        t = t * (1.0 - th * th)
    if C.BIAS_DOT != _BIAS_NONE:
        t += bias_tile(dot.bias, dot.bias_rows, rows.i, j, head.sizes.n, head.sizes.m, C.BIAS_DOT)
    return t


@triton.jit
def online_softmax_jvp(S, t, show, state, unit, C: tl.constexpr, HIDES: tl.constexpr):
    """Add logits S and their tangent t [BM, BN] to m, l, e, u, c [BM], and rescale O and A: P, P∘t and the new state."""
    u, c = state.u, state.c
    if HIDES:
        t = tl.where(show, t, 0.0)
    P, m, l, e, a, X, shift = online_softmax(S, show, state.m, state.l, state.e, unit, C, HIDES)
    Pt = P * t
    if C.ENTROPY:
        c = a * (c + shift * u) + tl.sum(Pt * X, 1)
    u = a * u + tl.sum(Pt, 1)
    return P, Pt, State(state.O * a[:, None], state.A * a[:, None], m, l, e, u, c)


@triton.jit
def jvp_step(state, Q, dQ, x, dx, head, dot, rows, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add block b of the keys."""
    m = head.sizes.m
    j0 = b * C.BN
    j = j0 + tl.arange(0, C.BN)  # [BN]
    K = load_k(x, head, j0, C, MASKED)
    S = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)  # [BM, BN]
    T = tl.zeros([C.BM, C.BN], tl.float32)
    if dx.q is not None:
        T = tl.dot(dQ, tl.trans(K), T, input_precision=C.PRECISION)
    if dx.k is not None:
        dK = load_k(dx, head, j0, C, MASKED)
        T = tl.dot(Q, tl.trans(dK), T, input_precision=C.PRECISION)
    HIDES: tl.constexpr = MASKED or C.BIAS != _BIAS_NONE
    t = logits_dot(S, T, rows, j, head, dot, C)
    S, show = visible_logits(S, rows, j, slot, head, C, MASKED)
    P, Pt, state = online_softmax_jvp(S, t, show, state, head.unit, C, HIDES)
    if C.DROP:
        keep = dropout_keep(rows.low_key, rows.high_key, j, head.dropout.bound)
        P = tl.where(keep, P, 0.0)
        Pt = tl.where(keep, Pt, 0.0)
    V = load_v(x, head, j0, C, MASKED)
    if HIDES:
        V = zero_hidden_keys(V, show, head.blocks, head.batch, head.index, j, m, C.MASK, C.BIAS)
    P = P.to(V.dtype)
    O = tl.dot(P, V, state.O, input_precision=C.PRECISION)
    A = tl.dot(Pt.to(V.dtype), V, state.A, input_precision=C.PRECISION)
    if dx.v is not None:
        dV = load_v(dx, head, j0, C, MASKED)
        if HIDES:
            dV = zero_hidden_keys(dV, show, head.blocks, head.batch, head.index, j, m, C.MASK, C.BIAS)
        A = tl.dot(P, dV, A, input_precision=C.PRECISION)
    return State(O, A, state.m, state.l, state.e, state.u, state.c)


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "row_blocks"])
def jvp(q, k, v, dq, dk, dv, out, d_out, args, d_args, n, m, heads, groups, row_blocks, C: tl.constexpr):
    """Program (block of rows, batch item and head), as in the forward pass; a sink is not included here."""
    strides, dropout = args.strides, args.dropout
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(row_blocks)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    block = row_blocks - 1 - block
    x = Matrices(q_at(q, head, strides, C), k_at(k, head, strides, C), v_at(v, head, strides, C), None, strides, None)
    dx = Matrices(None if dq is None else q_at(dq, head, d_args.strides, C), None if dk is None else k_at(dk, head, d_args.strides, C), None if dv is None else v_at(dv, head, d_args.strides, C), None, d_args.strides, None)
    i = block * C.BM + tl.arange(0, C.BM)  # [BM]
    d_scale = head.scale
    if d_args.scales is not None:
        d_scale = tl.load(d_args.scales + head.index)
    Q, dQ = load_q(x, head, block * C.BM, C), load_q(dx, head, block * C.BM, C)
    rows = load_row_tile(head, i, C, True)
    bias_rows = bias_row_pointers(d_args.bias, head.batch, head.index, i, C.BIAS_DOT)
    dot = ScoreDot(d_scale, d_args.scales, d_args.bias, bias_rows)
    zeros = tl.zeros([C.BM], tl.float32)
    O = tl.zeros([C.BM, C.DVP], tl.float32)
    state = State(O, O, tl.full([C.BM], LOWEST, tl.float32), zeros, zeros, zeros, zeros)
    state = over_keys(jvp_step, state, (Q, dQ, x, dx, head, dot, rows), head, block, C)

    empty = state.l == 0.0
    l = tl.where(empty, 1.0, state.l)
    row_max = state.m * LN2 if C.FAST else state.m  # [BM] natural units
    u = state.u / l
    factor = dropout.factor / l if C.DROP else 1.0 / l
    O = state.O * factor[:, None]
    A = state.A * factor[:, None] - u[:, None] * O
    d = tl.arange(0, C.DVP)
    valid = (i < n)[:, None] & (d < C.DV)[None, :]
    to = head.batch.to(tl.int64) * strides.o_batch + head.index.to(tl.int64) * strides.o_head
    to = to + i.to(tl.int64)[:, None] * strides.o_row + d[None, :]
    tl.store(out.output + to, O.to(out.output.dtype.element_ty), mask=valid)
    tl.store(d_out.output + to, A.to(d_out.output.dtype.element_ty), mask=valid)
    at = head.first_row + i
    store_statistics(out, at, i < n, state.m, row_max, l, state.e, empty, None, head.index, C)
    tl.store(d_out.lse + at, u, mask=i < n)
    if C.ENTROPY:
        tl.store(d_out.entropy + at, (u * state.e - state.c) / l * LN2, mask=i < n)
