"""Aggregates that the functions of a Hopper kernel share: compile-time constants, and the parameters of forward and backward."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon

from ..portable.aggregates import Constants

__all__ = [
    "BackwardBarriers", "BackwardDescriptors", "BackwardParams", "BackwardSmem", "DQDescriptors", "ForwardBarriers", "ForwardDescriptors",
    "ForwardOutputs", "ForwardParams", "ForwardSmem", "GradientDescriptors", "GroupKeys", "KeyBlocks", "KeyTile", "OutputDescriptors", "RowBlock", "RowStats", "SoftmaxState", "TileIndex", "ValueBlock", "VisitedRows",
    "traits_of",
]  # fmt: skip


@gluon.constexpr_function
def traits_of(**constants):
    """These constants as one constant, whose fields are constants too."""
    return Constants(**constants)


class ForwardDescriptors(NamedTuple):
    """TMA descriptors of what the forward reads, each tensor in two chunks of its dim; None where one chunk is enough."""

    q: Any
    qb: Any
    k: Any
    kb: Any
    v: Any
    vb: Any


class OutputDescriptors(NamedTuple):
    """TMA descriptors of the output in two chunks; None where one chunk is enough, and where pointers store it."""

    o: Any
    ob: Any


class ForwardSmem(NamedTuple):
    """Buffers in shared memory, each tensor in two chunks of its dim."""

    Q: Any  # [Q buffers · GROUPS, 1, 1, ROWS, DA]
    QB: Any
    K: Any  # [STAGES, 1, 1, BN, DA]
    KB: Any
    V: Any  # [STAGES, 1, 1, BN, EA], and with a bias one block of cleaned values per group
    VB: Any


class ForwardBarriers(NamedTuple):
    """mbarriers, one per Q buffer or per stage; in a jvp, those of K and V serve their tangents too."""

    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any


class ForwardOutputs(NamedTuple):
    """Pointers to what the forward writes."""

    output: Any
    lse: Any
    row_max: Any
    log_row_sum: Any
    entropy: Any


class ForwardParams(NamedTuple):
    """What every warp of a forward program gets; in a jvp, None for what it does not have. No descriptors: `BackwardParams`."""

    smem: Any
    barriers: Any
    outputs: Any
    strides: Any  # of the output
    scale: Any
    scales: Any  # one per head, in place of `scale`
    cap: Any
    sinks: Any
    bias: Any
    lists: Any  # the mask's block lists
    drop: Any
    n: Any
    M: Any
    E: Any
    row_blocks: Any
    batch_heads: Any  # batch size times query heads
    num_heads: Any
    heads_per_kv: Any  # query heads that share a key head
    swizzle: Any  # batch-heads that are scheduled together, so that they share the L2 cache
    counters: Any  # the work counter, followed by one retry counter per batch-head
    tile_info: Any  # in shared memory


class KeyBlocks(NamedTuple):
    """The key blocks that a row block visits. With lists, the first three are positions in these."""

    first: Any  # the first one; with lists, the first partial one
    full: Any  # the first full one
    full_end: Any  # one past the last full one
    num_full: Any
    total: Any


class RowBlock(NamedTuple):
    """The rows of one consumer group, and what their logits are computed with."""

    i: Any  # [ROWS]
    q_buffer: Any  # the index of their queries in shared memory
    batch: Any
    h: Any
    key_blocks: Any
    bias_at: Any  # pointers to their biases
    drop_keys: Any  # their keys of the dropout hash
    scale: Any
    unit: Any  # scale in log2 units
    all_seen: Any  # whether every key is visible to some row


class SoftmaxState(NamedTuple):
    """The running statistics of the online softmax."""

    m: Any  # [ROWS] row max
    l: Any  # [ROWS, 8] partial row sums
    e: Any  # [ROWS, 8] partial sums of P·T, for the entropy
    top: Any  # [ROWS, 8] the largest weights relative to m, as the bits of float32


class ValueBlock(NamedTuple):
    """The values of the previous key block, whose product is still to come."""

    seen: Any  # [BN], with a bias: which keys some row of the group sees
    dirty: Any  # whether some value must be set to 0 before the product
    j0: Any  # the first key


class BackwardDescriptors(NamedTuple):
    """TMA descriptors of what the backward reads, in two chunks of a dim; None where one chunk is enough."""

    q: Any
    qb: Any
    k: Any
    kb: Any
    v: Any
    vb: Any
    do: Any
    dob: Any
    lse: Any
    delta: Any
    g_entropy: Any


class GradientDescriptors(NamedTuple):
    """TMA descriptors of dK and dV in two chunks; None where one is enough, and where pointers store them."""

    dk: Any
    dkb: Any
    dv: Any
    dvb: Any


class DQDescriptors(NamedTuple):
    """TMA descriptors of dQ's sums in two chunks; None where one is enough."""

    sums: Any
    sums_b: Any


