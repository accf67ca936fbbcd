"""Derivatives of the second order and beyond, in every composition, on every case of the contract."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradgradcheck

import regard
from autograd.test_derivatives import BY_ROWS, CHECKED, checkable, small
from contract_cases import BY_NAME, Case, as_double
from regard.autograd.engine import double_backward_of_formula, jvp_of_formula
from regard.backends import Backend, Chunked
from regard.chunked.engine import ChunkedEngine

SRC = Path(__file__).resolve().parents[2] / "src"
THIRD = ["plain", "causal", "bias", "softcap", "sink", "Additive", "relative"]


@pytest.mark.parametrize("case", CHECKED, ids=lambda c: c.name)
def test_second_derivatives_of_every_case_are_right_in_both_modes(case: Case) -> None:
    function, args = checkable(case, BY_ROWS)
    assert gradgradcheck(function, args, fast_mode=True, check_fwd_over_rev=True)


def hessian_products(case: Case, backend: str | Backend) -> list[tuple[Tensor, ...]]:
    """The same product of a Hessian and a vector in three ways."""
    tensors, kwargs = small(case)
    x = tuple(t.detach() for t in tensors)
    w = tuple(torch.randn(t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(3)) for t in x)

    def loss(*x: Tensor) -> Tensor:
        seen = regard.observe(*x, **kwargs, backend=backend)
        lse = torch.where(seen.lse > -torch.inf, seen.lse, 0.0)
        return seen.output.sin().sum() + lse.sin().sum() + seen.entropy.square().sum()

    gradient = torch.func.grad(loss, (0, 1, 2))
    forward_over_reverse = torch.func.jvp(gradient, x, w)[1]
    reverse_over_forward = torch.func.grad(lambda *x: torch.func.jvp(loss, x, w)[1], (0, 1, 2))(*x)
    leaves = [t.clone().requires_grad_() for t in x]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    reverse_over_reverse = torch.autograd.grad(first, leaves, w)
    return [forward_over_reverse, reverse_over_forward, reverse_over_reverse]


@pytest.mark.parametrize("case", CHECKED, ids=lambda c: c.name)
def test_a_hessian_times_a_vector_is_the_same_in_every_composition(case: Case) -> None:
    true = hessian_products(case, "reference")[0]
    for found in hessian_products(case, BY_ROWS):
        for a, b in zip(found, true, strict=True):
            torch.testing.assert_close(a, b)


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


def test_per_sample_products_with_a_hessian_equal_a_loop() -> None:
    torch.manual_seed(0)
    q, w = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64).unbind()

    def product(q: Tensor, w: Tensor) -> Tensor:
        def loss(q: Tensor) -> Tensor:
            return (
                regard.observe(q[None], q[None], q[None], mask=regard.causal(), backend="chunked")
                .entropy.square()
                .sum()
            )

        return torch.func.jvp(torch.func.grad(loss), (q,), (w,))[1]

    together = torch.vmap(product)(q, w)
    torch.testing.assert_close(together, torch.stack([product(a, b) for a, b in zip(q, w, strict=True)]))


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


def test_runs_of_keys_that_lie_apart_are_folded_with_their_tangents() -> None:
    """The second run has larger logits than the first, so that everything of the first is rescaled."""
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
def test_a_tangent_that_is_nan_where_nobody_looks_leaves_no_trace(moving: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 3, 7, 4).unbind()
    w = torch.where(torch.arange(7)[:, None] < 4, 1.0, torch.nan).expand(2, 3, 7, 4).clone()

    def of_one(t: Tensor) -> Tensor:
        given = [*x]
        given[moving] = t
        return regard.attention(*given, mask=regard.prefix(4))

    found = torch.func.jvp(of_one, (x[moving],), (w,))[1]
    torch.testing.assert_close(found, torch.func.jvp(of_one, (x[moving],), (w.nan_to_num(0.0),))[1])


def test_what_would_be_linearised_wrongly_is_refused_by_name() -> None:
    x = torch.randn(2, 5, 4)

    def f(x: Tensor, backend: str = "auto") -> Tensor:
        return regard.attention(x, x.detach(), x.detach(), backend=backend)

    with pytest.raises(regard.errors.ArgumentError, match=r"^attention: torch\.func\.linearize"):
        torch.func.linearize(f, x)


def test_output_and_tangent_come_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    for name in ("forward", "jvp"):
        inner = getattr(ChunkedEngine, name)
        monkeypatch.setattr(ChunkedEngine, name, lambda *a, inner=inner, name=name: (passes.append(name), inner(*a))[1])
    x = torch.randn(1, 2, 6, 4)
    torch.func.jvp(lambda x: regard.attention(x, x, x), (x,), (torch.ones_like(x),))
    assert passes == ["jvp"]
    passes.clear()
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert forward_ad.unpack_dual(regard.attention(dual, x, x)).tangent is not None
    assert passes == ["jvp"]


def test_forward_mode_over_a_recorded_graph_keeps_the_tangent_of_the_gradient() -> None:
    torch.manual_seed(0)
    q, k, v, w = torch.randn(4, 1, 2, 5, 4, dtype=torch.float64).unbind()

    def tangent(backend: str) -> Tensor:
        x = q.clone().requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, w)
            (g,) = torch.autograd.grad(
                regard.attention(dual, k, v, backend=backend).sin().sum(), dual, create_graph=True
            )
            found = forward_ad.unpack_dual(g).tangent
            assert found is not None
            return found.clone()

    torch.testing.assert_close(tangent("chunked"), tangent("reference"))


@pytest.mark.parametrize("name", ["plain", "causal", "bias", "relative", "softcap", "Additive", "dropout"])
@pytest.mark.parametrize(
    "moving", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)], ids=str
)
def test_the_passes_of_an_engine_are_those_of_its_meaning(
    name: str, moving: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[ChunkedEngine, Any]] = []
    inner = ChunkedEngine.forward
    monkeypatch.setattr(ChunkedEngine, "forward", lambda self, x: (kept.append((self, x)), inner(self, x))[1])
    tensors, kwargs = small(BY_NAME["plain" if name == "dropout" else name])
    with torch.no_grad():
        regard.observe(*tensors, **kwargs, **({"dropout": 0.3} if name == "dropout" else {}), backend=BY_ROWS)
    engine, x = kept[0]
    x = tuple(None if t is None else t.detach() for t in x)
    made = torch.Generator().manual_seed(0)

    def like(t: Tensor | None) -> Tensor | None:
        return None if t is None else torch.randn(t.shape, dtype=t.dtype, generator=made)

    w = tuple(like(t) if at > 2 or moving[at] else None for at, t in enumerate(x))
    found, tangents = engine.jvp(x, w)
    for a, b in zip(tangents, jvp_of_formula(engine, x, w)[1], strict=True):
        torch.testing.assert_close(a, b)
    needs = tuple(t is not None for t in x)
    for only in range(3):
        g = tuple(like(t) if at == only else None for at, t in enumerate(found[:3]))
        for dg in ((None, None, None), tuple(map(like, found[:3]))):
            bent = engine.double_backward(x, found, tangents, g, w, dg, needs)
            for a, b in zip(bent, double_backward_of_formula(engine, x, g, w, dg)[1], strict=True):
                torch.testing.assert_close(a, b)


MEMORY = """
import resource, sys, torch, regard
n, what = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(2)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def run(n):
    q, k, v, a, b, c = (torch.randn(1, 1, n, 16) for _ in range(6))
    call = lambda q, k, v: regard.attention(q, k, v, mask=regard.causal(), backend="chunked")
    if what == "jvp":
        return torch.func.jvp(call, (q, k, v), (a, b, c))
    x = [t.requires_grad_() for t in (q, k, v)]
    first = torch.autograd.grad(call(*x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first, x, (a, b, c))
run(256)
before = peak()
run(n)
print(peak() - before)
"""


@pytest.mark.parametrize("what", ["jvp", "double backward"])
def test_memory_of_a_tangent_and_of_a_double_backward_is_linear(what: str) -> None:
    command = [sys.executable, "-c", MEMORY, "16384", what]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={"PYTHONPATH": str(SRC)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 512, f"{done.stdout} MiB above the start; the matrix alone would take 1,024"
