"""Which blocks of rows a block of keys meets in the Hopper backward, and its turn to add to each of them.

On a GPU a program waits until its turn has come, so that a turn which never comes would hang it. Here the programs run
one after the other, as they are launched: none may have to wait. They walk by the kernel's own functions, in Python.
"""

from __future__ import annotations

import gc
import weakref
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

import regard
from regard.kernels import turns as module
from regard.kernels.blocks import BITS, NONE, SPANS, Layout
from regard.kernels.hopper import backward
from regard.kernels.turns import turns
from regard.layout import _words, layout

CPU = torch.device("cpu")
SIZES = [(64, 128), (64, 64), (128, 128)]
sizes = pytest.mark.parametrize(("BM", "BN"), SIZES)


class Pointer(NamedTuple):
    """A place in the memory of a tensor; outside of it nothing can be read."""

    numbers: list[int]
    at: int = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.numbers, self.at + more)


def load(pointer: Pointer) -> int:
    assert 0 <= pointer.at < len(pointer.numbers)
    return pointer.numbers[pointer.at]


def pointed(parts: Any) -> Any:
    """A structure of tensors and numbers as a kernel gets it."""
    return parts._replace(
        **{name: Pointer(x.flatten().tolist()) for name, x in parts._asdict().items() if isinstance(x, Tensor)}
    )


