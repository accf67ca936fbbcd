"""Attention of our kernels inside a compiled graph, as those who watch the graph see it."""

from __future__ import annotations

import torch
from torch import Tensor

import regard
from regard.models.graph_interceptor import GraphInterceptor
from regard.observation import Observation


def test_calls_of_our_kernels_in_a_graph_are_observed_as_eager_ones_are() -> None:
    query, key, value = torch.randn(3, 1, 2, 32, 16, generator=torch.Generator().manual_seed(0)).unbind()
    options = {"mask": regard.window(5), "sink": torch.tensor([0.3, -1.0]), "scale": 0.3}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, **options, backend="triton")

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    expected = compiled(query, key, value)
    found: list[Observation] = []
    with GraphInterceptor(found.append):
        output = compiled(query, key, value)
    assert torch.equal(output, expected)
    (seen,) = found
    eager = regard.observe(query, key, value, **options, backend="chunked")
    for name in ("entropy", "max_logit", "lse"):
        torch.testing.assert_close(getattr(seen, name), getattr(eager, name))
