"""Derivatives of our kernels: of the second order by the formula, and under torch.compile the same as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import BY_NAME, Case, Shape, leaves
from regard import biases

TINY = Shape(batch=2, heads=2, kv_heads=1, n=5, m=7, d=4, dv=3)
LEARNT = {
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
}
TWICE = [Case(name, BY_NAME[name].make, TINY) for name in sorted(LEARNT | {"Additive"})]


def second(case: Case, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """First derivatives with a graph, and the derivatives of a number made of them."""
    tensors, kwargs = case.inputs(torch.float32)
    seen = regard.observe(*tensors, **kwargs, backend=backend)
    args = leaves(tensors, kwargs)
    loss = seen.output.sin().sum() + seen.lse.square().sum() + seen.entropy.square().sum()
    first = torch.autograd.grad(loss, args, create_graph=True)
    return list(first), list(torch.autograd.grad(sum(g.square().sum() for g in first), args))


@pytest.mark.parametrize("case", TWICE, ids=lambda c: c.name)
def test_second_derivatives_agree_with_chunked(case: Case) -> None:
    for found, true in zip(second(case, "triton"), second(case, "chunked"), strict=True):
        for x, t in zip(found, true, strict=True):
            torch.testing.assert_close(x, t, atol=2e-5, rtol=2e-4)


def test_a_graph_of_the_derivative_changes_only_rounding() -> None:
    tensors, kwargs = Case("sink", BY_NAME["sink"].make, TINY).inputs(torch.float32)
    output = regard.attention(*tensors, **kwargs, backend="triton").square().sum()
    kernels = torch.autograd.grad(output, leaves(tensors, kwargs), retain_graph=True)
    formula = torch.autograd.grad(output, leaves(tensors, kwargs), create_graph=True)
    for x, t in zip(kernels, formula, strict=True):
        torch.testing.assert_close(x, t, atol=1e-5, rtol=1e-4)


def test_dropout_drops_the_same_pairs_in_the_second_derivative() -> None:
    query, key, value = Case("plain", BY_NAME["plain"].make, TINY).inputs(torch.float32)[0]
    found = []
    for backend in ("triton", "chunked"):
        torch.manual_seed(4)
        output = regard.attention(query, key, value, dropout=0.4, backend=backend)
        (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (query, key, value)))
    for x, t in zip(*found, strict=True):
        torch.testing.assert_close(x, t, atol=1e-5, rtol=1e-4)


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


COMPILED: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Tensor, ...]]] = {
    "plain": (dict, ()),
    "causal": (lambda: {"mask": regard.causal()}, ()),
    "window": (lambda: {"mask": regard.window(3, 1)}, ()),
    "padding": (lambda lengths: {"mask": regard.padding(lengths)}, (torch.tensor([5, 0]),)),
    "sink": (lambda sink: {"sink": sink}, (torch.tensor([0.5, -1.0], requires_grad=True),)),
    "bias": (lambda bias: {"bias": bias}, (torch.linspace(-1, 1, 35).view(5, 7).clone().requires_grad_(),)),
    "softcap and scales": (
        lambda scale: {"softcap": 2.0, "scale": scale},
        (torch.tensor([0.5, -1.0], requires_grad=True),),
    ),
    "alibi": (lambda slopes: {"bias": biases.alibi(slopes)}, (torch.tensor([0.5, 1.0], requires_grad=True),)),
    "a score behind documents": (
        lambda ids: {"mask": regard.documents(ids[:5], ids), "score": regard.scores.Gaussian(1.5)},
        (torch.tensor([0, 1, 0, 2, 2, 1, 0]),),
    ),
    "dropout": (lambda: {"mask": regard.strided(2), "dropout": 0.5}, ()),
}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_call_is_one_graph_and_means_the_same(name: str) -> None:
    make, more = COMPILED[name]
    tensors = Case("plain", BY_NAME["plain"].make, TINY).inputs(torch.float32)[0]
    learnt = [*tensors, *(t for t in more if t.requires_grad)]

    def call(query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        return regard.attention(query, key, value, **make(*more), backend="triton")

    torch.manual_seed(0)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors, *more)
    torch.manual_seed(0)
    eager = call(*tensors, *more)
    assert torch.equal(found, eager)
    upstream = torch.linspace(-1, 1, eager.numel()).view(eager.shape)
    for x, t in zip(*(torch.autograd.grad(y, learnt, upstream) for y in (found, eager)), strict=True):
        assert torch.equal(x, t)


@pytest.mark.usefixtures("fresh")
def test_what_is_observed_compiles_too() -> None:
    tensors = Case("plain", BY_NAME["plain"].make, TINY).inputs(torch.float32)[0]

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        seen = regard.observe(query, key, value, mask=regard.causal(), backend="triton")
        return seen.output, seen.lse, seen.entropy, seen.max_logit

    found, eager = torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors), call(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    pulled = [
        torch.autograd.grad(o.sum() + lse.sin().sum() + h.square().sum(), tensors) for o, lse, h, _ in (found, eager)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*pulled, strict=True))
