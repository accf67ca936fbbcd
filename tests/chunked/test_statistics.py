"""Statistics of the weights, tile by tile, are those of the dense weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from folded_cases import CASES, FEW_ROWS, HEADS, KEY_HEADS, KEYS, ROWS, posed
from regard.backends import KNOWN
from regard.chunked import statistics
from regard.core.problem import Problem
from regard.core.rows import Rows


def test_zeros_of_both_signs_rank_by_place() -> None:
    S = torch.tensor([[-0.0, 0.0, -1.0, 0.0]])
    assert statistics._by_rank(S, torch.arange(4), 3)[1].tolist() == [[0, 1, 3]]


def dense(name: str) -> tuple[Problem, Rows, Tensor, Tensor]:
    """The problem, what the forward pass found of its rows, and its logits and weights as whole matrices."""
    p = posed(name)
    rows = KNOWN["reference"].run(p)
    S = statistics.logits_at(p, torch.arange(ROWS), torch.arange(KEYS))
    groups = HEADS // KEY_HEADS
    if name in ("plain", "causal"):  # the logits themselves, from scratch
        expected = p.query @ p.key.repeat_interleave(groups, 1).mT / 2
        shown = torch.ones(ROWS, KEYS).bool() if p.mask is None else p.mask.dense(ROWS, KEYS)
        torch.testing.assert_close(S, expected.masked_fill(~shown, -torch.inf))
    seen = (-torch.inf < S).any(-1, keepdim=True)
    return p, rows, S, torch.where(seen, S.softmax(-1), 0.0)


@pytest.mark.parametrize("name", CASES)
def test_received_moments_and_visible_are_sums_over_the_dense_weights(name: str) -> None:
    p, rows, S, P = dense(name)
    torch.testing.assert_close(statistics.received(p, rows, FEW_ROWS), P.sum(-2))
    health, distance = statistics.moments(p, rows, FEW_ROWS)
    own = torch.arange(ROWS)[:, None] + KEYS - ROWS
    torch.testing.assert_close(health, (P * (1 - P)).sum(-1))
    torch.testing.assert_close(distance, (P * (own - torch.arange(KEYS)).abs()).sum(-1))
    assert torch.equal(statistics.visible(p, FEW_ROWS), (-torch.inf < S).sum(-1))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 100), (9, 300), (4, 7)])
@pytest.mark.parametrize("name", ["plain", "causal", "together"])
def test_a_map_is_the_mean_of_the_dense_weights_in_each_cell(name: str, height: int, width: int) -> None:
    p, rows, _, P = dense(name)
    down, across = torch.arange(ROWS) * height // ROWS, torch.arange(KEYS) * width // KEYS
    cells = torch.zeros(*P.shape[:2], height, KEYS, dtype=P.dtype).index_add_(2, down, P)
    cells = torch.zeros(*P.shape[:2], height, width, dtype=P.dtype).index_add_(3, across, cells)
    cells /= down.bincount()[:, None] * across.bincount()
    torch.testing.assert_close(statistics.pooled(p, rows, height, width, FEW_ROWS), cells)


@pytest.mark.parametrize("name", CASES)
def test_top_is_a_stable_sort_of_the_dense_weights(name: str) -> None:
    p, rows, S, P = dense(name)
    found, where = statistics.top(p, rows, 5, FEW_ROWS)
    order = S.sort(dim=-1, descending=True, stable=True).indices[..., :5]
    shown = S.gather(-1, order) > -torch.inf
    assert torch.equal(where, order.masked_fill(~shown, -1))
    torch.testing.assert_close(found, P.gather(-1, order).masked_fill(~shown, 0.0))


@pytest.mark.parametrize("name", ["plain", "causal", "together"])
def test_a_survey_holds_what_the_single_passes_find_and_the_weights_near_the_diagonal(name: str) -> None:
    p, rows, _, P = dense(name)
    survey = statistics.survey(p, rows, 3, 4, FEW_ROWS)
    assert torch.equal(survey.map, statistics.pooled(p, rows, 3, 4, FEW_ROWS))
    assert torch.equal(survey.received, statistics.received(p, rows, FEW_ROWS))
    for a, b in zip((survey.health, survey.distance), statistics.moments(p, rows, FEW_ROWS), strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(survey.own, P.diagonal(KEYS - ROWS, -2, -1))
    torch.testing.assert_close(survey.previous, P.diagonal(KEYS - ROWS - 1, -2, -1))
    starts = (P.sum((1, 2)) > 0).int().argmax(-1)
    torch.testing.assert_close(survey.first, torch.stack([P[b, :, :, start] for b, start in enumerate(starts)]))
    weight, key = statistics.top(p, rows, 1, FEW_ROWS)
    torch.testing.assert_close(survey.largest, weight[..., 0])
    assert torch.equal(survey.key, key[..., 0])


@pytest.mark.parametrize("keys", [5, 64, 70, 96])
def test_the_largest_is_the_first_of_equals(keys: int) -> None:
    P = torch.randint(0, 4, (3, 50, keys), generator=torch.Generator().manual_seed(keys)).float()
    value, at = statistics.largest(P)
    assert torch.equal(value, P.amax(-1))
    assert torch.equal(at, (value[..., None] == P).int().argmax(-1))


@pytest.mark.parametrize("count", [5, 40, 70, 300, 1025])
@pytest.mark.parametrize("k", [1, 3, 16])
def test_blocks_that_compete_first_change_neither_weights_nor_ties(count: int, k: int) -> None:
    S = torch.randn(2, 7, count, generator=torch.Generator().manual_seed(0)).mul(3).round()
    S[0, :, : count // 3] = -torch.inf
    wanted = S.sort(dim=-1, descending=True, stable=True)
    found = statistics.strongest(S, min(k, count))
    assert torch.equal(found[0], wanted.values[..., :k])
    assert torch.equal(found[1], wanted.indices[..., :k])
