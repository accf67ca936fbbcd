"""Which row blocks a key block visits in the Hopper backward, and its position in the order that adds to dQ of each.

On a GPU a program waits until the dQ semaphore reaches its position, and would hang if it never did. Here one tile
after the other is done, as programs take them: none may have to wait. They use the kernel's own scheduler, in Python.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

import regard
from gluon_in_python import MASKS, in_python, pointed
from regard.kernels import ahead
from regard.kernels.block_lists import BITS, MASK_BLOCK, NONE, SPANS
from regard.kernels.block_mask import BlockMask, _mask_bits, block_mask
from regard.kernels.hopper import key_blocks
from regard.kernels.hopper.configs import ROWS
from regard.kernels.hopper.dq_order import dq_order

CPU = torch.device("cpu")
SIZES = [(64, 128), (64, 64), (128, 128)]
sizes = pytest.mark.parametrize(("BM", "BN"), SIZES)


heads_together, key_tile, next_visit, row_block_range, row_block_at, dq_position, common_rows, is_partial = (
    in_python(x)
    for x in (
        key_blocks.heads_together,
        key_blocks.key_tile,
        key_blocks.next_visit,
        key_blocks.row_block_range,
        key_blocks.row_block_at,
        key_blocks.dq_position,
        key_blocks.common_rows,
        key_blocks.is_partial,
    )
)


class Shape(NamedTuple):
    """Block sizes, batch items, key heads, query heads per key head, key heads scheduled together."""

    BM: int = 64
    BN: int = 128
    items: int = 1
    kv: int = 1
    heads_per_kv: int = 1
    swizzle: int = 2


def taken(made: BlockMask, shape: Shape) -> list[tuple[int, int, int]]:
    """The item, key head and key block of each tile, in the order in which programs take them."""
    blocks, batch_kv_heads = -(-made.m // shape.BN), shape.items * shape.kv
    params = SimpleNamespace(
        key_blocks=blocks,
        batch_kv_heads=batch_kv_heads,
        swizzle=min(shape.swizzle, batch_kv_heads),
        num_heads=shape.kv * shape.heads_per_kv,
        heads_per_kv=shape.heads_per_kv,
    )
    found = []
    for tile in range(blocks * batch_kv_heads):
        block, item, kv = key_tile(params, tile)
        found.append((item, kv, block))
    return found


class Step(NamedTuple):
    head: int  # a query head …
    rows: int  # … and a row block …
    slot: int  # … the slot of its bits …
    partial: list[bool]  # … whether the mask hides part of it from each group of keys …
    position: int  # … and how many key blocks add to it before


def visits(made: BlockMask, shape: Shape, item: int, kv: int, block: int) -> list[Step]:
    """The row blocks and query heads that a key block visits, in the kernel's order."""
    BM, BN = shape.BM, shape.BN
    params = SimpleNamespace(
        lists=pointed(made.by_keys(BM, BN)),
        dq_order=pointed(dq_order(made, BM, BN)),
        n=made.n,
        M=made.m,
        key_blocks=-(-made.m // BN),
        heads_per_kv=shape.heads_per_kv,
    )
    groups = range(block * BN, min(block * BN + BN, made.m), ROWS)
    heads = heads_together(params, made.kind)
    found = []
    for first_head in range(kv * shape.heads_per_kv, (kv + 1) * shape.heads_per_kv, heads):
        first, count = row_block_range(params, item, first_head, block, BM, made.kind)
        ends = [common_rows(params, item, first_head, key, made.kind) for key in groups]
        t, head = first + count - 1, first_head
        for _ in range(count * heads):
            b, slot = row_block_at(params, t, made.kind)
            position = dq_position(params, t, b, item, head, block, made.kind)
            partial = [bool(is_partial(b, slot, *end, made.n, BM, made.kind)) for end in ends]
            found.append(Step(head, b, slot, partial, position))
            t, head = next_visit(t, head, first_head, heads)
    return found


def shown_by_keys(made: BlockMask, shape: Shape, item: int, head: int, slot: int, rows: slice, keys: slice) -> Tensor:
    """What the numbers of each key show of a partial block: by its span of rows, or by its bits of them."""
    order = dq_order(made, shape.BM, shape.BN)
    i = torch.arange(rows.start, min(rows.stop, made.n))[:, None]
    if made.kind == SPANS:
        assert order.begin is not None
        assert order.end is not None
        at = (item // made.inner % len(order.begin), head % order.begin.shape[1])
        begin, end = (x[at][: made.m][keys] for x in (order.begin, order.end))
        return (i >= begin) & (i < end)
    assert order.bits is not None
    by_key = ((order.bits[max(slot, 0), :, :, None] >> torch.arange(32)) & 1).bool().flatten(1)  # (SIDE, SIDE)
    first = keys.start % MASK_BLOCK
    return by_key.mT[i[:, 0] % MASK_BLOCK, first : first + min(keys.stop, made.m) - keys.start]


def check(made: BlockMask, truth: Tensor, shape: Shape) -> None:
    """Check a block mask against its mask (items, heads, n, m): no program waits, and all pairs are visited."""
    (n, m), (BM, BN) = (made.n, made.m), shape[:2]
    added = torch.zeros(shape.items, shape.kv * shape.heads_per_kv, -(-n // BM), dtype=torch.int64)
    met = torch.zeros(*added.shape[:2], n, m, dtype=torch.bool)
    for item, kv, block in taken(made, shape):
        keys = slice(block * BN, (block + 1) * BN)
        steps = visits(made, shape, item, kv, block)
        turns = [(-s.rows, s.head) if made.lead[1] == 1 else (s.head, -s.rows) for s in steps]
        assert turns == sorted(set(turns))  # rows fall, and heads that share a mask take turns
        for head, b, slot, partial, position in steps:
            assert position == added[item, head, b]
            added[item, head, b] += 1
            rows = slice(b * BM, (b + 1) * BM)
            met[item, head, rows, keys] = True
            shown = truth[item, head, rows, keys]
            assert shown.numel()
            for part, hidden in zip(shown.split(ROWS, 1), partial, strict=True):
                assert hidden or part.all()
            if any(partial) and made.kind != NONE:
                assert torch.equal(shown_by_keys(made, shape, item, head, slot, rows, keys), shown)
    assert not (truth & ~met).any()


def bits(mask: regard.Mask, n: int, m: int) -> BlockMask:
    return BlockMask(n, m, mask_bits=_mask_bits(mask, n, m, CPU), lead=mask.lead)


GROUPED = {1: (1, 2), 4: (2, 2)}  # key heads, and query heads for each, by the heads that a mask tells apart


@sizes
@pytest.mark.parametrize(("mask", "n", "m"), MASKS, ids=lambda x: repr(x)[:60] if isinstance(x, regard.Mask) else None)
def test_no_program_waits_for_a_later_one_and_every_visible_pair_is_visited(
    mask: regard.Mask, n: int, m: int, BM: int, BN: int
) -> None:
    items, heads = mask.lead
    shape = Shape(BM, BN, items, *GROUPED[heads], swizzle=3)
    truth = mask.dense(n, m).expand(items, shape.kv * shape.heads_per_kv, n, m)
    for made in (block_mask(mask, n, m, CPU), bits(mask, n, m)):
        check(made, truth, shape)


def test_the_masks_above_come_in_all_kinds() -> None:
    kinds = [block_mask(mask, n, m, CPU).kind for mask, n, m in MASKS]
    assert min(kinds.count(kind) for kind in (NONE, SPANS, BITS)) > 1


@st.composite
def spans(draw: st.DrawFn) -> tuple[BlockMask, Tensor]:
    """Ends that never fall, in any other way: rows without keys, keys without rows, jumps."""
    n, m, items, heads = draw(st.integers(1, 400)), draw(st.integers(1, 400)), *draw(st.sampled_from([(1, 1), (2, 2)]))
    corners = st.lists(st.integers(0, m), min_size=1, max_size=5)
    lo, hi = torch.empty(2, items, heads, n, dtype=torch.int32)
    for ends in (lo, hi):
        for row in ends.flatten(0, 1):
            values = sorted(draw(corners))
            row[:] = torch.tensor(values).repeat_interleave(-(-n // len(values)))[:n]
    j = torch.arange(m)
    return BlockMask(n, m, lo, hi, lead=(items, heads)), (j >= lo[..., None]) & (j < hi[..., None])


@settings(max_examples=60)
@given(spans(), st.sampled_from(SIZES), st.integers(1, 5))
def test_no_program_waits_whatever_the_spans(
    drawn: tuple[BlockMask, Tensor], size: tuple[int, int], swizzle: int
) -> None:
    made, truth = drawn
    items, heads = made.lead
    check(made, truth, Shape(*size, items, 1, heads, swizzle))


@settings(max_examples=40)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.lists(st.tuples(*[st.integers(0, 300)] * 4), max_size=4),
    st.sampled_from(SIZES),
)
def test_no_program_waits_whatever_the_bits(
    n: int, m: int, parts: list[tuple[int, int, int, int]], size: tuple[int, int]
) -> None:
    seen = torch.zeros(1, 2, n, m, dtype=torch.bool)
    for at, (top, left, bottom, right) in enumerate(parts):
        seen[:, at % 2, top:bottom, left:right] = True
    check(bits(regard.dense(seen), n, m), seen, Shape(*size, 1, 2, 1))


@sizes
def test_items_that_share_an_item_of_the_mask_have_its_order(BM: int, BN: int) -> None:
    mask = regard.causal(offset=[-70, 100])
    made = block_mask(mask, 300, 300, CPU, inner=3)
    check(made, mask.dense(300, 300).repeat_interleave(3, 0), Shape(BM, BN, 6, swizzle=4))


@pytest.mark.parametrize("swizzle", [1, 2, 4, 7])
def test_each_tile_is_a_block_of_its_own_and_a_head_starts_at_its_first_keys(swizzle: int) -> None:
    shape = Shape(items=2, kv=3, swizzle=swizzle)
    found = taken(BlockMask(64, 600), shape)
    assert sorted(found) == [(item, kv, block) for item in range(2) for kv in range(3) for block in range(5)]
    for owner in {tile[:2] for tile in found}:
        assert [block for *own, block in found if tuple(own) == owner] == [0, 1, 2, 3, 4]
    beside = [program[:2] for program in found[: min(swizzle, 6)]]
    assert len(set(beside)) == len(beside)


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.strided(3)], ids=repr)
def test_the_order_is_built_once_per_block_size(mask: regard.Mask | None) -> None:
    made = block_mask(mask, 300, 300, CPU)
    assert dq_order(made, 64, 128) is dq_order(made, 64, 128)
    assert dq_order(made, 64, 64) is not dq_order(made, 64, 128)


def test_the_order_is_dropped_with_its_block_mask() -> None:
    made = bits(regard.causal(), 300, 300)
    entry = dq_order(made, 64, 128).entry
    assert entry is not None
    kept = weakref.ref(entry)
    del entry
    assert kept() is not None
    del made
    gc.collect()
    assert kept() is None


def test_the_order_of_a_captured_graph_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "is_capturing", lambda: True)
    made = bits(regard.causal(), 300, 300)
    assert dq_order(made, 64, 128) is not dq_order(made, 64, 128)


def test_strides_are_multiples_that_compile_nothing_new() -> None:
    mask = regard.dense(torch.ones(2, 4, 300, 700, dtype=torch.bool).tril())
    order = dq_order(block_mask(mask, 300, 700, CPU), 64, 64)
    spans_order = dq_order(block_mask(regard.causal(offset=[0, 3]), 300, 700, CPU), 64, 64)
    for strides in (order, spans_order):
        assert all(x % 16 == 0 for x in strides if isinstance(x, int))


def test_a_group_of_keys_masks_one_block_of_rows_of_a_causal_mask() -> None:
    n = 640
    made = block_mask(regard.causal(), n, n, CPU)
    assert made.kind == SPANS
    for block in range(n // 128):
        steps = visits(made, Shape(), 0, 0, block)
        masked = [[s.rows for s in steps if s.partial[group]] for group in range(2)]
        assert masked == [[2 * block], [2 * block + 1, 2 * block]]  # the second sees nothing of the first
