"""The jvp of the chunked engine: tangents that are folded along with the rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import regard
from folded_cases import CASES, engine_of, folded, formula_of, random_like, tensors_of
from regard.backends import Backend, Chunked


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.strided(3)], ids=str)
def test_the_tangent_is_that_of_the_dense_formula_and_of_finite_differences(mask: regard.Mask | None) -> None:
    torch.manual_seed(0)
    n = 70
    q, k, v, tq, tk, tv = torch.randn(6, 2, n, 8, dtype=torch.float64).unbind()
    scale = 8**-0.5

    def f(q: Tensor, k: Tensor, v: Tensor, backend: str | Backend) -> Tensor:
        return regard.attention(q[None], k[None], v[None], mask=mask, backend=backend)[0]

    output, found = torch.func.jvp(partial(f, backend=Chunked(chunk_size=16)), (q, k, v), (tq, tk, tv))
    S = q @ k.mT * scale
    if mask is not None:
        S = S.masked_fill(~mask.dense(n, n), -torch.inf)
    P = S.softmax(-1)
    t = (tq @ k.mT + q @ tk.mT) * scale
    dense = (P * (t - (P * t).sum(-1, keepdim=True))) @ v + P @ tv
    torch.testing.assert_close(output, P @ v)
    torch.testing.assert_close(found, dense)
    step = 1e-5
    ahead, behind = (f(q + s * tq, k + s * tk, v + s * tv, "reference") for s in (step, -step))
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), atol=1e-8, rtol=1e-6)


def test_runs_of_keys_with_a_gap_are_folded_with_their_tangents() -> None:
    """The second run has larger logits than the first, so all sums of the first are rescaled."""
    torch.manual_seed(0)
    mask = regard.prefix(300) | regard.window(40)
    q, tq = torch.randn(2, 1, 1, 50, 8, dtype=torch.float64).unbind()
    k, v, tk, tv = torch.randn(4, 1, 1, 1000, 8, dtype=torch.float64).unbind()
    k = k * torch.where(torch.arange(1000) < 500, 1.0, 3.0)[:, None]

    def of(backend: str) -> list[Tensor]:
        def rows(*x: Tensor) -> tuple[Tensor, ...]:
            seen = regard.observe(*x, mask=mask, backend=backend)
            return seen.output, seen.lse, seen.entropy

        def loss(*x: Tensor) -> Tensor:
            return sum((y.sin().sum() for y in rows(*x)), torch.zeros((), dtype=torch.float64))

        results, tangents = torch.func.jvp(rows, (q, k, v), (tq, tk, tv))
        product = torch.func.jvp(torch.func.grad(loss, (0, 1, 2)), (q, k, v), (tq, tk, tv))[1]
        return [*results, *tangents, *product]

    for a, b in zip(of("chunked"), of("reference"), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("moving", [1, 2], ids=["key", "value"])
def test_a_nan_in_the_tangent_of_a_hidden_key_leaves_no_trace(moving: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 3, 7, 4).unbind()
    w = torch.where(torch.arange(7)[:, None] < 4, 1.0, torch.nan).expand(2, 3, 7, 4).clone()

    def of_one(t: Tensor) -> Tensor:
        given = [*x]
        given[moving] = t
        return regard.attention(*given, mask=regard.prefix(4))

    found = torch.func.jvp(of_one, (x[moving],), (w,))[1]
    torch.testing.assert_close(found, torch.func.jvp(of_one, (x[moving],), (w.nan_to_num(0.0),))[1])


@pytest.mark.parametrize("name", CASES)
def test_the_jvp_is_that_of_the_formula(name: str) -> None:
    x = folded(name)
    given = tensors_of(x)
    w = tuple(random_like(t, at) for at, t in enumerate(given))
    rows, tangents = engine_of(x).jvp(given, w)
    formula, leaves = formula_of(x)
    values, expected = torch.func.jvp(formula, leaves, tuple(t for t in w if t is not None))
    for a, b in zip((rows.output, rows.lse.clamp(min=-1e4), rows.entropy), values, strict=True):
        torch.testing.assert_close(a, torch.where(a == -1e4, a, b))
    for a, b in zip(tangents, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("moving", [0, 1, 2, 3], ids=["query", "key", "value", "bias"])
def test_a_tangent_of_one_input_leaves_the_others_at_rest(moving: int) -> None:
    x = folded("together")
    given = tensors_of(x)
    w = tuple(random_like(t, 5) if at == moving else None for at, t in enumerate(given))
    still = tuple(torch.zeros_like(t) if m is None and t is not None else m for t, m in zip(given, w, strict=True))
    for a, b in zip(engine_of(x).jvp(given, w)[1], engine_of(x).jvp(given, still)[1], strict=True):
        torch.testing.assert_close(a, b)
