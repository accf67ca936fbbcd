"""regard.nn.ScaledDotProductAttention: the textbook module."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError, DtypeError, MaskError, ShapeError
from regard.nn import ScaledDotProductAttention
from regard.scores import Balanced, Prepared, Temperature

Q, K, V = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()


def test_it_is_the_formula() -> None:
    output, weights = ScaledDotProductAttention()(Q, K, V)
    P = (Q @ K.mT / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(weights, P)
    torch.testing.assert_close(output, P @ V)


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8)], ids=str)
def test_it_takes_every_rank_of_attention(shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(3, *shape).unbind()
    output, weights = ScaledDotProductAttention()(q, k, v)
    assert output.shape == q.shape
    assert weights.shape == (*shape[:-1], 5)


@pytest.mark.parametrize("return_weights", [True, False])
def test_zero_and_false_hide(return_weights: bool) -> None:
    attend, causal = ScaledDotProductAttention(), torch.ones(5, 5).tril()
    wanted = regard.attention(Q, K, V, mask=regard.causal())
    for mask in (regard.causal(), causal.bool(), causal.int(), causal):
        output, weights = attend(Q, K, V, mask, return_weights)
        torch.testing.assert_close(output, wanted)
        assert (weights is not None) == return_weights
        if return_weights:
            assert not weights.triu(1).any()


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    output, weights = ScaledDotProductAttention()(Q, K, V, mask)
    assert not output[:, 2].any()
    assert not weights[:, 2].any()


def test_dropout_applies_in_training_only_and_the_weights_are_before_it() -> None:
    attend = ScaledDotProductAttention(dropout=0.5)
    wanted, weights = attend.eval()(Q, K, V)
    torch.testing.assert_close(wanted, regard.attention(Q, K, V))
    output, before = attend.train()(Q, K, V)
    torch.testing.assert_close(before, weights)
    assert not torch.allclose(output, wanted)


def test_dropout_drops_its_share_and_scales_the_rest() -> None:
    attend = ScaledDotProductAttention(dropout=0.25)
    n = 256
    kept = attend(torch.zeros(n, 1), torch.zeros(n, 1), torch.eye(n), return_weights=False)[0] * n
    torch.testing.assert_close(kept.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert abs(float((kept == 0).float().mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75) / n


def test_a_score_learns() -> None:
    attend = ScaledDotProductAttention(score=Temperature(2.0)).double()
    output, weights = attend(Q, K, V)
    torch.testing.assert_close(weights, (Q @ K.mT / 2).softmax(-1))
    (gradient,) = torch.autograd.grad(output.square().sum(), list(attend.parameters()))
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    "arguments", [{"dropout": 1.0}, {"dropout": -0.1}, {"dropout": True}, {"score": "dot"}], ids=str
)
def test_a_wrong_argument_is_refused_by_the_constructor(arguments: dict[str, object]) -> None:
    with pytest.raises(regard.errors.RegardError, match=r"^ScaledDotProductAttention: "):
        ScaledDotProductAttention(**arguments)  # type: ignore[arg-type]


WRONG: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "dims": ((Q, K[..., :7], V), ShapeError, r"query and key must have the same dim\. Got 8 and 7"),
    "lengths": ((Q, K[:, :4], V), ShapeError, r"key and value must have the same length\. Got 4 keys and 5 values"),
    "ranks": ((Q, K[0], V), ShapeError, "query, key and value must have the same rank"),
    "batches": ((Q, K[:1].expand(3, -1, -1), V), ShapeError, "the leading dimensions .* must broadcast"),
    "dtypes": ((Q, K.float(), V), DtypeError, "query, key and value must have one dtype"),
    "no tensor": ((Q, K, V.tolist()), DtypeError, r"value must be a torch\.Tensor\. Got list"),
    "mask": ((Q, K, V, torch.ones(3, 3).bool()), MaskError, r"mask must broadcast to \(2, 5, 5\)"),
    "kind of mask": ((Q, K, V, "causal"), DtypeError, "mask must be a regard Mask or a tensor"),
}


@pytest.mark.parametrize("return_weights", [True, False])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_gets_one_error_that_names_the_module(case: str, return_weights: bool) -> None:
    inputs, error, words = WRONG[case]
    with pytest.raises(error, match=rf"^ScaledDotProductAttention: {words}"):
        ScaledDotProductAttention()(*inputs, return_weights=return_weights)


@pytest.mark.parametrize("return_weights", [True, False])
def test_the_error_of_a_score_that_does_not_fit_names_the_module(return_weights: bool) -> None:
    with pytest.raises(ShapeError, match=r"^ScaledDotProductAttention: the score does not fit"):
        ScaledDotProductAttention(score=Temperature(heads=3))(Q, K, V, return_weights=return_weights)


@pytest.mark.parametrize("return_weights", [True, False])
def test_an_error_that_a_score_raises_keeps_its_name(return_weights: bool) -> None:
    class Choosy(Balanced):
        def prepare(self, query: torch.Tensor, key: torch.Tensor) -> Prepared:
            raise ArgumentError("Choosy: it likes: none of these.")

    with pytest.raises(ArgumentError, match=r"^Choosy: it likes: none of these\.$"):
        ScaledDotProductAttention(score=Choosy())(Q, K, V, return_weights=return_weights)
