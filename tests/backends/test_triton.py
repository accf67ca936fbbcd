"""The backend `triton`: what it refuses, and why."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import regard
from contract_cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_our_kernels_refuse_tensors_that_are_on_no_gpu(case: Case) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    reason = "the tensors are on cpu; it needs a GPU" if find_spec("triton") else "triton is not installed"
    with pytest.raises(regard.errors.BackendError, match=f"'triton' refuses: {reason}"):
        regard.attention(*tensors, **kwargs, backend="triton")


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_a_remembered_call_takes_the_shortcuts_of_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.backends import triton
    from regard.core.validation import pose

    query, key, value = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    taken: list[str] = []

    class Taken(triton.Shortcuts):
        def __init__(self) -> None:
            self.forward = lambda *_: taken.append("forward") or (torch.zeros(1, 2, 8, 4), torch.zeros(3, 1, 2, 8))
            self.backward = lambda q, k, v, *_: taken.append("backward") or (q * 2, k * 3, v * 4)

    monkeypatch.setattr(triton, "Shortcuts", Taken)
    run = triton.Triton().prepare(pose(query, key, value))
    assert run is not None
    run(query, key, value, None, None, None).sum().backward()
    assert taken == ["forward", "backward"]
    assert query.grad is not None
    assert torch.equal(query.grad, query * 2)
