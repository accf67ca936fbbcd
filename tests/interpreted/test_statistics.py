"""What the weights say: the late passes of our kernels agree with `reference` in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import BY_NAME, Case, Shape, as_double
from regard.kernels import survey as survey_kernels

FEW = Shape(batch=2, heads=2, kv_heads=1)
STRIPS = Shape(batch=1, heads=1, kv_heads=1, n=70, m=100, d=8, dv=4)
LISTS = replace(STRIPS, n=130, m=260)  # several blocks of 128
NAMES = (
    *("plain", "causal", "causal offset per item", "padding", "strided", "dense per head", "predicate", "nothing"),
    *("scale per head", "softcap", "sink", "bias", "bias with −inf", "alibi", "relative", "all together"),
    *("Cosine", "Additive"),
)
CASES = [
    *(Case(name, BY_NAME[name].make, FEW) for name in NAMES),
    Case("several strips", lambda s: {"mask": regard.causal()}, STRIPS),
    Case("several lists", lambda s: {"mask": regard.blocks(60) | regard.global_tokens([129])}, LISTS),
]


def seen_twice(case: Case) -> tuple[regard.Observation, regard.Observation]:
    """By our kernels, and by `reference` in float64."""
    tensors, kwargs = case.inputs(torch.float32)
    doubled, double_kwargs = as_double(tensors, kwargs)
    with torch.no_grad():
        found = regard.observe(*tensors, **kwargs, backend="triton")
        return found, regard.observe(*doubled, **double_kwargs, backend="reference")


def close(found: Tensor, true: Tensor) -> None:
    torch.testing.assert_close(found.double(), true, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_pass_agrees(case: Case) -> None:
    found, true = seen_twice(case)
    assert torch.equal(found.visible, true.visible)
    close(found.received, true.received)
    close(found.gradient_health, true.gradient_health)
    close(found.distance, true.distance)
    n, m = case.shape.n, case.shape.m
    for height, width in ((2, 15), (n, m // 2)):  # coarse, and too fine for a kernel
        close(found.map(height, width), true.map(height, width))
    (values, index), (true_values, true_index) = found.top(4), true.top(4)
    close(values, true_values)
    assert torch.equal(index, true_index)
    for rows, cols in ((None, None), (slice(3, 30, 4), [0, 40, 7])):
        close(found.weights(rows, cols), true.weights(rows, cols))
        torch.testing.assert_close(found.scores(rows, cols).double(), true.scores(rows, cols), atol=1e-5, rtol=1e-5)


SURVEYED = ("padding", "bias with −inf", "Additive", "several lists")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SURVEYED], ids=lambda c: c.name)
def test_a_survey_agrees(case: Case) -> None:
    found, true = (seen.survey(2, 7) for seen in seen_twice(case))
    for name in found._fields[: found._fields.index("key")]:
        close(getattr(found, name), getattr(true, name))
    assert torch.equal(found.key, true.key)


def test_a_survey_too_large_for_its_bands_and_one_with_even_cells_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 1, 8, 8)
    seen = regard.observe(q, k, k, mask=regard.causal(), backend="triton")
    by_bands = seen.survey(2, 4)
    monkeypatch.setattr(survey_kernels, "_MOST_NUMBERS", 1)
    whole = seen.survey(2, 4)
    for name in by_bands._fields:
        if name != "peaks":  # of another number of parts
            torch.testing.assert_close(getattr(by_bands, name), getattr(whole, name))


def test_the_strongest_key_of_a_survey_is_the_first_of_equals() -> None:
    query, key = torch.ones(1, 1, 20, 4), torch.ones(1, 1, 150, 4)
    key[0, 0, [77, 149]] = 2.0
    seen = regard.observe(query, key, key, mask=regard.causal(), backend="triton")
    assert seen.survey(1, 1).key.unique().tolist() == [77]
    assert regard.observe(query, query, query, backend="triton").survey(1, 1).key.unique().tolist() == [0]


def test_ties_go_to_the_lowest_index() -> None:
    query, key = torch.ones(1, 1, 20, 4), torch.ones(1, 1, 150, 4)
    key[0, 0, [3, 77, 149]] = 2.0
    seen = regard.observe(query, key, key, mask=regard.causal(), backend="triton")
    _, index = seen.top(5)
    assert index[0, 0, -1].tolist() == [3, 77, 149, 0, 1]
    assert index[0, 0, 0].tolist() == [3, 77, 0, 1, 2]


def test_more_of_the_strongest_than_there_are_keys_end_in_minus_one() -> None:
    x = torch.randn(1, 1, 6, 4)
    values, index = regard.observe(x, x, x, mask=regard.causal(), backend="triton").top(9)
    for i in range(6):
        assert sorted(index[0, 0, i, : i + 1].tolist()) == list(range(i + 1))
        assert index[0, 0, i, i + 1 :].tolist() == [-1] * (8 - i)
        assert not values[0, 0, i, i + 1 :].any()


def test_the_weights_of_large_logits_sum_to_one() -> None:
    query = torch.full((1, 1, 33, 4), 15.0)
    key = query[:, :, :1] + torch.randint(0, 2, (1, 1, 40, 4), generator=torch.Generator().manual_seed(0)) / 15
    seen = regard.observe(query, key, key, scale=1.0, backend="triton")  # logits from 900 to 904
    assert seen.weights().unique().numel() > 2
    torch.testing.assert_close(seen.weights().sum(-1), torch.ones(1, 1, 33), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.received.sum(-1), torch.full((1, 1), 33.0), atol=33e-4, rtol=0)


def test_twenty_strongest_keys_come_in_order() -> None:
    made = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 1, 33, 4, generator=made), torch.randn(1, 1, 150, 4, generator=made)
    values, index = regard.observe(query, key, key, backend="triton").top(20)
    true_values, true_index = regard.observe(query.double(), key.double(), key.double(), backend="reference").top(20)
    close(values, true_values)
    assert torch.equal(index, true_index)


def test_a_pass_after_a_change_in_place_is_refused() -> None:
    x, y = torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4)
    seen = regard.observe(x, y, y, backend="triton")
    y.add_(1)
    with pytest.raises(regard.errors.ChangedError, match="changed in place"):
        seen.received
