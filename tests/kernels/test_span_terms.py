"""Masks as numbers and tensors: nothing is read, parts of one kind are joined, and what has no place is refused."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.kernels.span_terms import ENDS, FAR, LENGTHS, SORTED_IDS, SpanTerms, span_terms
from regard.masks.documents import Packed, Varlen

N, M = 100, 130
unread = torch.zeros(2, dtype=torch.int64, device="meta")  # to read a number of it is an error
other = torch.zeros(2, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (regard.everything(), SpanTerms()),
        (regard.causal(), SpanTerms(most=M - N + 1)),
        (regard.causal() & regard.window(9, offset=2) & regard.prefix(70) & regard.prefix(80), SpanTerms(-7, 3, 70)),
        (regard.window(10**20, 10**20, offset=-(10**20)), SpanTerms(-FAR, 1)),
        (regard.causal(offset=unread), SpanTerms(offset=unread, offset_most=1, items=2)),
        (
            regard.causal(offset=unread) & regard.window(4, offset=unread),
            SpanTerms(offset=unread, offset_least=-4, offset_most=1, items=2),
        ),
        (regard.padding(unread) & regard.prefix(7), SpanTerms(until=7, length=unread, items=2)),
        (regard.blocks(8) & regard.causal(offset=0), SpanTerms(most=1, size=8, block_offset=M - N)),
        (regard.blocks(8, offset=unread), SpanTerms(size=8, block_offsets=unread, items=2)),
        (Packed(unread), SpanTerms(table=LENGTHS, rows=unread, keys=unread)),
    ],
    ids=repr,
)
def test_the_terms_of_a_mask(mask: regard.Mask, expected: SpanTerms) -> None:
    found = span_terms(mask, N, M)
    assert found is not None
    for name, x, y in zip(SpanTerms._fields, found, expected, strict=True):
        assert x is y if isinstance(y, torch.Tensor) else x == y, name


def test_tables_of_documents() -> None:
    ends = span_terms(Varlen(cu_seqlens=unread, key_cu_seqlens=other), N, M)
    assert ends is not None
    assert (ends.table, ends.items) == (ENDS, 1)
    assert ends.rows is not None
    assert ends.rows.shape == (1,)
    ids = span_terms(regard.documents([[0, 0, 1], [0, 3, 3]]), 3, 3)
    assert ids is not None
    assert (ids.table, ids.items) == (SORTED_IDS, 2)


@pytest.mark.parametrize(
    "mask",
    [
        regard.strided(3),
        regard.causal() | regard.prefix(3),
        ~regard.causal(),
        regard.documents([1, 0, 1]),
        regard.padding(unread) & regard.prefix(other),
        regard.causal(offset=unread) & regard.window(3, offset=other),
        regard.blocks(8) & regard.blocks(9),
        Packed(unread) & Varlen(cu_seqlens=other),
        Packed(unread) & regard.documents([0, 0, 1]),
    ],
    ids=repr,
)
def test_a_mask_without_terms_is_computed_by_torch(mask: regard.Mask) -> None:
    assert span_terms(mask, 3, 3) is None


def test_a_list_costs_one_launch_and_the_order_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from regard.kernels.block_mask import BlockMask
    from regard.kernels.hopper.dq_order import dq_order
    from regard.kernels.portable import spans_launch

    launches: list[int] = []
    monkeypatch.setattr(spans_launch, "_launch", lambda programs, device, values: launches.append(programs))
    terms = span_terms(regard.packed([60, 40]) & regard.causal(), 100, 100)
    made = BlockMask(100, 100, terms=terms, device=torch.device("cpu"))
    assert made.kind == 1
    assert not launches
    assert made.by_rows(64, 64) is made.by_rows(64, 64)
    assert len(launches) == 1
    assert made.lo is not None
    assert made.by_keys(64, 64).lo is made.by_rows(64, 64).lo
    assert dq_order(made, 64, 64) is dq_order(made, 64, 64)
    assert len(launches) == 2
    made.by_rows(32, 64)
    assert launches[2] == 1, "bounds alone are computed"
