"""Which blocks of rows a block of keys meets on Hopper, its turn to add to each of them, what the mask hides of it, and what a bias adds."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.tile_ops import (
    _BIAS_ALIBI,
    _BIAS_TENSOR,
    _BITS,
    _NONE,
    _SPANS,
    bias_row_pointers,
    bias_tile,
    block_list_start,
)
from . import ptx
from .online_softmax import UNSET
from .tile_scheduler import ROWS
from .tile_scheduler import place as nth_place

OUTSIDE = gl.constexpr(ptx.OUTSIDE)


class Task(NamedTuple):
    """What every warp of a program is told, beside the tensors. A kernel makes it of its arguments: Triton would compile anew for
    each number of a tuple that it is called with."""

    scales: Any
    where: Any
    turns: Any
    drop: Any
    seen: Any  # int8 (items, heads, M), where a bias may hide keys
    counters: Any
    n: Any
    M: Any
    D: Any
    E: Any
    NP: Any  # rows, with those that fill the last block
    blocks: Any  # of keys
    owners: Any  # items times key heads
    heads: Any  # of queries
    groups: Any  # of queries that share a head of keys
    section: Any  # key heads that are worked on together


@gluon.constexpr_function
def lent(dtype):
    """The PTX that loads a number of a bias."""
    return ptx.LENT[str(dtype)]


@gluon.jit
def walk_of(task, item, h, block, BM: gl.constexpr, MASK: gl.constexpr):
    """The blocks of rows that a block of keys meets, in ascending order: the first (of lists its place), and how many."""
    if MASK == _NONE:
        first, count = 0, gl.cdiv(task.n, BM)
    elif MASK == _SPANS:
        at = task.where.bounds + block_list_start(task.where, item, h, MASK) + block * 4
        first = gl.load(at)
        count = gl.load(at + 3) - first
    else:
        at = task.turns.start + block_list_start(task.where, item, h, MASK) + block
        first = gl.load(at)
        count = gl.load(at + 1) - first
    return first, count


@gluon.jit
def rows_at(task, t, first, MASK: gl.constexpr):
    """The t-th block of rows that is met, and the slot of its bits, −1 where it is full."""
    if MASK == _BITS:
        b, slot = gl.load(task.turns.entry + first + t), gl.load(task.turns.slot + first + t)
    else:
        b, slot = first + t, 0
    return b, slot


@gluon.jit
def turn_at(task, t, b, first, item, h, block, MASK: gl.constexpr):
    """How many blocks of keys add to a block of rows before this one."""
    turns = task.turns
    if MASK == _NONE:
        turn = task.blocks - 1 - block
    elif MASK == _SPANS:
        owner = item // gl.load(task.where.inner)
        turn = gl.load(turns.base + owner * turns.row_item + h * turns.row_head + b)
        turn -= gl.load(turns.rank + owner * turns.key_item + h * turns.key_head + block)
    else:
        turn = gl.load(turns.turn + first + t)
    return turn


@gluon.jit
def place(task):
    """A program's block of keys, item and key head. `section` heads are worked on together; of theirs the last keys come first."""
    block, own = nth_place(gl.program_id(0), task.blocks, task.owners, task.section)
    kv_heads = task.heads // task.groups
    return block, own // kv_heads, own % kv_heads


@gluon.jit
def common(task, item, h, row, MASK: gl.constexpr):
    """The rows that see all ROWS keys of a group, the first of them `row`: where they begin, and where they end."""
    begin, behind = 0, task.n
    if MASK == _SPANS:
        turns = task.turns
        at = (item // gl.load(task.where.inner)) * turns.span_item + h * turns.span_head
        begin = gl.load(turns.begin + at + (gl.minimum(row + ROWS, task.M) - 1))
        behind = gl.load(turns.behind + at + gl.minimum(row, task.M - 1))
    return begin, behind


@gluon.jit
def hides(b, slot, begin, behind, n, BM: gl.constexpr, MASK: gl.constexpr):
    """Whether the mask hides keys of a group from rows of a block."""
    partial = slot >= 0
    if MASK != _BITS:
        partial = (b * BM < begin) | (gl.minimum(b * BM + BM, n) > behind)
    return partial


@gluon.jit
def veil(S, b, j, slot, item, h, task, BM: gl.constexpr, MASK: gl.constexpr, TL: gl.constexpr):
    """S [BM, ROWS], −inf where the mask hides, and for keys beyond the last: what `fold.veil` does, by keys.

    A row is its place among the rows of its thread, a constant, and where the thread begins: two of eight are a thread's.
    """
    turns, M = task.turns, task.M
    c = gl.arange(0, BM, gl.SliceLayout(1, TL))  # [BM]
    begin = c & 6
    c = gl.broadcast(S, (c & -7)[:, None])[1]  # [BM, ROWS]
    if MASK == _BITS:
        at = turns.bits + gl.maximum(slot, 0).to(gl.int64) * 512 + (j % 128) * 4 + b * BM % 128 // 32  # [ROWS]; slot 0 shows all
        word = c * 0
        for k in gl.static_range(BM // 32):
            word = gl.where(c // 32 == k, gl.load(at + k, mask=j < M, other=0)[None, :], word)
        S = gl.inline_asm_elementwise(UNSET, "=f,f,r,r", [S, word >> begin[:, None], (c * 0 + 1) << (c % 32)], gl.float32, True, 1)
    elif MASK == _NONE:
        S = gl.where((j < M)[None, :], S, float("-inf"))
    else:
        at = (item // gl.load(task.where.inner)) * turns.span_item + h * turns.span_head + j  # [ROWS]
        begin += b * BM
        first = gl.load(turns.begin + at, mask=j < M, other=0)[None, :] - begin[:, None]
        behind = gl.load(turns.behind + at, mask=j < M, other=0)[None, :] - begin[:, None]
        S = gl.inline_asm_elementwise(OUTSIDE, "=f,f,r,r,r", [S, c, first, behind], gl.float32, True, 1)
    return S


@gluon.jit
def added(bias, item, h, b, j, task, BM: gl.constexpr, BIAS: gl.constexpr, TL: gl.constexpr):
    """What a bias adds to the logits of a block's rows and keys j, [BM, ROWS]; rows and keys beyond the last have what the last have.

    Addresses are told by 31 bits: a thread holds 32 numbers, and has no registers for as many of 64.
    """
    i = b * BM + gl.arange(0, BM, gl.SliceLayout(1, TL))  # [BM]
    if BIAS == _BIAS_ALIBI:
        X = bias_tile(bias, bias_row_pointers(bias, item, h, i, BIAS), i, j, task.n, task.M, BIAS)
    else:
        at = bias.at + h.to(gl.int64) * bias.head + item.to(gl.int64) * bias.item
        if BIAS == _BIAS_TENSOR:
            each = gl.minimum(i, task.n - 1)[:, None] * bias.row + gl.minimum(j, task.M - 1)[None, :] * bias.key  # [BM, ROWS]
        else:
            ahead = j[None, :] - (i[:, None] + bias.offset)
            each = gl.minimum(gl.maximum(ahead, -bias.reach), bias.reach) + bias.reach
        LENT: gl.constexpr = lent(bias.at.dtype.element_ty)
        X = gl.inline_asm_elementwise(LENT, "=f,l,r", [at.to(gl.int64, bitcast=True), each], gl.float32, True, 1)
    return X
