"""Maps over strips: derivatives of any order of the formula, in linear memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import BY_NAME, as_double
from derivative_cases import BY_ROWS, small
from folded_cases import CASES, FEW_ROWS, folded, formula_of
from regard.autograd.strip_map import MapStrips, attention_strips, jvp_of, vjp_of
from regard.backends import Backend
from regard.compat.torch import call_function

THIRD = ["plain", "causal", "bias", "softcap", "sink", "Additive", "relative"]


@pytest.mark.parametrize("name", THIRD)
def test_third_derivatives_are_those_of_the_formula(name: str) -> None:
    def third(backend: str | Backend) -> list[Tensor]:
        tensors, kwargs = as_double(*small(BY_NAME[name]))
        seen = regard.observe(*tensors, **kwargs, backend=backend)
        total = seen.output.sin().sum() + seen.lse.clamp(min=-9).sin().sum() + seen.entropy.square().sum()
        for _ in range(2):
            grads = torch.autograd.grad(total, tensors, create_graph=True)
            total = sum((g.square().sum() for g in grads), torch.zeros((), dtype=torch.float64))
        return list(torch.autograd.grad(total, tensors))

    for a, b in zip(third(BY_ROWS), third("reference"), strict=True):
        torch.testing.assert_close(a, b)


def test_forward_mode_nests_and_goes_over_second_derivatives() -> None:
    torch.manual_seed(0)
    q, k, v, w = torch.randn(4, 1, 2, 4, 3, dtype=torch.float64).unbind()

    def of(backend: str) -> list[Tensor]:
        def f(q: Tensor) -> Tensor:
            return regard.attention(q, k, v, mask=regard.causal(), backend=backend)

        def tangent(q: Tensor) -> Tensor:
            return torch.func.jvp(f, (q,), (w,))[1]

        def product(q: Tensor) -> Tensor:
            return torch.func.jvp(torch.func.grad(lambda q: f(q).sin().sum()), (q,), (w,))[1]

        return [torch.func.jvp(tangent, (q,), (w,))[1], torch.func.jvp(product, (q,), (w,))[1]]

    for a, b in zip(of("chunked"), of("reference"), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", CASES)
def test_a_map_over_strips_and_its_vjp_and_jvp_are_those_of_the_formula(name: str) -> None:
    x = folded(name)
    formula, leaves = formula_of(x)
    strips = attention_strips(x, FEW_ROWS)
    assert len(strips.tiles) > 1
    values = call_function(MapStrips, strips, *leaves)
    expected, pull = torch.func.vjp(formula, *leaves)
    seen = values[1] > -torch.inf
    for a, b in zip((values[0], torch.where(seen, values[1], 0.0), values[2]), expected, strict=True):
        torch.testing.assert_close(a, b)
    g = tuple(torch.ones_like(y) for y in expected)
    for a, b in zip(strips.vjp()(*leaves, *g), pull(g), strict=True):
        torch.testing.assert_close(a, b)
    w = tuple(t.sin() for t in leaves)
    for a, b in zip(strips.jvp()(*leaves, *w), torch.func.jvp(formula, leaves, w)[1], strict=True):
        torch.testing.assert_close(a, b)


def test_vjp_and_jvp_of_a_function_are_those_of_torch_func() -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (a * b).sin(), a @ b

    a, b, ta, tb = torch.randn(4, 3, 3, dtype=torch.float64).unbind()
    values, tangents = jvp_of(f, (a, b), (ta, tb))
    true_values, true_tangents = torch.func.jvp(f, (a, b), (ta, tb))
    torch.testing.assert_close((*values, *tangents), (*true_values, *true_tangents))
    torch.testing.assert_close(vjp_of(f, a, b)[1]((ta, tb)), torch.func.vjp(f, a, b)[1]((ta, tb)))
