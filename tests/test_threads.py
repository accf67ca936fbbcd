"""Several threads at once get what one gets alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import regard
from attention_inputs import every_backend, gradients, inputs


@every_backend
def test_several_threads_at_once_get_what_one_gets_alone(backend: str) -> None:
    jobs = [inputs(1, 2, n=40 + i, m=50 + i, seed=i) for i in range(12)]

    def work(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        found = regard.attention(*leaves, mask=regard.causal(), backend=backend)
        seen = regard.observe(*tensors, mask=regard.window(7))
        return [found.detach(), *gradients(found, leaves), seen.entropy, seen.received, *seen.top(3)]

    alone = [work(job) for job in jobs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(work, jobs))
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)
