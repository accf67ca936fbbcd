"""Forward mode, products with Hessians and batched derivatives of our kernels, against `chunked`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import BY_NAME, Case, Shape
from regard.kernels.engine import TritonEngine

TINY = Shape(batch=2, heads=2, kv_heads=1, n=5, m=7, d=4, dv=3)
BLOCKS = Shape(batch=1, heads=1, kv_heads=1, n=37, m=70, d=8, dv=5)
CASES = [
    Case("several blocks", lambda s: {"mask": regard.window(20, 3)}, BLOCKS),
    *(
        Case(name, BY_NAME[name].make, TINY)
        for name in (
            "plain",
            "causal",
            "dense per item",
            "scale per head",
            "softcap",
            "sink",
            "bias",
            "alibi",
            "relative",
            "Bilinear",
            "Additive",
        )
    ),
]


def derivatives(case: Case, backend: str, dropout: float = 0.0) -> list[Tensor]:
    """Results and their tangents, and a Hessian times a vector in two ways; for the third see test_derivatives.py."""
    tensors, kwargs = case.inputs(torch.float32)
    x = tuple(t.detach() for t in tensors)
    made = torch.Generator().manual_seed(5)
    w = tuple(torch.randn(t.shape, generator=made) for t in x)

    def rows(*x: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(9)
        seen = regard.observe(*x, **kwargs, dropout=dropout, backend=backend)
        return seen.output, torch.where(seen.lse > -torch.inf, seen.lse, 0.0), seen.entropy

    def loss(*x: Tensor) -> Tensor:
        return sum((y.sin().sum() for y in rows(*x)), torch.zeros(()))

    results, tangents = torch.func.jvp(rows, x, w)
    forward_over_reverse = torch.func.jvp(torch.func.grad(loss, (0, 1, 2)), x, w)[1]
    reverse_over_forward = torch.func.grad(lambda *x: torch.func.jvp(loss, x, w)[1], (0, 1, 2))(*x)
    return [*results, *tangents, *forward_over_reverse, *reverse_over_forward]


def close(found: list[Tensor], true: list[Tensor]) -> None:
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_tangents_and_products_with_a_hessian_are_those_of_chunked(case: Case) -> None:
    close(derivatives(case, "triton"), derivatives(case, "chunked"))


def test_dropout_drops_the_same_pairs_in_every_mode() -> None:
    case = Case("plain", BY_NAME["plain"].make, TINY)
    close(derivatives(case, "triton", dropout=0.4), derivatives(case, "chunked", dropout=0.4))


@pytest.mark.parametrize("mask", [regard.padding([4, 7]), regard.strided(2)], ids=str)
def test_gradients_a_sample_are_those_of_each_sample(mask: regard.Mask | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 1, 7, 4).unbind()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(2)
        return regard.attention(q, k, v, mask=mask, dropout=0.2, backend="triton").sin().sum()

    gradient = torch.func.grad(loss, (0, 1, 2))
    together = torch.vmap(gradient, in_dims=(0, None, 0), randomness="same")(q, k[0], v)
    alone = [gradient(a, k[0], b) for a, b in zip(q, v, strict=True)]
    close(list(together), [torch.stack(column) for column in zip(*alone, strict=True)])


@pytest.mark.parametrize("name", ["bias", "sink"])
def test_vmap_over_queries_with_shared_parameters_equals_a_loop(name: str) -> None:
    tensors, kwargs = Case(name, BY_NAME[name].make, TINY).inputs(torch.float32)
    queries = torch.stack([tensors[0], tensors[0] * 2]).detach()

    def gradient(q: Tensor) -> Tensor:
        return torch.func.grad(lambda q: regard.attention(q, *tensors[1:], **kwargs, backend="triton").sin().sum())(q)

    close([torch.vmap(gradient)(queries)], [torch.stack([gradient(q) for q in queries])])


def test_a_hessian_is_that_of_chunked() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 3, 2).unbind()

    def hessian(backend: str) -> Tensor:
        found: Any = torch.func.hessian(
            lambda q: regard.attention(q, k, v, mask=regard.causal(), backend=backend).sin().sum()
        )(q)
        return found

    close([hessian("triton")], [hessian("chunked")])


def test_output_and_tangent_come_in_one_pass_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    for name in ("forward", "jvp"):
        inner = getattr(TritonEngine, name)
        monkeypatch.setattr(TritonEngine, name, lambda *a, inner=inner, name=name: (passes.append(name), inner(*a))[1])
    x = torch.randn(1, 2, 6, 4)
    torch.func.jvp(lambda x: regard.attention(x, x, x, backend="triton"), (x,), (torch.ones_like(x),))
    assert passes == ["jvp"]


@pytest.mark.parametrize("moving", range(3))
def test_what_stands_still_has_no_part_in_the_tangent(moving: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 2, 9, 4).unbind()
    w = torch.randn(1, 2, 9, 4)

    def tangent(backend: str) -> Tensor:
        def of_one(t: Tensor) -> Tensor:
            given = [*x]
            given[moving] = t
            return regard.attention(*given, mask=regard.causal(), backend=backend)

        return torch.func.jvp(of_one, (x[moving],), (w,))[1]

    close([tangent("triton")], [tangent("chunked")])


def test_nothing_behind_a_mask_reaches_a_tangent() -> None:
    torch.manual_seed(0)
    q, k, v, w = torch.randn(4, 1, 2, 9, 4).unbind()
    k, v = k.clone(), v.clone()
    k[:, :, 6:] = torch.nan
    v[:, :, 6:] = torch.inf
    _, tangent = torch.func.jvp(
        lambda q, v: regard.attention(q, k, v, mask=regard.padding([6]), backend="triton"), (q, v), (w, w)
    )
    assert tangent.isfinite().all()
