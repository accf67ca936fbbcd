"""Block lists that a kernel computes from a mask's numbers and tensors: those that torch makes of its spans."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import regard
from regard.kernels.block_lists import SPANS, addresses
from regard.kernels.block_mask import BlockMask, _compute
from regard.kernels.hopper.dq_order import dq_order
from regard.kernels.span_terms import SpanTerms, span_terms
from regard.masks.documents import Packed, Varlen

CPU = torch.device("cpu")
INNER = 3
BM, BN = 32, 64


def ints(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


MASKS: dict[str, tuple[regard.Mask, int, int]] = {
    "causal": (regard.causal(), 100, 203),
    "causal, more rows": (regard.causal(), 203, 60),
    "window, no limit on one side": (regard.window(None, 7, offset=-(10**15)) & regard.causal(offset=4), 30, 40),
    "offsets per item": (regard.causal(offset=[-40, 200]) & regard.prefix(150), 40, 203),
    "padding and blocks": (regard.padding([150, 0]) & regard.blocks(50), 130, 203),
    "blocks, offsets per item": (regard.blocks(50, offset=[3, -70]) & regard.everything(), 100, 120),
    "lengths": (regard.packed([50, 0, 100, 53]) & regard.causal() & regard.window(60), 203, 203),
    "many lengths": (regard.packed([1, 0] * 129), 129, 129),
    "tokens after the last document": (Packed(ints(20, 40)), 90, 90),
    "more lengths than tokens": (Packed(ints(20, 400)), 60, 60),
    "cumulative lengths of 32 bits": (regard.packed(cu_seqlens=ints(0, 50, 50, 90, dtype=torch.int32)), 90, 90),
    "other cumulative lengths of the keys": (
        regard.packed(cu_seqlens=[0, 20, 20, 90], key_cu_seqlens=[0, 50, 60, 100]),
        90,
        140,
    ),
    "cumulative lengths that end early": (Varlen(cu_seqlens=ints(0, 30, 50), key_cu_seqlens=ints(0, 50, 70)), 60, 100),
    "sorted ids": (regard.documents(torch.arange(50) // 20, torch.arange(2 * 90).view(2, 90) // 30 % 3), 50, 90),
}


@pytest.mark.parametrize("name", ["lengths", "padding and blocks"])
def test_launches_get_the_addresses_of_the_lists(name: str) -> None:
    mask, n, m = MASKS[name]
    made = BlockMask(n, m, lead=mask.lead, terms=span_terms(mask, n, m), device=CPU)
    by_rows, by_keys = made.for_launch(64, BN, 0), made.for_launch(BM, BN, None)
    assert by_rows == addresses(made.by_rows(64, BN))
    assert by_keys == addresses(made.by_keys(BM, BN))
    assert made.for_launch(64, BN, 0) is by_rows


def same(found: NamedTuple, expected: NamedTuple, what: str) -> None:
    for name, x, y in zip(expected._fields, found, expected, strict=True):
        if isinstance(y, Tensor):
            assert isinstance(x, Tensor), f"{what}: {name}"
            assert x.dtype == y.dtype, f"{what}: {name}"
            x, y = x.flatten()[: y.numel()], y.flatten()  # flat; `seen` and what is one number end at a multiple
            assert torch.equal(x, y), f"{what}: {name} differs at {(x != y).nonzero()[:4].tolist()}"
        else:
            assert x == y, f"{what}: {name}"


def check(made: BlockMask, expected: BlockMask) -> None:
    same(made.by_rows(BM, BN, 16), expected.by_rows(BM, BN, 16), "by rows")
    same(made.by_keys(BM, BN), expected.by_keys(BM, BN), "by keys")
    same(dq_order(made, BM, BN), dq_order(expected, BM, BN), "order")
    for x, y in ((made.lo, expected.lo), (made.hi, expected.hi)):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_gives_the_lists_that_torch_makes_of_its_spans(name: str) -> None:
    mask, n, m = MASKS[name]
    terms, expected = span_terms(mask, n, m), _compute(mask, n, m, CPU, INNER)
    assert terms is not None
    assert expected.kind == SPANS
    assert expected.lead == (terms.items, 1)
    check(BlockMask(n, m, lead=expected.lead, inner=INNER, terms=terms, device=CPU), expected)


def test_spans_that_are_given_get_the_same_lists() -> None:
    n, m = 40, 90
    steps = torch.randint(0, 5, (2, 1, 2, n), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    lo, hi = steps.cumsum(-1, dtype=torch.int32).clamp(max=m)
    made = BlockMask(n, m, lead=(1, 2), terms=SpanTerms.of_spans(lo, hi), device=CPU)
    check(made, BlockMask(n, m, lo, hi, lead=(1, 2)))


def test_documents_in_order_whose_ids_have_no_keys_are_spans_too() -> None:
    mask, n, m = regard.documents([1, 1, 2, 4, 4], [0, 2, 2, 4]), 5, 4
    terms = span_terms(mask, n, m)
    assert terms is not None
    made = BlockMask(n, m, terms=terms, device=CPU)
    lo, hi, j = made.lo, made.hi, torch.arange(m)
    assert lo is not None
    assert hi is not None
    assert torch.equal((j >= lo[0, 0, :, None]) & (j < hi[0, 0, :, None]), mask.dense(n, m))
