"""The softmax, compared with float64 and with torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.errors import ArgumentError, DtypeError, ShapeError
from regard.softmax import Partial, finish, jacobian, lowest, merge, online, partial, stable

INF = math.inf


def weighted(logits: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(logits.double(), -1).nan_to_num(0.0) @ values.double()


def close(a: Partial, b: Partial, tolerance: float = 1e-12) -> None:
    for left, right in zip(finish(a), finish(b), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@st.composite
def blocks(draw: st.DrawFn, count: int) -> list[Partial]:
    """Partials of a few keys each, over the same 3 rows, some of them empty or hidden."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    size = draw(st.sampled_from([1.0, 30.0, 1e4]))
    made = []
    for _ in range(count):
        keys = draw(st.integers(0, 4))
        logits = torch.randn(3, keys, dtype=torch.float64) * size
        logits[torch.rand(3, keys) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = -INF
        made.append(partial(logits, torch.randn(keys, 2, dtype=torch.float64)))
    return made


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_stable_agrees_with_torch_along_any_dim(dim: int) -> None:
    x = torch.randn(5, 7, 3)
    torch.testing.assert_close(stable(x, dim), torch.softmax(x, dim))


def test_large_logits_neither_overflow_nor_lose_their_order() -> None:
    x = torch.tensor([[1e4, 1e4 - 1, -1e4], [1e30, 0.0, -1e30], [-1e38, -1e38, -3e38]])
    torch.testing.assert_close(stable(x), torch.softmax(x.double(), -1).float())


def test_a_row_that_is_all_minus_inf_gives_zeros_and_no_gradient() -> None:
    x = torch.tensor([[-INF, -INF], [0.0, -INF]], requires_grad=True)
    p = stable(x)
    assert p.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    (gradient,) = torch.autograd.grad((p * torch.randn(2, 2)).sum(), x)
    assert gradient.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_the_textbook_example_is_what_arithmetic_says() -> None:
    expected = torch.tensor([0.089, 0.657, 0.012, 0.242])
    x = torch.tensor([20.0, 22.0, 18.0, 21.0])
    torch.testing.assert_close(stable(x), expected, atol=5e-4, rtol=0)
    scaled = torch.tensor([0.247, 0.270, 0.226, 0.258])
    torch.testing.assert_close(stable(x / 512**0.5), scaled, atol=5e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32_and_returned_as_half(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 50) * 5).to(dtype)
    assert stable(x).dtype == dtype
    torch.testing.assert_close(stable(x), torch.softmax(x.float(), -1).to(dtype), rtol=0, atol=0)
    assert partial(x, x.mT).numerator.dtype == torch.float32
    assert online([(x, x.mT)]).dtype == dtype


def test_stable_has_derivatives_of_the_second_order_and_forward_mode() -> None:
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(stable, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(stable, (x,))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 3)])
def test_stable_takes_empty_and_single_numbers(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(stable(x), torch.softmax(x, -1))


def test_stable_works_under_vmap() -> None:
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(torch.func.vmap(stable)(x), torch.softmax(x, -1))


def test_a_hidden_block_and_an_empty_block_give_the_same_empty_state() -> None:
    hidden = partial(torch.full((2, 3), -INF), torch.randn(3, 4))
    empty = partial(torch.empty(2, 0), torch.empty(0, 4))
    for nothing in (hidden, empty):
        assert nothing.max.tolist() == pytest.approx([lowest(nothing.max.dtype)] * 2)
        assert not nothing.denominator.any()
        assert not nothing.numerator.any()
        output, lse = finish(nothing)
        assert output.shape == (2, 4)
        assert not output.any()
        assert lse.tolist() == [-INF, -INF]


@settings(max_examples=40, deadline=None)
@given(blocks(2))
def test_merge_is_commutative(pair: list[Partial]) -> None:
    a, b = pair
    close(merge(a, b), merge(b, a))


@settings(max_examples=40, deadline=None)
@given(blocks(3))
def test_merge_is_associative(three: list[Partial]) -> None:
    a, b, c = three
    close(merge(merge(a, b), c), merge(a, merge(b, c)), 1e-9)


@settings(max_examples=20, deadline=None)
@given(blocks(1))
def test_a_state_that_saw_nothing_is_neutral_to_the_bit(one: list[Partial]) -> None:
    nothing = partial(torch.empty(3, 0, dtype=torch.float64), torch.empty(0, 2, dtype=torch.float64))
    for merged in (merge(one[0], nothing), merge(nothing, one[0])):
        for left, right in zip(merged, one[0], strict=True):
            assert torch.equal(left, right)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.sampled_from([1.0, 100.0, 1e4]), st.integers(0, 10_000))
def test_online_is_the_softmax_whatever_the_blocks(sizes: list[int], size: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(2, 3, sum(sizes)) * size
    logits[torch.rand(2, 3, sum(sizes)) < 0.3] = -INF
    values = torch.randn(2, sum(sizes), 4)
    output = online(zip(logits.split(sizes, -1), values.split(sizes, -2), strict=True))
    torch.testing.assert_close(output.double(), weighted(logits, values), rtol=1e-5, atol=1e-5)


def test_finish_gives_the_log_of_the_denominator() -> None:
    logits = torch.randn(3, 8) * 1e4
    state = merge(partial(logits[:, :5], torch.ones(5, 1)), partial(logits[:, 5:], torch.ones(3, 1)))
    torch.testing.assert_close(finish(state).lse, torch.logsumexp(logits, -1))


def test_merged_states_have_exact_gradients_and_hidden_rows_none() -> None:
    logits = torch.randn(2, 5, dtype=torch.float64)
    logits[1] = -INF
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    logits.requires_grad_()

    def blocked(logits: Tensor, values: Tensor) -> Tensor:
        return online([(logits[:, :2], values[:2]), (logits[:, 2:], values[2:])])

    cotangent = torch.randn(2, 2, dtype=torch.float64)
    found = torch.autograd.grad((blocked(logits, values) * cotangent).sum(), (logits, values))
    whole = torch.autograd.grad(((stable(logits) @ values) * cotangent).sum(), (logits, values))
    for left, right in zip(found, whole, strict=True):
        torch.testing.assert_close(left, right)
    assert not found[0][1].any()
    seen = logits.detach()[:1].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: finish(partial(x, values.detach())).lse, (seen,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(blocked, (seen, values))


def test_the_jacobian_is_the_derivative_of_stable() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = torch.stack([torch.func.jacrev(stable)(row) for row in x])
    torch.testing.assert_close(jacobian(stable(x)), expected)
    torch.testing.assert_close(jacobian(stable(x)).sum(-1), torch.zeros(3, 5, dtype=torch.float64))


def test_bad_input_gets_one_clear_error() -> None:
    with pytest.raises(DtypeError, match=r"softmax\.stable: x must be of a floating dtype"):
        stable(torch.arange(3))
    with pytest.raises(ShapeError, match=r"softmax\.stable: dim"):
        stable(torch.randn(3), dim=1)
    with pytest.raises(ShapeError, match=r"softmax\.partial: .* agree in m"):
        partial(torch.randn(2, 3), torch.randn(4, 2))
    with pytest.raises(ArgumentError, match=r"softmax\.online: there must be at least one block"):
        online([])
    with pytest.raises(ShapeError, match=r"softmax\.jacobian"):
        jacobian(torch.tensor(1.0))
