"""Functions of the scores in our kernels: the same results and derivatives as `chunked`, whatever a function reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import BackendError
from regard.scores import Pointwise

torch.manual_seed(0)
SLOPES, COLUMNS, NEAR = (torch.randn(s, requires_grad=True) for s in ((2,), (2, 7), (2, 9)))
PAIRS, IDS, FLAGS = torch.randn(5, 7, requires_grad=True), torch.arange(7) // 2, torch.arange(7) % 3 == 0
QUERY, KEY, VALUE = (torch.randn(2, h, n, d, requires_grad=True) for h, n, d in ((2, 5, 4), (1, 7, 4), (1, 7, 3)))


def summed(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Tables whose gradients are summed along rows, keys and diagonals; a slope that is NaN where the mask hides."""
    far = torch.log1p((i + 2 - j).to(s.dtype))
    same = torch.where((IDS[i] == IDS[j]) | FLAGS[j], s * s / 4, s)
    return same * far - SLOPES[h] * far + COLUMNS[b, j] + NEAR[h, (j - i).clamp(-4, 4) + 4] * torch.tanh(s)


def paired(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A table that no kernel sums up, and −inf."""
    return torch.where(i + 3 >= j, torch.sigmoid(s) * PAIRS[i, j] * 3, float("-inf"))


def powers(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Powers and logarithms that are whole numbers, and others."""
    bucket = torch.floor(torch.log2(1.0 + (i - j).abs())) + torch.floor(torch.log10(1.0 + i * j))
    exact = torch.where(2.0**i * torch.exp2(-i) == 1, s, 9.0)
    return exact * (s.abs() + 0.5) ** 1.5 - (-2.0 - i) ** (j * 1.0) / 1e4 + 1.5 ** (-j) * bucket


CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor], dict[str, Any]]] = {
    "sums, mask, cap and sink": (
        summed,
        [SLOPES, COLUMNS, NEAR],
        {"mask": regard.causal(), "softcap": 2.5, "sink": torch.zeros(2)},
    ),
    "pairs": (paired, [PAIRS], {}),
    "powers": (powers, [], {}),
}


def both(call: Callable[[str], list[Tensor]]) -> None:
    for found, true in zip(call("triton"), call("chunked"), strict=True):
        torch.testing.assert_close(found, true, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_results_gradients_and_statistics_are_those_of_chunked(name: str) -> None:
    f, tables, options = CASES[name]

    def call(backend: str) -> list[Tensor]:
        seen = regard.observe(QUERY, KEY, VALUE, score=Pointwise(f), backend=backend, **options)
        loss = seen.output.sin().sum() + seen.lse.square().sum() + seen.entropy.square().sum()
        grads = torch.autograd.grad(loss, [QUERY, KEY, VALUE, *tables])
        return [seen.output, seen.entropy, *grads, seen.received, seen.visible.float()]

    both(call)


def test_second_derivatives_and_tangents_are_those_of_chunked() -> None:
    def curved(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(IDS[i] == IDS[j], s * s / 4, torch.tanh(s) * SLOPES.detach()[h])

    def call(backend: str) -> list[Tensor]:
        def attend(q: Tensor, *given: Tensor) -> Tensor:
            return regard.attention(
                q, *given, score=Pointwise(curved), mask=regard.causal(), softcap=2.0, backend=backend
            )

        first = torch.autograd.grad(attend(QUERY, KEY, VALUE).sin().sum(), (QUERY, KEY), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (QUERY, KEY, VALUE))
        fixed = KEY.detach(), VALUE.detach()
        tangent = torch.func.jvp(lambda q: attend(q, *fixed), (QUERY.detach(),), (torch.ones_like(QUERY),))[1]
        return [*second, tangent]

    both(call)


def test_an_operation_without_a_kernel_is_named_by_why_and_chunked_takes_it() -> None:
    score = Pointwise(lambda s, b, h, i, j: torch.atan(s))
    plan = regard.why(QUERY, KEY, VALUE, score=score)
    assert plan.backend == "chunked"
    assert any("its kernels have no atan" in said for said in plan.refusals["triton"])
    with pytest.raises(BackendError, match="no atan, which the function of the score calls"):
        regard.attention(QUERY, KEY, VALUE, score=score, backend="triton")
    assert regard.why(QUERY, KEY, VALUE, score=Pointwise(summed), backend="triton").backend == "triton"


def test_decoding_knows_the_head_of_each_row() -> None:
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1030, 8)
    slopes = torch.rand(4)

    def call(backend: str) -> list[Tensor]:
        score = Pointwise(lambda s, b, h, i, j: s - slopes[h] * (1029 - j) / 99)
        return [regard.attention(query, key, key, score=score, backend=backend)]

    both(call)


@pytest.mark.parametrize("f", [lambda s, i: s / (100 - i), lambda s, i: s - torch.sqrt((99 - i).to(s.dtype))])
def test_a_function_that_has_no_value_past_the_last_row_leaves_no_trace(f: Callable[..., Tensor]) -> None:
    tensors = [torch.randn(1, 1, n, 16, requires_grad=True) for n in (100, 128, 128)]

    def call(backend: str) -> list[Tensor]:
        found = regard.attention(*tensors, score=Pointwise(lambda s, b, h, i, j: f(s, i)), backend=backend)
        return [found, *torch.autograd.grad(found.square().sum(), tensors)]

    both(call)
