"""The kernels that count the rows of a census, against torch's operations."""

from __future__ import annotations

import pytest
import torch

import regard
from census_by_kernels import check_census
from regard.models.head_census.candidates import Places, Wanted, best_rows, products, strongest_keys
from regard.models.head_census.kernel_rows import best_by_kernel, products_by_kernel


def test_a_census_by_kernels_equals_one_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    check_census(((2, 9), (1, 14), (1, 9)), "cpu", monkeypatch, moved=0)


def test_the_best_rows_of_several_blocks_are_those_of_torch() -> None:
    scores = torch.randint(-1, 9, (1, 1, 2100)).float()
    best = best_rows(scores, 5, None)
    assert torch.equal(best_by_kernel(scores, 5, None), best)
    assert torch.equal(best_by_kernel(scores, 5, torch.full((1, 1), 8.0)), best)
    assert best_by_kernel(scores, 5, torch.full((1, 1), 9.0)).tolist() == [[[-1] * 5]]


def test_the_products_of_single_rows_are_those_of_torch() -> None:
    q, k = torch.randn(2, 7, 4, 5).transpose(1, 2), torch.randn(2, 2, 70, 5)  # grouped heads, and rows before heads
    at = torch.stack([torch.randint(0, size, (9,)) for size in (4, 2, 7)])
    calls = [(regard.observe(q, k, k), at[:, :4]), (regard.observe(-q, k, k), at[:, 4:])]
    for mine, true in zip(products_by_kernel(calls), products(calls), strict=True):
        torch.testing.assert_close(mine, true)


def test_layers_of_different_head_dims_have_their_own_strongest_keys() -> None:
    at = torch.stack([torch.randint(0, size, (6,)) for size in (2, 1, 7)])
    places = Places(*(x.numpy() for x in at), at)
    layers = []
    for dim in (16, 8):
        q, k = torch.randn(1, 2, 7, dim), torch.randn(1, 2, 9, dim)
        layers.append(regard.observe(q, k, k, scale=0.5))
    found, true = (strongest_keys([Wanted(seen, places, fused) for seen in layers]) for fused in (True, False))
    torch.testing.assert_close(found[0], true[0])
    assert torch.equal(found[1], true[1])
