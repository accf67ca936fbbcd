"""First gradients, whatever the backend: which come, from which graph, and what they must be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from attention_inputs import every_backend, gradients, inputs, our_backends


@every_backend
def test_a_graph_can_be_walked_twice(backend: str) -> None:
    leaves = inputs(grad=True)
    found = regard.attention(*leaves, mask=regard.causal(), backend=backend).square().sum()
    first = torch.autograd.grad(found, leaves, retain_graph=True)
    second = torch.autograd.grad(found, leaves)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(found, leaves)


@every_backend
@pytest.mark.parametrize(
    "needing", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_the_gradients_that_are_needed_are_given(backend: str, needing: tuple[bool, ...]) -> None:
    tensors = [x.requires_grad_(need) for x, need in zip(inputs(), needing, strict=True)]
    regard.attention(*tensors, mask=regard.causal(), backend=backend).square().sum().backward()
    twin = inputs(grad=True)
    regard.attention(*twin, mask=regard.causal(), backend="reference").square().sum().backward()
    for x, y, need in zip(tensors, twin, needing, strict=True):
        if need:
            torch.testing.assert_close(x.grad, y.grad)
        else:
            assert x.grad is None


@every_backend
def test_gradients_pass_through_to_what_the_inputs_were_made_of(backend: str) -> None:
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    weight = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()

    def layer(backend: str) -> list[Tensor]:
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 4)).transpose(1, 2) for w in weight)
        return gradients(regard.attention(q, k, v, mask=regard.causal(), backend=backend).transpose(1, 2), [x, weight])

    for a, b in zip(layer(backend), layer("reference"), strict=True):
        torch.testing.assert_close(a, b)


@every_backend
def test_one_tensor_may_be_query_key_and_value(backend: str) -> None:
    x = inputs(n=7, dtype=torch.float64, grad=True)[0]
    found = gradients(regard.attention(x, x, x, backend=backend), [x])[0]
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    expected = sum(gradients(regard.attention(*parts, backend="reference"), parts))
    torch.testing.assert_close(found, expected)


@our_backends
def test_the_loss_may_use_statistics_only(backend: str) -> None:
    query, key, value = inputs(grad=True)
    regard.observe(query, key, value, backend=backend).entropy.sum().backward()
    assert query.grad.any()
    assert key.grad.any()
    assert value.grad is None or not value.grad.any()


def test_the_gradient_of_lse_is_the_mean_key() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 7, 4, dtype=torch.float64).unbind()
    q.requires_grad_()
    seen = regard.observe(q, k, v, scale=0.7)
    (found,) = torch.autograd.grad(seen.lse.sum(), q)
    torch.testing.assert_close(found, 0.7 * seen.weights() @ k)


def test_the_future_gets_no_gradient() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 600, 8, requires_grad=True) for _ in range(3))
    for backend in ("reference", "chunked", "sdpa"):
        output = regard.attention(q, k, v, mask=regard.causal(), backend=backend)
        grads = torch.autograd.grad(output[:, :, :300].square().sum(), (k, v))
        assert all(g[:, :, :300].abs().sum() > 0 and not g[:, :, 300:].any() for g in grads)
