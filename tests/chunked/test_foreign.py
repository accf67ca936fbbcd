"""Kernels of others: their own first derivative, the formula's second, and nothing held longer than torch holds it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import regard
from regard.chunked.foreign import AttentionFormula, ForeignKernel
from regard.compat.torch import call_function

MEANING = AttentionFormula(regard.causal(), None, 8**-0.5)


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def foreign(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output: Tensor = call_function(ForeignKernel, MEANING, kernel, q, k, v)
    return output


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attention(q, k, v, mask=regard.causal(), backend="reference")


def made(wanted: tuple[bool, ...] = (True, True, True)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 3, 16, 8, generator=generator).requires_grad_(grad) for grad in wanted]


@pytest.mark.parametrize(
    "wanted", [(True, True, True), (True, False, False), (False, True, True), (False, False, True)]
)
def test_first_derivatives_are_the_kernels_own(wanted: tuple[bool, ...]) -> None:
    ours, theirs = made(wanted), made(wanted)
    for function, tensors in ((foreign, ours), (kernel, theirs)):
        function(*tensors).square().sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        assert (x.grad is None) == (y.grad is None)
        if x.grad is not None and y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)


def test_second_derivatives_are_the_formulas() -> None:
    def twice(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        tensors = made()
        first = torch.autograd.grad(function(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), tensors)

    for x, y in zip(twice(foreign), twice(reference), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_a_kept_graph_gives_the_same_again_and_one_that_is_not_kept_says_so() -> None:
    tensors = made()
    loss = foreign(*tensors).square().sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("changed", ["key", "output"])
def test_a_tensor_changed_in_place_is_noticed(changed: str) -> None:
    tensors = made()
    output = foreign(*tensors)
    with torch.no_grad():
        (tensors[1] if changed == "key" else output).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def alive(*tensors: Tensor) -> Callable[[], list[bool]]:
    storages = [weakref.ref(x.untyped_storage()) for x in tensors]

    def asked() -> list[bool]:
        gc.collect()
        return [storage() is not None for storage in storages]

    return asked


@pytest.mark.parametrize("function", [foreign, kernel])
def test_the_backward_frees_what_the_forward_kept(function: Callable[..., Tensor]) -> None:
    tensors = [x * 1 for x in made()]
    output = function(*tensors)
    still = alive(*tensors, output)
    loss = (output * 1).sum()
    del tensors, output
    assert still() == [True] * 4
    loss.backward()
    assert still() == [False] * 4


def test_checkpoints_and_moves_of_what_is_kept_work_as_for_torchs_own() -> None:
    inner: list[Callable[[], list[bool]]] = []

    def block(x: Tensor) -> Tensor:
        tensors = [x * factor for factor in (1.0, 2.0, 3.0)]
        output = foreign(*tensors)
        inner.append(alive(*tensors, output))
        return output * 2

    x = made()[0]
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    result = checkpoint(block, x, use_reentrant=False)
    assert inner[1]() == [False] * 4
    (found,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with save_on_cpu():
        result = block(x)
    (found,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
