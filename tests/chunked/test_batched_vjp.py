"""The backward pass over batches of equal tiles."""

from __future__ import annotations

import pytest
import torch

import regard
from attention_inputs import gradients
from batched_cases import MASKS, N


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_batches_give_the_gradients_of_the_formula(name: str, observed: bool) -> None:
    q = torch.randn(2, 4, N, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, N, 8, dtype=torch.float64) for _ in range(2))
    results = []
    for backend in (regard.backends.Chunked(chunk_size=64), "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        seen = regard.observe(*leaves, mask=MASKS[name](), softcap=3.0 if observed else None, backend=backend)
        loss = seen.output.square().sum()
        if observed:
            loss = loss + (seen.entropy * torch.where(seen.lse > -torch.inf, seen.lse, 0.0)).sum()
        results.append(gradients(loss, leaves))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
