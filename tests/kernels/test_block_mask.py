"""How masks reach kernels: spans, bounds, lists and bits say exactly what the mask says, and are made once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from mask_cases import CASES, Case, for_each_mask
from regard.kernels import ahead
from regard.kernels.block_lists import BITS, MASK_BLOCK, MULTIPLE, NONE, SPANS, BlockLists
from regard.kernels.block_mask import BlockMask, _compute, block_mask
from regard.kernels.hopper.dq_order import dq_order

CPU = torch.device("cpu")
LARGE = 3 * MASK_BLOCK + 5


def large(mask: regard.Mask, n: int = MASK_BLOCK + 9, m: int = LARGE) -> Case:
    return Case(mask, n, m)


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4


ids = torch.arange(LARGE) // 100
SEVERAL = [
    large(regard.causal()),
    large(regard.causal(), LARGE, MASK_BLOCK + 9),
    large(regard.causal(offset=[-40, 0, 300])),
    large(regard.window(30, 10)),
    large(regard.window(30, 10), LARGE, LARGE),
    large(regard.window(None, 7)),
    large(regard.padding([300, 0, 128])),
    large(regard.prefix(torch.tensor([0, 200]))),
    large(regard.blocks(50), LARGE, LARGE),
    large(regard.packed([100, 200, 89]), LARGE, LARGE),
    large(regard.documents(ids), LARGE, LARGE),
    large(regard.strided(7)),
    large(regard.window(9) | regard.global_tokens([0, 130])),
    large(regard.causal() & regard.padding([350, 20]) | regard.prefix(3)),
    large(~regard.window(20, 20)),
    large(regard.padding(random(2, LARGE))),
    large(regard.dense(random(2, 3, MASK_BLOCK + 9, LARGE))),
    large(regard.dense(random(1, 1, MASK_BLOCK + 9, LARGE) & (ids == 2))),
    large(
        regard.strided(2) | regard.dense(torch.arange(LARGE) >= 3 * MASK_BLOCK)
    ),  # the last block is full, and lacks keys
    large(regard.predicate(lambda b, h, i, j: (i + j + b + h) % 3 > 0).bind(2, 2)),
    large(regard.predicate(lambda b, h, i, j: (i + j + b + h) % 3 > 0).bind(10, 10), 20, 30),
    large(regard.everything()),
    large(~regard.everything()),
]
EVERY = [*(case for case in CASES if case.n and case.m and 0 not in case.mask.lead), *SEVERAL]
every_mask = for_each_mask(EVERY)


def truth(case: Case) -> Tensor:
    """The mask pair by pair, (items, heads, n, m)."""
    mask, n, m = case
    return mask.dense(n, m).expand(*mask.lead, n, m)


def bounds_of(where: BlockLists, item: int, head: int, at: int, blocks: int) -> tuple[int, int, int, int]:
    """The bounds of one block, read as a kernel does, by strides from a place in memory."""
    assert where.bounds is not None
    assert where.bounds.shape[2] >= 4 * blocks
    start = item * where.block_item + head * where.block_head + 4 * at
    first, full, until, behind = where.bounds.flatten()[start : start + 4].tolist()
    return first, full, until, behind


def from_spans(made: BlockMask, case: Case) -> Tensor:
    """The pairs that the row vectors show."""
    where = made.by_rows(16, 16)
    assert where.lo is not None
    assert where.hi is not None
    items, heads = case.mask.lead
    i, j = torch.arange(case.n), torch.arange(case.m)
    seen = torch.zeros(items, heads, case.n, case.m, dtype=torch.bool)
    for item in range(items):
        for head in range(heads):
            at = item * where.item + head * where.head + i
            lo, hi = where.lo.flatten()[at], where.hi.flatten()[at]
            seen[item, head] = (j >= lo[:, None]) & (j < hi[:, None])
    return seen


@every_mask
def test_spans_and_bounds_say_what_the_mask_says(case: Case) -> None:
    made, dense = block_mask(case.mask, case.n, case.m, CPU), truth(case)
    if made.kind != SPANS:
        assert made.kind in (NONE, BITS)
        assert made.kind == BITS or dense.all()
        return
    assert torch.equal(from_spans(made, case), dense)
    sizes = ((16, 16), (32, 64), (128, 64), (128, 128)) if max(case.n, case.m) > 40 else ((2, 4), (16, 16))
    for BM, BN in sizes:
        _bounds(made.by_rows(BM, BN), dense, BM, BN, guarded=False)
        _bounds(made.by_keys(BM, BN), dense.mT, BN, BM, guarded=True)


def _bounds(where: BlockLists, dense: Tensor, own: int, other: int, guarded: bool) -> None:
    """Outside of first … behind nothing is seen, within full … until all is; unguarded, these blocks lack nothing."""
    items, heads, n, m = dense.shape
    blocks, others = -(-n // own), -(-m // other)
    for item in range(items):
        for head in range(heads):
            for b in range(blocks):
                rows = dense[item, head, b * own : (b + 1) * own]
                first, full, until, behind = bounds_of(where, item, head, b, blocks)
                assert 0 <= first <= full <= until <= max(behind, first)
                assert behind <= others
                assert not rows[:, : first * other].any()
                assert not rows[:, behind * other :].any()
                assert rows[:, full * other : until * other].all()
                assert guarded or until * other <= m or full == until


@every_mask
def test_lists_and_bits_say_what_the_mask_says(case: Case) -> None:
    made, dense = block_mask(case.mask, case.n, case.m, CPU), truth(case)
    if made.kind != BITS:
        return
    mask_bits = made.mask_bits
    assert mask_bits is not None
    assert (mask_bits.bits[0] == -1).all()
    for BM, BN in ((64, 32), (128, 128), (16, 64), (64, 16)):
        assert torch.equal(_from_lists(made.by_rows(BM, BN), dense.shape, (BM, BN), turned=False), dense)
        assert torch.equal(_from_lists(made.by_keys(BM, BN), dense.shape, (BM, BN), turned=True), dense)
    rows, keys = -(-case.n // MASK_BLOCK), -(-case.m // MASK_BLOCK)
    assert mask_bits.table.shape == (*case.mask.lead, rows, keys)
    for place in (mask_bits.table < 0).nonzero().tolist():
        item, head, r, c = place
        assert not dense[item, head, r * MASK_BLOCK : (r + 1) * MASK_BLOCK, c * MASK_BLOCK : (c + 1) * MASK_BLOCK].any()


def _from_lists(where: BlockLists, shape: torch.Size, sizes: tuple[int, int], turned: bool) -> Tensor:
    """Write the mask out from its lists, read as a kernel does: full blocks, then partial ones with their bits."""
    items, heads, n, m = shape
    lists = (where.full_start, where.full_entry, where.start, where.entry, where.slot, where.bits)
    full_start, full_entry, start, entry, slot, bits = (x.tolist() if x is not None else [] for x in lists)
    tiles = _unpacked(torch.tensor(bits, dtype=torch.int32).flatten(0, 1)).view(-1, MASK_BLOCK, MASK_BLOCK)
    BM, BN = sizes
    seen = torch.zeros(items, heads, n + MASK_BLOCK, m + MASK_BLOCK, dtype=torch.bool)
    for item in range(items):
        for head in range(heads):
            for b in range(-(-(m if turned else n) // (BN if turned else BM))):
                at = item * where.block_item + head * where.block_head + b
                full = [(other, None) for other in full_entry[full_start[at] : full_start[at + 1]]]
                partial = list(zip(entry[start[at] : start[at + 1]], slot[start[at] : start[at + 1]], strict=True))
                for other, place in full + partial:
                    r, c = (other * BM, b * BN) if turned else (b * BM, other * BN)
                    part = seen[item, head, r : r + BM, c : c + BN]
                    assert not part.any(), "a block is listed twice"
                    r, c = r % MASK_BLOCK, c % MASK_BLOCK
                    part.copy_(torch.ones(BM, BN) if place is None else tiles[place][r : r + BM, c : c + BN])
                    assert place is None or part.any(), "a hidden block is listed"
    assert turned or not seen[:, :, :n, m:].any(), "keys beyond the last are shown"
    return seen[:, :, :n, :m]


def _unpacked(mask_bits: Tensor) -> Tensor:
    """Bit j of word w says of key 32·w + j: int32 (SIDE, SIDE / 32) to bool (SIDE, SIDE)."""
    return ((mask_bits[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1).bool().flatten(1)


@every_mask
def test_a_mask_of_the_first_dimension_is_shared_by_the_inner_ones(case: Case) -> None:
    if case.mask.constant:
        return
    assert block_mask(case.mask, case.n, case.m, CPU, inner=3).by_rows(32, 32).inner == 3 * MULTIPLE


def test_hidden_blocks_are_not_listed_and_full_ones_have_no_bits_of_their_own() -> None:
    keep = torch.zeros(2 * MASK_BLOCK, 4 * MASK_BLOCK, dtype=torch.bool)
    keep[:MASK_BLOCK, MASK_BLOCK : 2 * MASK_BLOCK] = True
    keep[MASK_BLOCK:, -3::2] = True
    made = block_mask(regard.dense(keep), *keep.shape, CPU)
    where = made.by_rows(MASK_BLOCK, MASK_BLOCK)
    assert made.mask_bits is not None
    assert where.full_entry is not None
    assert where.entry is not None
    assert where.slot is not None
    assert where.full_entry.tolist() == [1]
    assert where.entry.tolist() == [3]
    assert where.slot.tolist() == [1]
    assert len(made.mask_bits.bits) == 2


@pytest.mark.parametrize("mask", [regard.causal(), regard.window(3), regard.strided(3), regard.blocks(7)], ids=repr)
def test_a_constant_mask_is_laid_out_once(mask: regard.Mask) -> None:
    made = block_mask(mask, 40, 50, CPU)
    twin = regard.masks.Mask.changed(mask, lambda t: t)
    assert block_mask(twin, 40, 50, CPU) is made
    assert block_mask(mask, 40, 51, CPU) is not made
    assert made.by_rows(32, 32) is made.by_rows(32, 32)


def test_equal_constant_masks_share_a_layout() -> None:
    assert block_mask(regard.window(9, 1), 40, 50, CPU) is block_mask(regard.window(9, 1), 40, 50, CPU)
    assert block_mask(regard.window(9, 1), 40, 50, CPU) is not block_mask(regard.window(9, 2), 40, 50, CPU)


@pytest.mark.parametrize(
    ("tensor", "make"),
    [
        (torch.tensor([20, 45]), regard.padding),
        (random(2, 50), regard.padding),
        (random(40, 50), regard.dense),
        (torch.tensor([20, 45]), lambda t: regard.padding(t) & regard.strided(3)),
    ],
    ids=["lengths", "keep", "dense", "composed"],
)
def test_a_mask_with_tensors_is_laid_out_again_when_one_changes_in_place(tensor: Tensor, make: object) -> None:
    tensor = tensor.clone()
    mask = make(tensor)  # type: ignore[operator]
    made = block_mask(mask, 40, 50, CPU)
    assert block_mask(mask, 40, 50, CPU) is made
    if not any(t.data_ptr() == tensor.data_ptr() for t in mask.tensors):
        pytest.fail("the mask has a copy, and cannot see a change")
    tensor[0] = 3 if tensor.dtype == torch.int64 else ~tensor[0]
    again = block_mask(mask, 40, 50, CPU)
    assert again is not made
    assert block_mask(mask, 40, 50, CPU) is again
    case = Case(mask, 40, 50)
    if again.kind == SPANS:
        assert torch.equal(from_spans(again, case), truth(case))
    else:
        assert torch.equal(_from_lists(again.by_rows(32, 32), truth(case).shape, (32, 32), turned=False), truth(case))


def test_two_masks_with_equal_tensors_do_not_share_a_layout() -> None:
    one, two = regard.padding([20, 45]), regard.padding([20, 45])
    assert one == two
    assert block_mask(one, 40, 50, CPU) is not block_mask(two, 40, 50, CPU)


class Stream:
    """A stream that notes what it is told."""

    def __init__(self, number: int, told: list[str]) -> None:
        self.cuda_stream, self.told = number, told

    def record_event(self) -> str:
        self.told.append(f"{self.cuda_stream} made")
        return f"what {self.cuda_stream} made"

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.cuda_stream} waits for {event}")


@pytest.mark.parametrize("mask", [regard.causal(), regard.strided(3)], ids=repr)
def test_a_stream_waits_for_what_another_has_made(mask: regard.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    one, two = Stream(1, told), Stream(2, told)
    now = [one]
    monkeypatch.setattr(BlockMask, "_current", lambda self: now[0])
    monkeypatch.setattr("regard.kernels.block_mask.raw_stream", lambda device: now[0].cuda_stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: told.append(f"{stream.cuda_stream} keeps"))
    made = _compute(mask, 300, 333, torch.device("cpu"), 1)
    first = made.by_rows(64, 64)
    assert told == ["1 made", "1 made"]
    assert made.by_rows(64, 64) is first
    assert told == ["1 made", "1 made"]
    now[0] = two
    assert made.by_rows(64, 64) is first
    assert told[2] == "2 waits for what 1 made"
    assert set(told[3:]) == {"2 keeps"}
    told.clear()
    order = dq_order(made, 64, 64)
    assert told[0] == "2 waits for what 1 made"
    assert told[-1] == "2 made"
    told.clear()
    assert dq_order(made, 64, 64) is order
    assert told == []
    now[0] = one
    assert dq_order(made, 64, 64) is order
    assert told[0] == "1 waits for what 2 made"


def test_a_mask_is_narrow_if_its_kind_says_that_no_row_sees_many_keys() -> None:
    lengths = torch.tensor([40, 24])
    narrow = regard.window(127), regard.window(500, 523), regard.window(127) & regard.packed(lengths)
    wide = regard.window(1024), regard.window(512, 512), regard.causal(), regard.packed(lengths), regard.window(None, 4)
    assert [block_mask(mask, 64, 64, torch.device("cpu")).narrow for mask in narrow] == [True] * 3
    assert [block_mask(mask, 64, 64, torch.device("cpu")).narrow for mask in wide] == [False] * 5
    assert not block_mask(None, 64, 64, torch.device("cpu")).narrow


@pytest.mark.parametrize("mask", [regard.window(9), regard.strided(3)])
def test_nothing_is_kept_that_collected_launches_did_not_compute(mask: regard.Mask) -> None:
    made = _compute(mask, 64, 64, torch.device("cpu"), 1)
    with ahead.collecting(torch.device("cpu")):
        unfilled = made.by_keys(64, 64), dq_order(made, 64, 64)
    assert made.by_keys(64, 64) is not unfilled[0]
    order = dq_order(made, 64, 64)
    assert order is not unfilled[1]
    assert dq_order(made, 64, 64) is order
