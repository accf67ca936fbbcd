"""A mask's tensor that changes before the backward pass changes no gradient of our kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from changed_masks import holds_what_the_call_saw


def by(backend: str, **more: Any) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return regard.observe(q, k, v, mask=mask, backend=backend, **more).output

    return attend


@pytest.mark.parametrize("kind", ["a tensor per head", "lengths", "documents", "composed", "predicate"])
def test_the_first_derivative_is_that_of_the_mask_that_the_call_saw(kind: str) -> None:
    # The kernels have their own copy of the mask, as blocks or spans.
    assert not holds_what_the_call_saw(kind, by("triton"), 1, truth=by("reference"))


def test_no_second_derivative_is_that_of_another_mask() -> None:
    # With a sink, the double backward is that of the formula, which reads the mask itself.
    sink = {"sink": torch.zeros(2)}
    holds_what_the_call_saw("lengths", by("triton", **sink), 2, truth=by("reference", **sink))