class BackwardSmem(NamedTuple):
    """Buffers of the backward in shared memory, in two chunks of a dim; where one is enough, it is the second, too.

    The wide backward has no GROUPS, one stage of dO, and None for second chunks; keys of 192 dims have None for those of V and dO.
    """

    Q: Any  # [STAGES, 1, 1, BM, DA]
    QB: Any  # [STAGES, 1, 1, BM, DB]
    K: Any  # [GROUPS, 1, 1, ROWS, DA]
    KB: Any
    V: Any  # [GROUPS, 1, 1, ROWS, EA]
    VB: Any
    dO: Any  # [O_STAGES, 1, 1, BM, EA]
    dOB: Any
    P: Any  # [ROWS, BM] of the wide one
    dS: Any  # [DS_BUFFERS · GROUPS, ROWS, BM]
    dQ: Any  # [DQ_BUFFERS · PARTS, 2 · DA / PARTS, 32], or of the wide one [2, twice the columns of a part, 32]; in the order of registers
    dQB: Any


class BackwardBarriers(NamedTuple):
    """mbarriers of the backward; None for those that a kernel does not have."""

    k_ready: Any
    k_free: Any  # and V and the tile info are free, too; None where a program has one tile
    q_ready: Any  # [STAGES + 1], the last one for queries that are cleaned before they are ready
    q_free: Any  # and dO is free, too, where there is no o_free
    o_ready: Any
    o_free: Any
    p_ready: Any
    s_ready: Any  # [DS_BUFFERS]; [DS_BUFFERS · GROUPS], or a pair, where a group waits for the other one's dS
    s_free: Any
    d_ready: Any
    d_free: Any


class RowStats(NamedTuple):
    """Row statistics in shared memory: [stages of Q or dO, BM]; δ and g_H of the wide backward [BM]."""

    lse: Any  # in the units of the exponent; +inf for a row that sees no key
    delta: Any
    g_entropy: Any  # the entropy's gradient, or any buffer without one


class BackwardParams(NamedTuple):
    """What every warp of a backward program gets; no descriptors, which take Triton long to hand from function to function.

    The kernel builds it from separate arguments: Triton specialises a kernel for the numbers in a tuple that it is called with.
    """

    smem: Any
    barriers: Any
    row_stats: Any
    dk: Any
    dv: Any
    dk_strides: Any
    dv_strides: Any
    scale: Any
    cap: Any
    bias: Any
    scales: Any  # one per query head, in place of `scale`
    lists: Any  # the mask's block lists
    dq_order: Any
    drop: Any
    empty: Any  # int32 (batch, heads, row blocks): whether a row of a block sees nothing
    seen: Any  # int8 (batch, heads, M), where a bias may hide keys
    semaphores: Any  # of dQ
    n: Any
    M: Any
    D: Any
    E: Any
    padded_n: Any  # n, rounded up to whole row blocks
    key_blocks: Any
    batch_kv_heads: Any  # batch size times key heads
    num_heads: Any  # of queries
    heads_per_kv: Any  # query heads that share a key head
    swizzle: Any  # key heads that are scheduled together
    tile_info: Any  # in shared memory; None where a program has one tile


class KeyTile(NamedTuple):
    """A key block of a key head for a consumer group, and the rows that see it in the first query head."""

    block: Any
    batch: Any
    kv_head: Any
    first: Any  # `key_blocks.row_block_range`
    count: Any
    begin: Any  # `key_blocks.common_rows`
    end: Any
    unseen: Any  # `nonfinite.some_unseen`


class GroupKeys(NamedTuple):
    """The keys and values of a consumer group in the backward."""

    batch: Any
    key: Any  # the first one
    K: Any  # [ROWS, DA], as a left operand in registers; None if it stays in shared memory
    V: Any
    columns: Any  # of the keys of all groups, for its part of dQ; 0 if a third group computes dQ


class VisitedRows(NamedTuple):
    """The row blocks that a consumer group visits in the backward, for the query heads that take turns at them."""

    begin: Any  # `key_blocks.common_rows`
    end: Any
    first_head: Any
    heads: Any


class TileIndex(NamedTuple):
    """Which tile of the weights a consumer group works on in the backward."""

    batch: Any
    h: Any
    b: Any  # row block
    j: Any  # [ROWS] keys
    low: Any  # [ROWS] what the mask says of them: `key_blocks.load_mask`
    high: Any