def in_python(kernel: Any, **known: Any) -> FunctionType:
    """A function of a kernel, with Python's numbers in place of the chip's."""
    language = SimpleNamespace(load=load, cdiv=lambda a, b: -(-a // b), minimum=min, **known)
    code: FunctionType = kernel.fn
    outer = {**code.__globals__, "gl": language, "tl": language}
    if "seat" in code.__code__.co_names:
        outer["seat"] = in_python(code.__globals__["seat"])
    return FunctionType(code.__code__, outer)


walk_of, rows_at, turn_at = (in_python(x) for x in (backward.walk_of, backward.rows_at, backward.turn_at))


class Shape(NamedTuple):
    """How the work is cut: blocks, batch items, key heads, query heads that share one, key heads worked on together."""

    BM: int = 64
    BN: int = 128
    items: int = 1
    kv: int = 1
    groups: int = 1
    section: int = 2


def launched(made: Layout, shape: Shape) -> list[tuple[int, int, int]]:
    """The item, the key head and the block of keys of each program, the first to be launched first."""
    blocks, owners = -(-made.m // shape.BN), shape.items * shape.kv
    found = []
    for program in range(blocks * owners):
        place = in_python(backward.place, program_id=lambda axis, program=program: program)
        block, own = place(blocks, owners, min(shape.section, owners))
        found.append((*divmod(own, shape.kv), block))
    return found


class Step(NamedTuple):
    rows: int  # a block of rows …
    slot: int  # … the slot of its bits …
    partial: bool  # … whether the mask hides a part of it …
    turn: int  # … and how many blocks of keys have added to it before


def walked(made: Layout, shape: Shape, item: int, head: int, block: int) -> list[Step]:
    """The blocks of rows that a block of keys meets, in the order of the kernel."""
    BM, BN = shape.BM, shape.BN
    where, order = pointed(made.by_keys(BM, BN)), pointed(turns(made, BM, BN))
    first, full, until, count = walk_of(where, order, item, head, block, made.n, BM, made.kind)
    found = []
    for t in range(count):
        b, slot, partial = rows_at(order, t, first, full, until, made.kind)
        turn = turn_at(where, order, t, b, first, item, head, block, -(-made.m // BN), made.kind)
        found.append(Step(b, slot, bool(partial), turn))
    return found


def bits_of(made: Layout, slot: int) -> Tensor:
    assert made.words is not None
    return ((made.words.bits[max(slot, 0), :, :, None] >> torch.arange(32)) & 1).bool().flatten(1)  # (SIDE, SIDE)


def check(made: Layout, truth: Tensor, shape: Shape) -> None:
    """Hold a layout against its mask, (items, heads, n, m): no program waits, and together they meet every pair."""
    (n, m), (BM, BN) = (made.n, made.m), shape[:2]
    added = torch.zeros(shape.items, shape.kv * shape.groups, -(-n // BM), dtype=torch.int64)
    met = torch.zeros(*added.shape[:2], n, m, dtype=torch.bool)
    for item, kv, block in launched(made, shape):
        keys = slice(block * BN, (block + 1) * BN)
        for head in range(kv * shape.groups, (kv + 1) * shape.groups):
            steps = walked(made, shape, item, head, block)
            assert [s.rows for s in steps] == sorted({s.rows for s in steps})
            assert [s.turn for s in steps] == [int(added[item, head, s.rows]) for s in steps]
            for b, slot, partial, _ in steps:
                added[item, head, b] += 1
                rows = slice(b * BM, (b + 1) * BM)
                met[item, head, rows, keys] = True
                shown = truth[item, head, rows, keys]
                assert shown.numel()
                if not partial:
                    assert shown.all()
                elif made.kind == BITS:
                    row, key = b * BM % 128, block * BN % 128
                    here = bits_of(made, slot)[row : row + len(shown), key : key + shown.shape[1]]
                    assert torch.equal(here, shown)
    assert not (truth & ~met).any()


def bits(mask: regard.Mask, n: int, m: int) -> Layout:
    return Layout(n, m, words=_words(mask, n, m, CPU), lead=mask.lead)


def random(*shape: int, share: float = 0.5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share


def far_apart(n: int, m: int) -> Tensor:
    """Pairs of a few blocks; nobody sees the keys between them, and some rows see nothing."""
    rows, keys = (torch.arange(n) // 70)[:, None], (torch.arange(m) // 50)[None, :]
    return (keys % 3 == 0) & (rows % 2 == 0) & ((rows + keys) % 4 < 3)


MASKS = [
    (regard.causal(), 300, 300),
    (regard.causal(offset=[-70, 0, 200]), 300, 333),
    (regard.causal(offset=-130), 300, 300),
    (regard.causal(offset=1000), 200, 300),
    (regard.window(40), 500, 500),
    (regard.window(100, 20, offset=[-200, 150]), 333, 450),
    (regard.window(0, 0, offset=-400), 300, 200),
    (regard.window(None, 5), 257, 129),
    (regard.window(9, offset=700), 300, 500),
    (regard.padding([300, 0, 64, 1]), 130, 300),
    (regard.padding(random(2, 300)), 130, 300),
    (regard.causal() & regard.padding([0, 150]), 300, 300),
    (regard.packed([100, 0, 1, 128, 100]), 329, 329),
    (regard.documents([0] * 90 + [2] * 100 + [1] * 110, [0] * 150 + [1] * 250), 300, 400),
    (regard.blocks(50), 301, 333),
    (regard.blocks(128), 400, 600),
    (regard.prefix(70), 200, 300),
    (regard.prefix([0, 300]) | regard.causal(), 300, 300),
    (regard.strided(7), 200, 300),
    (regard.strided(100) & regard.causal(), 300, 400),
    (regard.window(5) | regard.global_tokens([0, 270]), 300, 300),
    (~regard.window(60, 60), 300, 300),
    (regard.dense(random(4, 100, 300, share=0.001)), 100, 300),
    (regard.dense(random(2, 1, 100, 300, share=0.001)), 100, 300),
    (regard.dense(random(2, 4, 70, 200, share=0.0005)), 70, 200),
    (regard.dense(far_apart(500, 700)), 500, 700),
    (regard.dense(torch.ones(300, 300, dtype=torch.bool)), 300, 300),
    (~regard.everything(), 200, 200),
    (regard.everything(), 1, 1),
    (regard.everything(), 300, 200),
]
GROUPED = {1: (2, 1), 4: (2, 2)}  # key heads, and query heads for each, by the heads that a mask tells apart


@sizes
@pytest.mark.parametrize(("mask", "n", "m"), MASKS, ids=lambda x: repr(x)[:60] if isinstance(x, regard.Mask) else None)
def test_no_program_waits_for_a_later_one_and_every_visible_pair_is_met(
    mask: regard.Mask, n: int, m: int, BM: int, BN: int
) -> None:
    items, heads = mask.lead
    shape = Shape(BM, BN, items, *GROUPED[heads], section=3)
    truth = mask.dense(n, m).expand(items, shape.kv * shape.groups, n, m)
    for made in (layout(mask, n, m, CPU), bits(mask, n, m)):
        check(made, truth, shape)


def test_the_masks_above_come_in_all_kinds() -> None:
    kinds = [layout(mask, n, m, CPU).kind for mask, n, m in MASKS]
    assert min(kinds.count(kind) for kind in (NONE, SPANS, BITS)) > 1


@st.composite
def spans(draw: st.DrawFn) -> tuple[Layout, Tensor]:
    """Ends that never fall, in any other way: rows without keys, keys without rows, jumps."""
    n, m, items, heads = draw(st.integers(1, 400)), draw(st.integers(1, 400)), *draw(st.sampled_from([(1, 1), (2, 2)]))
    corners = st.lists(st.integers(0, m), min_size=1, max_size=5)
    lo, hi = torch.empty(2, items, heads, n, dtype=torch.int32)
    for ends in (lo, hi):
        for row in ends.flatten(0, 1):
            values = sorted(draw(corners))
            row[:] = torch.tensor(values).repeat_interleave(-(-n // len(values)))[:n]
    j = torch.arange(m)
    return Layout(n, m, lo, hi, lead=(items, heads)), (j >= lo[..., None]) & (j < hi[..., None])


@settings(max_examples=60)
@given(spans(), st.sampled_from(SIZES), st.integers(1, 5))
def test_no_program_waits_whatever_the_spans(drawn: tuple[Layout, Tensor], size: tuple[int, int], section: int) -> None:
    made, truth = drawn
    items, heads = made.lead
    check(made, truth, Shape(*size, items, 1, heads, section))


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
def test_items_that_share_an_item_of_the_mask_have_its_turns(BM: int, BN: int) -> None:
    mask = regard.causal(offset=[-70, 100])
    made = layout(mask, 300, 300, CPU, inner=3)
    check(made, mask.dense(300, 300).repeat_interleave(3, 0), Shape(BM, BN, 6, section=4))


@pytest.mark.parametrize("section", [1, 2, 4, 7])
def test_each_program_has_a_block_of_its_own_and_a_head_is_worked_on_from_its_last_keys(section: int) -> None:
    shape = Shape(items=2, kv=3, section=section)
    found = launched(Layout(64, 600), shape)
    assert sorted(found) == [(item, kv, block) for item in range(2) for kv in range(3) for block in range(5)]
    for owner in {program[:2] for program in found}:
        assert [block for *own, block in found if tuple(own) == owner] == [4, 3, 2, 1, 0]
    beside = [program[:2] for program in found[: min(section, 6)]]
    assert len(set(beside)) == len(beside)


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.strided(3)], ids=repr)
def test_turns_are_made_once_for_each_size_of_blocks(mask: regard.Mask | None) -> None:
    made = layout(mask, 300, 300, CPU)
    assert turns(made, 64, 128) is turns(made, 64, 128)
    assert turns(made, 64, 64) is not turns(made, 64, 128)


def test_turns_go_with_their_layout() -> None:
    made = bits(regard.causal(), 300, 300)
    entry = turns(made, 64, 128).entry
    assert entry is not None
    kept = weakref.ref(entry)
    del entry
    assert kept() is not None
    del made
    gc.collect()
    assert kept() is None


def test_what_a_graph_makes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "captured", lambda: True)
    made = bits(regard.causal(), 300, 300)
    assert turns(made, 64, 128) is not turns(made, 64, 128)


def test_strides_are_multiples_that_compile_nothing_new() -> None:
    mask = regard.dense(torch.ones(2, 4, 300, 700, dtype=torch.bool).tril())
    order = turns(layout(mask, 300, 700, CPU), 64, 64)
    spans_order = turns(layout(regard.causal(offset=[0, 3]), 300, 700, CPU), 64, 64)
    for strides in (order[6:], spans_order[6:]):
        assert all(x % 16 == 0 for x in strides)
