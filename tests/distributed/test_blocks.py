"""Blocks of a problem: slices of masks and biases equal the whole there, and partial rows merge exactly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mask_cases import CASES, Case, for_each_mask
from regard.biases import Bias, alibi, relative
from regard.core.rows import Rows
from regard.distributed.ring import empty_rows, merge_partials
from regard.distributed.slices import slice_bias, slice_mask
from regard.masks.base import FULL, HIDDEN


def corners(n: int, m: int) -> list[tuple[int, int, int, int]]:
    """Some slices (row, key, rows, keys) of n × m."""
    rows, keys = ([*range(0, size, max(1, size // 2)), size] for size in (n, m))
    return [(a, c, b - a, d - c) for a, b in pairwise(rows) for c, d in pairwise(keys)]


@for_each_mask(CASES)
def test_a_slice_of_a_mask_is_the_mask_there_with_true_hints(case: Case) -> None:
    mask, n, m = case
    whole = mask.dense(n, m)
    for row, key, rows, keys in corners(n, m):
        part = slice_mask(mask, n, m, row, key)
        true = whole[..., row : row + rows, key : key + keys]
        assert torch.equal(part.dense(rows, keys), true)
        lo, hi, exact = part.span(torch.arange(rows), rows, keys)
        j = torch.arange(keys)
        inside = (j >= lo[..., None]) & (j < hi[..., None])
        assert not (true & ~inside).any()
        assert not exact or torch.equal(true, inside.expand(true.shape))
        edges = torch.arange(rows + 1), torch.tensor([0, keys // 2, keys])
        for i, line in enumerate(part.cover(*edges, rows, keys).tolist()):
            for at, state in enumerate(line):
                tile = true[..., i : i + 1, edges[1][at] : edges[1][at + 1]]
                assert state != HIDDEN or not tile.any()
                assert state != FULL or tile.all()
        assert part.lead == mask.lead
        assert part == slice_mask(mask, n, m, row, key)


@dataclass(frozen=True, eq=False)
class Checkered(Bias):
    """A bias of positions, not of distances."""

    table: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    @property
    def heads(self) -> int:
        return 1

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        return tensors[0][None, i[:, None] % 2, j % 2] + n - m

    def to(self, device: torch.device | str) -> Self:
        return self


BIASES = {
    "alibi": alibi(torch.tensor([0.5, 1.0])),
    "alibi with an offset": alibi(torch.ones(1), offset=3),
    "relative": relative(torch.linspace(-1, 1, 7)),
    "by positions": Checkered(torch.tensor([[1.0, 2.0], [3.0, 5.0]])),
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_a_slice_of_a_structured_bias_is_the_bias_there(bias: Bias) -> None:
    whole = bias.dense(7, 9)
    for row, key, rows, keys in corners(7, 9):
        part = slice_bias(bias, 7, 9, row, key)
        assert torch.equal(part.dense(rows, keys), whole[..., row : row + rows, key : key + keys])


@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 2**31), st.floats(0, 3))
def test_merged_partial_rows_are_those_of_all_keys_at_once(
    n: int, widths: list[int], seed: int, magnitude: float
) -> None:
    torch.manual_seed(seed)
    m = sum(widths)
    S = torch.randn(n, m, dtype=torch.float64) * 10**magnitude
    S = S.masked_fill(torch.rand(n, m) < 0.4, -torch.inf)
    value = torch.randn(m, 3, dtype=torch.float64)
    true = whole(S, value)
    found = None
    start = 0
    for width in widths:
        block = whole(S[:, start : start + width], value[start : start + width])
        found = merge_partials(found, block, observed=True)
        start += width
    for name, a, b in zip(Rows._fields, found, true, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), name


def whole(S: Tensor, value: Tensor) -> Rows:
    """Output, lse, entropy, max_logit and log_row_sum by the textbook formulas."""
    lse = S.logsumexp(-1)
    empty = lse == -torch.inf
    P = torch.where(-torch.inf < S, (S - lse.masked_fill(empty, 0.0)[:, None]).exp(), 0.0)
    logs = torch.where(P > 0, P.log(), 0.0)
    row_max = S.amax(-1)
    log_row_sum = torch.where(empty, 0.0, lse - row_max.masked_fill(empty, 0.0))
    return Rows(P @ value, lse, -(P * logs).sum(-1), row_max, log_row_sum)


def test_merging_empty_rows_changes_nothing() -> None:
    block = whole(torch.randn(4, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64))
    none = empty_rows(torch.zeros(4, 3, dtype=torch.float64))
    for found in (merge_partials(none, block, True), merge_partials(block, none, True)):
        for a, b in zip(found, block, strict=True):
            assert torch.allclose(a, b)
    for a, b in zip(merge_partials(none, none, True), none, strict=True):
        assert torch.equal(a, b)
