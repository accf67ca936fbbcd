"""The divergence between two attentions p and r over the same keys, head h with head h: what passes share, and the forward ones.

KL needs one pass. With running maxima m and row sums l of both sides, and x = s − m on either side,

    e = Σ exp(x_p)·(x_p − x_r)        KL = e / l_p − ln l_p + ln l_r

When the maxima rise by a and b, e becomes exp(−a)·(e − (a − b)·l_p). With an epsilon, and for JS, a pair's term needs the log
weights, so `row_lse` finds lse of either side first and `divergence_terms` adds up the terms.

Masks may differ. Where they are the same (LISTED), blocks are taken as attention takes them. Otherwise every block between the
first and the last that one of the sides sees is masked twice.

A sink is one more outcome; its term is added at the end. Logits and lse are in log2 units.
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
    over_keys,
    program_head,
    q_at,
    visible_logits,
)
from .tile_ops import (
    _BITS,
    _SPANS,
    DEEP,
    LN2,
    LOG2E,
    LOWEST,
    block_list_start,
    mask_item,
    program_tile,
    select_in_spans,
)

KL, EPSILON, JS = 0, 1, 2
_KL, _EPSILON, _JS = tl.constexpr(KL), tl.constexpr(EPSILON), tl.constexpr(JS)
SMALLEST = tl.constexpr(2.0**-126)  # of the numbers with all digits
FAR = tl.constexpr(1e30)  # instead of lse where a row has no weights: all of them are 0, and differences stay finite


class Side(NamedTuple):
    """One side of a program."""

    Q: Any  # [BM, DP]; of a pass by keys, K [BN, DP]
    x: Any  # Matrices
    head: Any
    rows: Any  # RowTile


class Sums(NamedTuple):
    """A running sum of each side."""

    p: Any
    r: Any


class PairState(NamedTuple):
    """The running sums of BM rows, [BM] each."""

    m_p: Any
    l_p: Any
    m_r: Any
    l_r: Any
    e: Any
    lost: Any  # the largest logit of p at a key that r hides


class PairRows(NamedTuple):
    """What the terms and the backward pass know of rows, broadcast to a tile."""

    lse_p: Any
    lse_r: Any
    g: Any  # in the units of A
    p_delta: Any  # Σ p·A in the same units
    r_delta: Any  # Σ r·B in those of rB
    floor: Any  # ε·u, as `mixing_floor` has it


class Terms(NamedTuple):
    """What a pair adds, and the derivatives."""

    p: Any
    r: Any
    A: Any  # by p, in units of `nats`
    B: Any  # by r: for JS in the same units, else log2 of −B
    rB: Any  # for JS in the same units, else as it is


@triton.jit
def nats(C: tl.constexpr):
    """What A is multiplied by to be in nats: for JS it is log2(p / m), of which half counts."""
    return 0.5 * LN2 if C.KIND == _JS else LN2


@triton.jit
def quick_log2(x, C: tl.constexpr):
    """log2 of numbers from SMALLEST on, to 2⁻²², which is what exp2 has too."""
    if C.PTX:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def softplus2(x):
    """log2(1 + 2ˣ)."""
    return tl.maximum(x, 0.0) + tl.log2(1.0 + tl.exp2(-tl.abs(x)))


@triton.jit
def mixing_floor(floor, C: tl.constexpr):
    """ε·u as `pair_terms` takes it, from its log2: with QUICK the number itself."""
    return tl.maximum(tl.exp2(floor), SMALLEST) if C.QUICK else floor


@triton.jit
def pair_terms(x_p, x_r, floor, kept, C: tl.constexpr):
    """The terms of pairs with log2 weights x_p and x_r; hidden ones have DEEP.

    With QUICK, one logarithm is taken of what p is divided by. Otherwise it is taken of a ratio, which keeps all digits of terms near 0.
    """
    p, r = tl.exp2(x_p), tl.exp2(x_r)
    if C.KIND == _JS:
        if C.QUICK:
            log_m = quick_log2((p + r) * 0.5 + SMALLEST, C)  # finite where both are hidden
            A, B = x_p - log_m, x_r - log_m
        else:
            B = 1.0 - softplus2(x_p - x_r)
            A = B + (x_p - x_r)
        rB = r * B
    elif C.KIND == _EPSILON:
        if C.QUICK:
            log_mixed = quick_log2(r * tl.exp2(kept) + floor, C)
            A, share = x_p - log_mixed, x_r + kept - log_mixed
        else:
            d = x_r + kept - floor
            s = softplus2(d)
            A, share = x_p - floor - s, d - s
        B, rB = x_p - x_r + share, -p * tl.exp2(share)
    else:
        A, B, rB = x_p - x_r, x_p - x_r, -p
    return Terms(p, r, A, B, rB)


@triton.jit
def unit_of(head, C: tl.constexpr):
    """What logits are multiplied by to be in log2 units."""
    return head.unit if C.FAST else LOG2E


@triton.jit
def slot_at(head, i0, j0, C: tl.constexpr):
    """The slot of the bits of a tile that no list names; −1 where it is hidden."""
    slot = 0
    if C.MASK == _BITS:
        blocks = head.blocks
        at = mask_item(blocks, head.batch).to(tl.int64) * blocks.table_item + head.index * blocks.table_head
        slot = tl.load(blocks.table + at + (i0 // 128) * tl.cdiv(head.sizes.m, 128) + j0 // 128)
    return slot


@triton.jit
def block_limits(head, block, count, C: tl.constexpr):
    """The first block that a block needs, and one past the last."""
    first, end = 0, count
    if C.MASK == _SPANS:
        at = head.blocks.bounds + block_list_start(head.blocks, head.batch, head.index, C.MASK) + block * 4
        first, end = tl.load(at), tl.load(at + 3)
        first = tl.where(first < end, first, count)
    return first, end


@triton.jit
def over_both(OVER: tl.constexpr, STEP: tl.constexpr, state, given, p, r, block, count, P: tl.constexpr, R: tl.constexpr):
    """Let STEP add what block `block` needs on either side, of `count` blocks: OVER has the lists that both sides share."""
    if P.LISTED:
        state = OVER(STEP, state, given, p.head, block, P)
    else:
        first_p, end_p = block_limits(p.head, block, count, P)
        first_r, end_r = block_limits(r.head, block, count, R)
        for b in range(tl.minimum(first_p, first_r), tl.maximum(end_p, end_r)):
            state = STEP(state, *given, b, 0, P, True)
    return state


@triton.jit
def side_logits(Q, K, side, i0, j0, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Raw products and logits [BM, BN] of queries and keys from i0 and j0 on, and which are visible unless BY_SPAN."""
    raw = tl.dot(Q, tl.trans(K), input_precision=C.PRECISION)
    j = j0 + tl.arange(0, C.BN)
    if C.LISTED or not MASKED or C.MASK != _BITS:
        S, show = visible_logits(raw, side.rows, j, slot, side.head, C, MASKED and not C.BY_SPAN)
    else:
        slot = slot_at(side.head, i0, j0, C)
        S, show = visible_logits(raw, side.rows, j, tl.maximum(slot, 0), side.head, C, MASKED)
        show = show & (slot >= 0)
    return raw, S, show


