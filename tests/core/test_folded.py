"""Folding: heads grouped with their masks and biases, and the sink applied to finished rows."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import biases


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("kv", [1, 2, 3, 6])
def test_a_mask_and_a_bias_per_head_follow_the_heads_whatever_the_groups(backend: str, kv: int) -> None:
    q, k, v = torch.randn(2, 6, 9, 8), torch.randn(2, kv, 11, 8), torch.randn(2, kv, 11, 8)
    mask, bias = torch.rand(6, 9, 11) > 0.3, torch.randn(6, 9, 11)
    alibi = biases.alibi(torch.rand(6))
    for more, own in (
        ({"mask": mask}, lambda h: {"mask": mask[h]}),
        ({"bias": bias}, lambda h: {"bias": bias[h]}),
        ({"bias": alibi}, lambda h: {"bias": biases.alibi(alibi.slopes[h : h + 1])}),
        (
            {"mask": regard.predicate(lambda b, h, i, j: (i + j + h) % 3 > 0)},
            lambda h: {"mask": regard.predicate(lambda b, g, i, j: (i + j + h) % 3 > 0)},
        ),
    ):
        found = regard.attention(q, k, v, backend=backend, **more)
        for h in range(6):
            g = h // (6 // kv)
            one = regard.attention(q[:, h : h + 1], k[:, g : g + 1], v[:, g : g + 1], backend=backend, **own(h))
            torch.testing.assert_close(found[:, h : h + 1], one)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_sink_serves_all_heads_and_gets_the_sum_of_their_gradients(backend: str, shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    one = torch.full(shape, 0.5, requires_grad=True)
    each = torch.full((4,), 0.5, requires_grad=True)
    a = regard.attention(q, k, v, sink=one, backend=backend)
    b = regard.attention(q, k, v, sink=each, backend=backend)
    torch.testing.assert_close(a, b)
    (ga,), (gb,) = torch.autograd.grad(a.sin().sum(), one), torch.autograd.grad(b.sin().sum(), each)
    torch.testing.assert_close(ga.sum(), gb.sum())
