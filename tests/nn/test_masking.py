"""Torch's masks converted to regard's, and appended keys that every row attends to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

import regard
from regard import Mask
from regard.masks.base import FULL, HIDDEN, PARTIAL
from regard.nn.torch_masks import MaskAndBias, MaskSizes, combine_masks

N, M, EXTRA = 5, 7, 2
PARTS = [
    regard.causal(),
    regard.causal(offset=-2),
    regard.window(1),
    regard.everything(),
    regard.padding([3, 0]),
    regard.padding(torch.tensor([[1, 0, 1, 0, 0, 1, 1]])),
    regard.dense(torch.rand(2, 3, N, M) < 0.4),
    ~regard.causal() & regard.strided(2),
]


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_every_row_attends_to_appended_keys(part: Mask) -> None:
    extended = MaskAndBias(part, None).with_visible_keys(EXTRA).mask
    assert extended is not None
    m = M + EXTRA
    table = extended.dense(N, m)
    assert table[..., M:].all()
    assert torch.equal(table[..., :M], part.dense(N, M))
    lo, hi, exact = extended.span(torch.arange(N), N, m)
    j = torch.arange(m)
    inside = (j >= lo[..., None]) & (j < hi[..., None])
    assert not (table & ~inside).any()
    assert not exact or torch.equal(inside.expand_as(table), table)
    assert torch.equal(extended.visible(torch.arange(N), N, m).expand(table.shape[:-1]), table.sum(-1))


@pytest.mark.parametrize("part", PARTS, ids=repr)
@pytest.mark.parametrize("cols", [[0, 3, 6, 9], [0, 7, 9], [0, 9], [0, 4, 8, 9]], ids=str)
def test_tiles_with_only_hidden_keys_are_found(part: Mask, cols: list[int]) -> None:
    extended = MaskAndBias(part, None).with_visible_keys(EXTRA).mask
    assert extended is not None
    rows, table = [0, 2, 5], extended.dense(N, M + EXTRA)
    cover = extended.cover(torch.tensor(rows), torch.tensor(cols), N, M + EXTRA)
    for r, (top, bottom) in enumerate(pairwise(rows)):
        for c, (left, right) in enumerate(pairwise(cols)):
            tile, state = table[..., top:bottom, left:right], int(cover[r, c])
            assert state != HIDDEN or not tile.any()
            assert state != FULL or tile.all()
    if part == regard.window(1) and cols == [0, 3, 6, 9]:
        assert cover.tolist() == [[PARTIAL, PARTIAL, PARTIAL], [HIDDEN, PARTIAL, PARTIAL]]


def sizes(batch: int = 2, heads: int = 3) -> MaskSizes:
    return MaskSizes(batch, heads, N, M, True, torch.device("cpu"))


def test_padding_of_zeros_and_minus_infinity_becomes_a_mask() -> None:
    hidden = torch.arange(M) >= torch.tensor([[4], [6]])
    added = torch.zeros(2, M).masked_fill(hidden, -torch.inf)
    assert combine_masks("test", sizes(), None, added) == combine_masks("test", sizes(), None, hidden)
    assert combine_masks("test", sizes(), None, added - 1).mask is None


def test_masks_are_not_expanded() -> None:
    hidden = torch.zeros(2, M, dtype=torch.bool)
    found = combine_masks("test", sizes(), None, hidden, regard.causal())
    assert found.bias is None
    assert found.mask == regard.causal() & regard.padding(keep=~hidden)
    both = combine_masks("test", sizes(), torch.zeros(N, M), torch.zeros(2, M))
    assert both.bias is not None
    assert both.bias.shape == (1, 1, N, M)


@pytest.mark.parametrize("combine", [lambda p: p, lambda p: ~p, lambda p: p | regard.window(0)])
def test_a_predicate_with_appended_keys_is_asked_again_at_every_call(combine: Callable[[Mask], Mask]) -> None:
    limit = torch.tensor(2)
    mask = combine(regard.predicate(lambda b, h, i, j: j < limit))
    assert not MaskAndBias(mask, None).with_visible_keys(1).mask.constant
    module = regard.nn.MultiheadAttention(8, 2, add_zero_attn=True, batch_first=True)
    x = torch.randn(1, 5, 8)
    for until in (2, 4):
        limit.fill_(until)
        found, _ = module(x, x, x, mask=mask, need_weights=False)
        torch.testing.assert_close(found, module(x, x, x, mask=regard.dense(mask.dense(5, 5)), need_weights=False)[0])
