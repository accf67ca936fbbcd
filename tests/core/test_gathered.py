"""Parts with gathered keys: which lists they hold, and how sums over shared keys are taken."""

from __future__ import annotations

import torch

import regard
from regard.core.gathered import (
    GATHERED_BIAS,
    GATHERED_KEY,
    GATHERED_ROW,
    Heads,
    add_in_order,
    gathered_tiles,
    lists_of,
)
from regard.core.spec import Spec
from regard.core.tiling import TileSizes


def test_every_row_is_in_one_part_and_keys_go_back_to_where_they_came_from() -> None:
    entries = torch.tensor([[3, 0, 3], [-1, 1, 4], [2, 2, 2]])
    spec = Spec(5, 9, regard.chosen(entries, size=2, rows=2))
    lists = lists_of(spec)
    assert lists is not None
    rows, seen = torch.zeros(1, 1, 2, 5), torch.zeros(1, 1, 9, 1)
    for at in gathered_tiles(spec, lists, rows.shape, 1, TileSizes(rows=4)):
        part = GATHERED_ROW.part(rows, at)
        GATHERED_ROW.add(rows, at, torch.ones_like(part))
        shown = at.positions.shown[:, :, 0, 0, :, None]
        GATHERED_KEY.add(seen, at, shown * at.height * torch.ones(()))
    assert torch.equal(rows, torch.ones_like(rows))
    assert torch.equal(seen.flatten(), spec.mask.dense(5, 9).sum(0).float())  # type: ignore[union-attr]


def test_a_bias_is_gathered_by_pairs() -> None:
    spec = Spec(3, 7, regard.chosen(torch.tensor([[5, 1], [0, 6], [2, 3]])))
    lists = lists_of(spec)
    assert lists is not None
    bias = torch.randn(1, 1, 1, 3, 7)
    (at,) = gathered_tiles(spec, lists, torch.Size((1, 1, 1)), 1, TileSizes())
    expected = torch.stack([bias[0, 0, 0, i, keys] for i, keys in enumerate(([1, 5], [0, 6], [2, 3]))])
    assert torch.equal(GATHERED_BIAS.part(bias, at).reshape(3, 2), expected)


def test_lists_as_long_as_all_keys_are_not_gathered() -> None:
    assert lists_of(Spec(2, 3, regard.chosen([[0, 1, 2], [1, 1, 1]]))) is None
    assert lists_of(Spec(2, 4, regard.chosen([[0, 1, 2], [1, 1, 1]]))) is not None
    assert lists_of(Spec(2, 4, ~regard.chosen([[0, 1], [1, 1]]))) is None
    assert lists_of(Spec(2, 4, regard.causal())) is None


def test_heads_are_grouped_by_keys_and_lists() -> None:
    assert Heads.of(lists=1, keys=2, queries=8) == (2, 2, 4)
    assert Heads.of(lists=4, keys=2, queries=8) == (2, 4, 2)
    assert Heads.of(lists=2, keys=4, queries=8) == (4, 4, 2)
    assert Heads.of(lists=3, keys=2, queries=6) == (2, 6, 1)


def test_parts_are_added_in_order() -> None:
    total = torch.zeros(2, 1)
    add_in_order(total, torch.tensor([1, 1, 1]), torch.tensor([[1e8], [1.0], [-1e8]]))
    assert total.flatten().tolist() == [0.0, 0.0]  # 1e8 + 1 is 1e8 in float32
