"""First and second derivatives of every case of the contract, in every mode and composition, in one pass each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import regard
from contract_cases import BY_NAME, Case, leaves
from derivative_cases import BY_ROWS, CHECKED, SMALL, checkable, small
from regard.autograd.engine import MaybeTensors, Needs, attend
from regard.backends import Backend
from regard.chunked.engine import ChunkedEngine
from regard.core.rows import Rows, stacked, unstacked
from regard.core.spec import Spec
from regard.core.tiling import TileSizes
from regard.core.validation import pose


def hessian_products(case: Case, backend: str | Backend) -> list[tuple[Tensor, ...]]:
    """The same product of a Hessian and a vector, over every leaf, in three ways."""
    function, args = checkable(case, backend)
    x = tuple(t.detach() for t in args)
    made = torch.Generator().manual_seed(3)
    w = tuple(torch.randn(t.shape, dtype=t.dtype, generator=made) for t in x)
    every = tuple(range(len(x)))

    def loss(*x: Tensor) -> Tensor:
        output, lse, entropy = function(*x)
        return output.sin().sum() + lse.sin().sum() + entropy.square().sum()

    gradient = torch.func.grad(loss, every)
    forward_over_reverse = torch.func.jvp(gradient, x, w)[1]
    reverse_over_forward = torch.func.grad(lambda *x: torch.func.jvp(loss, x, w)[1], every)(*x)
    leaves = [t.clone().requires_grad_() for t in x]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    reverse_over_reverse = torch.autograd.grad(first, leaves, w)
    return [forward_over_reverse, reverse_over_forward, reverse_over_reverse]


@pytest.mark.parametrize("case", CHECKED, ids=lambda c: c.name)
def test_a_hessian_times_a_vector_is_that_of_the_reference_in_every_composition(case: Case) -> None:
    """The reference is torch's own derivative of the formula; finite differences check both below."""
    true = hessian_products(case, "reference")[0]
    for found in hessian_products(case, BY_ROWS):
        for a, b in zip(found, true, strict=True):
            torch.testing.assert_close(a, b)


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


@pytest.mark.parametrize("short", [False, True])
def test_statistics_in_one_tensor_give_the_same_derivatives(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def forward_stacked(self: ChunkedEngine, x: MaybeTensors) -> tuple[Tensor, Tensor]:
        asked.append("forward")
        return stacked(self.forward(x), 4)

    def vjp_stacked(self: ChunkedEngine, x: MaybeTensors, output: Tensor, rows: Tensor, g: Tensor, needs: Needs) -> Any:
        asked.append("vjp")
        return self.vjp(x, unstacked(output, rows), (g, None, None), needs) if short else None

    def derivatives() -> list[Tensor]:
        x = [
            t.requires_grad_() for t in torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(1)).unbind()
        ]
        loss = attend(engine, (x[0].unsqueeze(2), *x[1:], None)).output.sin().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        recorded = torch.autograd.grad(loss, x, create_graph=True)
        return [*first, *recorded, *torch.autograd.grad(sum(t.square().sum() for t in recorded), x)]

    spec = Spec.of(pose(*torch.randn(3, 1, 2, 5, 4).unbind(), softcap=2.0))
    engine = ChunkedEngine(spec, TileSizes(), False)
    true = derivatives()
    monkeypatch.setattr(ChunkedEngine, "output_alone", True)
    monkeypatch.setattr(ChunkedEngine, "forward_stacked", forward_stacked)
    monkeypatch.setattr(ChunkedEngine, "vjp_stacked", vjp_stacked)
    for found, expected in zip(derivatives(), true, strict=True):
        torch.testing.assert_close(found, expected)
    assert asked == ["forward", "vjp", "vjp"]  # the first and the last; gradients with a graph need the rows apart