@triton.jit
def side_tile(side, b, i0, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """The same for block b of the keys, and the keys."""
    K = load_k(side.x, side.head, b * C.BN, C, MASKED)
    raw, S, show = side_logits(side.Q, K, side, i0, b * C.BN, slot, C, MASKED)
    return raw, S, show, K


@triton.jit
def add_to_softmax(S, m, l, unit):
    """Add logits [BM, BN] to m and l [BM]: what is above the new max, its exponentials, and by how much the max fell short."""
    m_new = tl.maximum(m, tl.max(S, 1) * unit)
    X = S * unit - m_new[:, None]
    E = tl.exp2(X)
    shift = tl.maximum(m - m_new, DEEP)
    return X, E, m_new, tl.exp2(shift) * l + tl.sum(E, 1), shift


@triton.jit
def kl_step(state, p, r, i0, R: tl.constexpr, C: tl.constexpr, b, slot, P: tl.constexpr, MASKED: tl.constexpr):
    """Add block b of the keys."""
    _, S_p, show_p, _ = side_tile(p, b, i0, slot, P, MASKED)
    _, S_r, show_r, _ = side_tile(r, b, i0, slot, R, MASKED)
    lost = state.lost
    if MASKED and P.BY_SPAN:
        j = b * P.BN + tl.arange(0, P.BN)
        S_p, S_r = select_in_spans(S_p, S_r, j[None, :], p.rows.lo[:, None], p.rows.hi[:, None], float("-inf"), C.PTX)
    elif MASKED:
        S_p = tl.where(show_p, S_p, float("-inf"))
        S_r = tl.where(show_r, S_r, float("-inf"))
        if not P.LISTED:
            lost = tl.maximum(lost, tl.max(tl.where(show_r, float("-inf"), S_p), 1) * unit_of(p.head, P))
    X_p, E_p, m_p, l_p, shift_p = add_to_softmax(S_p, state.m_p, state.l_p, unit_of(p.head, P))
    X_r, E_r, m_r, l_r, shift_r = add_to_softmax(S_r, state.m_r, state.l_r, unit_of(r.head, R))
    D = X_p - X_r
    if MASKED:  # without the masks themselves, which would take a register each
        D = tl.where(E_p > 0.0 if P.LISTED else (E_p > 0.0) & (X_r != float("-inf")), D, 0.0)
    e = tl.exp2(shift_p) * (state.e + (shift_p - shift_r) * state.l_p) + tl.sum(E_p * D, 1)
    return PairState(m_p, l_p, m_r, l_r, e, lost)


@triton.jit
def with_sink(sinks, index, lse, SINK: tl.constexpr):
    """lse [BM] with the sink of a head in the denominator, and the sink's log2 weight; DEEP without one."""
    weight, total = tl.full(lse.shape, DEEP, tl.float32), lse
    if SINK:
        sink = tl.load(sinks + index) * LOG2E
        high = tl.maximum(lse, sink)
        total = tl.where(high == float("-inf"), high, high + tl.log2(1.0 + tl.exp2(-tl.abs(lse - sink))))
        weight = sink - total
    return total, tl.where(total == float("-inf"), DEEP, weight)


@triton.jit
def finished_kl(state, sinks_p, sinks_r, index, C: tl.constexpr):
    """KL in nats, and lse of both sides, with the sinks."""
    none_p, none_r = state.l_p == 0.0, state.l_r == 0.0
    log_p, log_r = tl.log2(tl.where(none_p, 1.0, state.l_p)), tl.log2(tl.where(none_r, 1.0, state.l_r))
    keys_p = tl.where(none_p, float("-inf"), state.m_p + log_p)
    keys_r = tl.where(none_r, float("-inf"), state.m_r + log_r)
    lse_p, x_p = with_sink(sinks_p, index, keys_p, C.SINK_P)
    lse_r, x_r = with_sink(sinks_r, index, keys_r, C.SINK_R)
    value = state.e / tl.where(none_p, 1.0, state.l_p) - log_p + log_r
    if C.SINK_P or C.SINK_R:
        value = value + tl.where(none_p, 0.0, keys_p - lse_p) - tl.where(none_r, 0.0, keys_r - lse_r)
        value = value * tl.exp2(keys_p - lse_p)
    value = tl.where(none_p, 0.0, value)
    if C.SINK_P:
        share = tl.exp2(x_p)
        if C.SINK_R:
            value += tl.where(share > 0.0, share * (x_p - x_r), 0.0)
        else:
            value = tl.where(share > 0.0, float("inf"), value)
    value = tl.where(tl.exp2(state.lost - lse_p) > 0.0, float("inf"), value)
    return value * LN2, lse_p, lse_r


@triton.jit(do_not_specialize=["n", "m", "heads", "groups_p", "groups_r", "row_blocks"])
def divergence_kl(
    q_p, k_p, q_r, k_r, out, args_p, args_r, sinks_p, sinks_r, n, m, heads, groups_p, groups_r, row_blocks,
    P: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """KL of BM rows in one pass: program (block of rows, batch item and head)."""
    block, owner = program_tile(row_blocks)
    block = row_blocks - 1 - block
    i = block * P.BM + tl.arange(0, P.BM)
    sizes_p, sizes_r = Sizes(n, m, heads, groups_p), Sizes(n, m, heads, groups_r)
    head_p = Head(*program_head(args_p, sizes_p, owner, P), args_p.score, args_p.blocks, None, sizes_p)
    head_r = Head(*program_head(args_r, sizes_r, owner, R), args_r.score, args_r.blocks, None, sizes_r)
    x_p = Matrices(q_at(q_p, head_p, args_p.strides, P), k_at(k_p, head_p, args_p.strides, P), None, None, args_p.strides, None)
    x_r = Matrices(q_at(q_r, head_r, args_r.strides, R), k_at(k_r, head_r, args_r.strides, R), None, None, args_r.strides, None)
    p = Side(load_q(x_p, head_p, block * P.BM, P), x_p, head_p, load_row_tile(head_p, i, P, True))
    r = Side(load_q(x_r, head_r, block * P.BM, R), x_r, head_r, load_row_tile(head_r, i, R, True))
    zeros = tl.zeros([P.BM], tl.float32)
    state = PairState(zeros + LOWEST, zeros, zeros + LOWEST, zeros, zeros, zeros + float("-inf"))
    state = over_both(over_keys, kl_step, state, (p, r, block * P.BM, R, C), p, r, block, tl.cdiv(m, P.BN), P, R)
    value, lse_p, lse_r = finished_kl(state, sinks_p, sinks_r, p.head.index, C)
    at = p.head.first_row + i
    tl.store(out.value + at, value, mask=i < n)
    tl.store(out.lse_p + at, lse_p, mask=i < n)
    tl.store(out.lse_r + at, lse_r, mask=i < n)


@triton.jit
def lse_step(sums, side, b, slot, C: tl.constexpr, MASKED: tl.constexpr):
    """Add block b of the keys to the row max m and the row sum l."""
    m, l = sums
    _, S, show, _ = side_tile(side, b, 0, slot, C, MASKED)
    if MASKED and C.BY_SPAN:
        j = b * C.BN + tl.arange(0, C.BN)
        S, _ = select_in_spans(S, S, j[None, :], side.rows.lo[:, None], side.rows.hi[:, None], float("-inf"), C.PTX)
    elif MASKED:
        S = tl.where(show, S, float("-inf"))
    _, _, m, l, _ = add_to_softmax(S, m, l, unit_of(side.head, C))
    return m, l


@triton.jit(do_not_specialize=["n", "m", "heads", "groups", "row_blocks"])
def row_lse(q, k, out, args, sinks, n, m, heads, groups, row_blocks, C: tl.constexpr):
    """lse of BM rows of one side, in log2 units, with its sink."""
    sizes = Sizes(n, m, heads, groups)
    block, owner = program_tile(row_blocks)
    head = Head(*program_head(args, sizes, owner, C), args.score, args.blocks, args.dropout, sizes)
    block = row_blocks - 1 - block
    i = block * C.BM + tl.arange(0, C.BM)
    x = Matrices(q_at(q, head, args.strides, C), k_at(k, head, args.strides, C), None, None, args.strides, None)
    side = Side(load_q(x, head, block * C.BM, C), x, head, load_row_tile(head, i, C, True))
    sums = tl.full([C.BM], LOWEST, tl.float32), tl.zeros([C.BM], tl.float32)
    row_max, l = over_keys(lse_step, sums, (side,), head, block, C)
    lse = tl.where(l == 0.0, float("-inf"), row_max + tl.log2(tl.where(l == 0.0, 1.0, l)))
    lse, _ = with_sink(sinks, head.index, lse, C.SINK)
    tl.store(out + head.first_row + i, lse, mask=i < n)


@triton.jit
def log_weights(S, lse, show, unit, MASKED: tl.constexpr):
    """log2 of the weights of logits S; DEEP where hidden."""
    X = S * unit - lse
    if MASKED:
        X = tl.where(show, X, DEEP)
    return X


@triton.jit
def finite_lse(lse):
    """lse as it is subtracted: far away for a row without weights."""
    return tl.where(lse == float("-inf"), FAR, lse)


@triton.jit
def at_least_zero(value):
    """JS, which rounding may leave below 0; NaN stays NaN."""
    return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_terms(S_p, S_r, show_p, show_r, row, mix, p, r, P: tl.constexpr, R: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr):
    """The terms of a tile, for row statistics that are broadcast to it."""
    X_p = log_weights(S_p, row.lse_p, show_p, unit_of(p.head, P), MASKED)
    X_r = log_weights(S_r, row.lse_r, show_r, unit_of(r.head, R), MASKED)
    return pair_terms(X_p, X_r, row.floor, mix.kept, C)


@triton.jit
def terms_step(sums, p, r, row, mix, i0, R: tl.constexpr, C: tl.constexpr, b, slot, P: tl.constexpr, MASKED: tl.constexpr):
    """Add the terms of block b of the keys."""
    _, S_p, show_p, _ = side_tile(p, b, i0, slot, P, MASKED)
    _, S_r, show_r, _ = side_tile(r, b, i0, slot, R, MASKED)
    if MASKED and P.BY_SPAN:
        j = b * P.BN + tl.arange(0, P.BN)
        S_p, S_r = select_in_spans(S_p, S_r, j[None, :], p.rows.lo[:, None], p.rows.hi[:, None], float("-inf"), C.PTX)
        show_p, show_r = S_p != float("-inf"), S_r != float("-inf")
    found = tile_terms(S_p, S_r, show_p, show_r, row, mix, p, r, P, R, C, MASKED)
    return Sums(sums.p + tl.sum(found.p * found.A, 1), sums.r + tl.sum(found.rB, 1))


@triton.jit(do_not_specialize=["n", "m", "heads", "groups_p", "groups_r", "row_blocks"])
def divergence_terms(
    q_p, k_p, q_r, k_r, out, args_p, args_r, sinks_p, sinks_r, mix, n, m, heads, groups_p, groups_r, row_blocks,
    P: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """KL with an epsilon, or JS, of BM rows whose lse are known: program (block of rows, batch item and head)."""
    block, owner = program_tile(row_blocks)
    block = row_blocks - 1 - block
    i = block * P.BM + tl.arange(0, P.BM)
    sizes_p, sizes_r = Sizes(n, m, heads, groups_p), Sizes(n, m, heads, groups_r)
    head_p = Head(*program_head(args_p, sizes_p, owner, P), args_p.score, args_p.blocks, None, sizes_p)
    head_r = Head(*program_head(args_r, sizes_r, owner, R), args_r.score, args_r.blocks, None, sizes_r)
    x_p = Matrices(q_at(q_p, head_p, args_p.strides, P), k_at(k_p, head_p, args_p.strides, P), None, None, args_p.strides, None)
    x_r = Matrices(q_at(q_r, head_r, args_r.strides, R), k_at(k_r, head_r, args_r.strides, R), None, None, args_r.strides, None)
    p = Side(load_q(x_p, head_p, block * P.BM, P), x_p, head_p, load_row_tile(head_p, i, P, True))
    r = Side(load_q(x_r, head_r, block * P.BM, R), x_r, head_r, load_row_tile(head_r, i, R, True))
    index = p.head.index
    at = p.head.first_row + i
    lse_p = tl.load(out.lse_p + at, mask=i < n, other=FAR)
    lse_r = tl.load(out.lse_r + at, mask=i < n, other=FAR)
    zeros = tl.zeros([P.BM], tl.float32)  # not lse · 0, which is NaN for a row that sees nothing
    floor = zeros
    if C.KIND == _EPSILON:
        floor = mixing_floor(tl.load(mix.floor + at, mask=i < n, other=0.0), C)
    row = PairRows(finite_lse(lse_p)[:, None], finite_lse(lse_r)[:, None], None, None, None, floor[:, None])
    sums = over_both(over_keys, terms_step, Sums(zeros, zeros), (p, r, row, mix, block * P.BM, R, C), p, r, block, tl.cdiv(m, P.BN), P, R)
    sum_p, sum_r = sums.p, sums.r
    if C.SINK_P or C.SINK_R:
        sunk_p, sunk_r = zeros + DEEP, zeros + DEEP
        if C.SINK_P:
            sunk_p = tl.where(lse_p == float("-inf"), DEEP, tl.load(sinks_p + index) * LOG2E - lse_p)
        if C.SINK_R:
            sunk_r = tl.where(lse_r == float("-inf"), DEEP, tl.load(sinks_r + index) * LOG2E - lse_r)
        found = pair_terms(tl.maximum(sunk_p, DEEP), tl.maximum(sunk_r, DEEP), floor, mix.kept, C)
        sum_p += found.p * found.A
        sum_r += found.rB
    sum_p *= nats(C)
    value = sum_p
    if C.KIND == _JS:
        sum_r *= nats(C)
        value = at_least_zero(sum_p + sum_r)
    tl.store(out.value + at, value, mask=i < n)
    tl.store(out.delta_p + at, sum_p, mask=i < n)
    tl.store(out.delta_r + at, sum_r, mask=i < n)
