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
