"""The formula step by step: the numbers and the text of the four stages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard


def inputs(*lead: int, n: int = 3, m: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(11)
    shapes = (*lead, n, 6), (*lead, m, 6), (*lead, m, 2)
    query, key, value = (torch.randn(s, generator=made, dtype=dtype) for s in shapes)
    return query, key, value


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)])
def test_the_four_stages_have_the_shapes_of_the_formula(lead: tuple[int, ...]) -> None:
    steps = regard.steps(*inputs(*lead))
    assert steps.scores.shape == steps.scaled.shape == steps.weights.shape == (*lead, 3, 4)
    assert steps.output.shape == (*lead, 3, 2)


def test_each_stage_follows_from_the_one_before() -> None:
    query, key, value = inputs(2, 3, dtype=torch.float64)
    steps = regard.steps(query, key, value)
    torch.testing.assert_close(steps.scores, query @ key.mT)
    torch.testing.assert_close(steps.scaled, steps.scores / math.sqrt(6))
    torch.testing.assert_close(steps.weights, steps.scaled.softmax(-1))
    torch.testing.assert_close(steps.output, steps.weights @ value)
    assert steps.scale == pytest.approx(1 / math.sqrt(6))


def test_the_output_is_that_of_attention() -> None:
    tensors = inputs(2, 3)
    for arguments in ({}, {"mask": regard.causal()}, {"scale": 0.3}, {"mask": torch.tensor([True, False, True, True])}):
        torch.testing.assert_close(regard.steps(*tensors, **arguments).output, regard.attention(*tensors, **arguments))


def test_the_scale_is_the_one_given() -> None:
    steps = regard.steps(*inputs(), scale=2.0)
    torch.testing.assert_close(steps.scaled, steps.scores * 2)
    assert "scores × 2" in str(steps)


def test_every_row_of_weights_sums_to_one_and_none_is_negative() -> None:
    steps = regard.steps(*inputs(2, 3), mask=regard.prefix(2))
    torch.testing.assert_close(steps.weights.sum(-1), torch.ones(2, 3, 3))
    assert (steps.weights >= 0).all()
    assert not steps.weights[..., 2:].any()


def test_every_output_row_lies_between_the_least_and_the_greatest_value() -> None:
    query, key, value = inputs(2, 3)
    output = regard.steps(query, key, value).output
    assert (output <= value.amax(-2, keepdim=True)).all()
    assert (output >= value.amin(-2, keepdim=True)).all()


def test_what_the_mask_hides_is_minus_infinity_in_the_scaled_scores_only() -> None:
    steps = regard.steps(*inputs(), mask=regard.causal(offset=0))
    hidden = ~regard.causal(offset=0).dense(3, 4)
    assert (steps.scaled[hidden] == -torch.inf).all()
    assert steps.scores.isfinite().all()
    assert not steps.weights[hidden].any()


def test_a_mask_with_a_batch_applies_item_by_item() -> None:
    query, key, value = inputs(2, 3)
    mask = regard.padding([1, 3])
    steps = regard.steps(query, key, value, mask)
    assert (steps.weights[0] > 0).sum(-1).eq(1).all()
    assert (steps.weights[1] > 0).sum(-1).eq(3).all()
    torch.testing.assert_close(steps.output, regard.attention(query, key, value, mask=mask))


def test_a_mask_with_a_batch_applies_to_the_first_of_five_dimensions() -> None:
    tensors = inputs(2, 3, 2)
    found = regard.steps(*tensors, mask=regard.padding([1, 3])).weights
    assert (found[0] > 0).sum(-1).eq(1).all()
    assert (found[1] > 0).sum(-1).eq(3).all()


def test_a_row_that_sees_nothing_is_zero_and_the_text_says_so() -> None:
    steps = regard.steps(*inputs(), mask=regard.causal(offset=-1))
    assert not steps.weights[0].any()
    assert not steps.output[0].any()
    assert "1 row" in str(steps)
    assert "nothing" in str(steps)
    assert "row sums 1.000000" in str(steps)


def test_nan_that_no_row_may_attend_to_does_not_reach_the_output() -> None:
    query, key, value = inputs()
    key[3], value[3] = torch.nan, torch.inf
    steps = regard.steps(query, key, value, mask=regard.prefix(3))
    torch.testing.assert_close(steps.output, regard.attention(query, key[:3], value[:3]))


def test_grouped_heads_share_keys() -> None:
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, 3, 4, generator=made) for h in (4, 2, 2))
    steps = regard.steps(query, key, value)
    assert steps.weights.shape == (1, 4, 3, 3)
    torch.testing.assert_close(steps.scores[:, 1], query[:, 1] @ key[:, 0].mT)
    torch.testing.assert_close(steps.scores[:, 2], query[:, 2] @ key[:, 1].mT)
    torch.testing.assert_close(steps.output, regard.attention(query, key, value))


def test_half_precision_is_computed_in_float32_and_returned_as_half() -> None:
    steps = regard.steps(*inputs(dtype=torch.float16))
    assert steps.scores.dtype == steps.scaled.dtype == torch.float32
    assert steps.weights.dtype == steps.output.dtype == torch.float16


def test_autocast_leaves_the_scores_in_float32() -> None:
    tensors = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        steps = regard.steps(*tensors)
    assert steps.scores.dtype == steps.scaled.dtype == torch.float32
    assert steps.weights.dtype == steps.output.dtype == torch.bfloat16
    expected = regard.steps(*(x.bfloat16().float() for x in tensors))
    torch.testing.assert_close(steps.scores, expected.scores)


LOGITS = torch.tensor([[20.0, 22.0, 18.0, 21.0]])


def test_the_example_of_four_scores_without_and_with_the_scale_of_512_dimensions() -> None:
    query, key = torch.ones(1, 1), LOGITS.mT
    sharp = regard.steps(query, key, key, scale=1.0)
    torch.testing.assert_close(sharp.weights, torch.tensor([[0.089, 0.657, 0.012, 0.242]]), rtol=0, atol=5e-4)
    smooth = regard.steps(query, key, key, scale=1 / math.sqrt(512))
    torch.testing.assert_close(smooth.weights, torch.tensor([[0.247, 0.270, 0.226, 0.258]]), rtol=0, atol=5e-4)
    for shown in ("0.089", "0.657", "0.012", "0.242", "20.000", "22.000"):
        assert shown in str(sharp)
    for shown in ("0.247", "0.270", "0.226", "0.258", "0.884", "0.972"):
        assert shown in str(smooth)


def test_the_scale_of_512_dimensions_is_the_default_of_512_dimensions() -> None:
    query = torch.zeros(1, 512)
    query[0, 0] = 1.0
    key = torch.zeros(4, 512)
    key[:, 0] = LOGITS
    steps = regard.steps(query, key, key)
    torch.testing.assert_close(steps.weights, torch.tensor([[0.247, 0.270, 0.226, 0.258]]), rtol=0, atol=5e-4)


def test_the_text_names_the_stages_in_order_with_shapes_and_facts() -> None:
    text = str(regard.steps(*inputs()))
    stages = ["scores (3, 4)", "scaled (3, 4)", "weights (3, 4)", "output (3, 2)"]
    places = [text.index(stage) for stage in stages]
    assert places == sorted(places)
    for fact in ("Q Kᵀ", "softmax of each row", "row sums 1.000000", "convex combination", "0.4082"):
        assert fact in text
    assert "−inf" not in text


def test_the_text_shows_the_numbers() -> None:
    steps = regard.steps(*inputs(), mask=regard.causal(offset=0))
    text = str(steps)
    for stage in (steps.scores, steps.weights, steps.output):
        for number in stage.flatten().tolist():
            assert f"{number:.3f}" in text
    assert text.count("−inf") >= 6


def test_a_large_case_is_printed_in_part() -> None:
    text = str(regard.steps(*inputs(2, 2, n=40, m=50)))
    assert "…" in text
    assert "the first of them" in text
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize(("n", "m", "lead"), [(0, 4, ()), (3, 0, ()), (3, 4, (0,)), (3, 4, (2, 0))])
def test_empty_inputs_have_steps_and_can_be_printed(n: int, m: int, lead: tuple[int, ...]) -> None:
    steps = regard.steps(*inputs(*lead, n=n, m=m))
    assert steps.output.shape == (*lead, n, 2)
    assert "weights" in str(steps)


def test_the_stages_have_gradients() -> None:
    query, key, value = (x.requires_grad_() for x in inputs())
    regard.steps(query, key, value, mask=regard.causal()).output.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (query, key, value))