def test_a_first_call_saves_as_many_tensors_as_its_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of an engine finds the statistics apart; from then on they come in one tensor."""
    calls: list[int] = []

    def forward_stacked(self: ChunkedEngine, x: MaybeTensors) -> tuple[Tensor, Tensor] | None:
        calls.append(len(calls))
        return stacked(self.forward(x), 3) if calls[-1] else None

    inner = ChunkedEngine.vjp

    def vjp(self: ChunkedEngine, x: MaybeTensors, rows: Rows, g: MaybeTensors, needs: Needs) -> Any:
        return inner(self, x, rows._replace(entropy=torch.zeros_like(rows.lse)), g, needs)  # which is not saved

    monkeypatch.setattr(ChunkedEngine, "output_alone", True)
    monkeypatch.setattr(ChunkedEngine, "stacks", True)
    monkeypatch.setattr(ChunkedEngine, "vjp", vjp)
    monkeypatch.setattr(ChunkedEngine, "forward_stacked", forward_stacked)
    x = [t.requires_grad_() for t in torch.randn(3, 1, 2, 5, 4).unbind()]
    engine = ChunkedEngine(Spec.of(pose(*x, softcap=2.0)), TileSizes(), False)

    def output(*x: Tensor) -> Tensor:
        return attend(engine, (x[0].unsqueeze(2), *x[1:], None)).output

    again = checkpoint(output, *x, use_reentrant=False)
    found = torch.autograd.grad(again, x, torch.ones_like(again))
    assert calls == [0, 1]
    true = output(*x)
    torch.testing.assert_close(found, torch.autograd.grad(true, x, torch.ones_like(true)))


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


@pytest.mark.parametrize("case", CHECKED, ids=lambda c: c.name)
def test_first_derivatives_are_right_in_both_modes_and_batched(case: Case) -> None:
    function, args = checkable(case, BY_ROWS)
    assert gradcheck(function, args, fast_mode=True, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("backend", ["reference", BY_ROWS], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "bias", "bias with −inf", "sink", "all together", "Additive"])
def test_second_derivatives_are_right_in_both_modes(name: str, backend: str | Backend) -> None:
    mask = {"mask": regard.causal()} if "mask" in BY_NAME[name].make(SMALL) else {}
    case = Case(name, lambda s: {**BY_NAME[name].make(s), **mask})
    function, args = checkable(case, backend)
    assert gradgradcheck(function, args, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("case", [c for c in CHECKED if {"score", "bias"} & {*c.make(SMALL)}], ids=lambda c: c.name)
def test_parameters_of_scores_and_biases_have_second_derivatives(case: Case) -> None:
    tensors, kwargs = small(case)
    every = leaves(tensors, kwargs)

    def penalty(backend: str | Backend) -> list[Tensor]:
        seen = regard.observe(*tensors, **kwargs, backend=backend)
        grads = torch.autograd.grad(seen.output.sin().sum() + seen.entropy.sum(), every, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), every, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(every, second, strict=True)]

    for a, b in zip(penalty("reference"), penalty(BY_ROWS), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_a_tangent_is_never_silently_zero(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v, t = torch.randn(4, 1, 1, 6, 4, dtype=torch.float64).unbind()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, t)
        tangent = forward_ad.unpack_dual(regard.attention(dual, k, v, backend=backend)).tangent
    step = 1e-6
    ahead, behind = (regard.attention(q + s * t, k, v, backend="reference") for s in (step, -step))
    assert tangent is not None
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_the_tangent_of_a_bias_alone_is_never_silently_zero(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    bias, t = torch.randn(2, 6, 6)
    _, found = torch.func.jvp(lambda b: regard.attention(q, k, v, bias=b, backend=backend), (bias,), (t,))
    _, true = torch.func.jvp(lambda b: regard.attention(q, k, v, bias=b, backend="reference"), (bias,), (t,))
    assert true.abs().max() > 1e-3
    torch.testing.assert_close(found, true)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(bias, t)
        found = torch.autograd.forward_ad.unpack_dual(regard.attention(q, k, v, bias=dual, backend=backend)).tangent
    torch.testing.assert_close(found, true)


def test_forward_over_reverse_with_one_input_that_needs_a_gradient() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind()
    t = torch.randn_like(q)

    def g(q: Tensor, backend: str) -> Tensor:
        return torch.autograd.grad(regard.attention(q, k, v, backend=backend).sin().sum(), q, create_graph=True)[0]

    out = {}
    for b in ("chunked", "reference", "auto"):
        with forward_ad.dual_level():
            d = forward_ad.make_dual(q.clone().requires_grad_(), t)
            out[b] = forward_ad.unpack_dual(g(d, b)).tangent
    torch.testing.assert_close(out["chunked"], out["reference"])
    torch.testing.assert_close(out["auto"], out["reference"])
