"""The survey of a call's weights on a GPU, by the chip's own kernels and the portable ones, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from gpu.test_kernels_on_gpu import DEVICE, inputs, pytestmark, same_bits  # noqa: F401

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": regard.causal()},
    "window": {"mask": regard.window(100, 7)},
    "padding": {"mask": regard.padding(torch.tensor([300, 650]))},
    "strided": {"mask": regard.strided(3)},
    "softcap": {"mask": regard.causal(), "softcap": 5.0},
    "sink": {"mask": regard.causal(), "sink": torch.linspace(-1, 1, 4)},
    "alibi": {"bias": regard.biases.alibi(torch.linspace(0.1, 0.5, 4))},
}


def moved(x: Any) -> Any:
    if isinstance(x, regard.biases.Alibi):
        return regard.biases.alibi(x.tensors[0].to(DEVICE))
    return x.to(DEVICE) if isinstance(x, torch.Tensor | regard.Mask) else x


@pytest.mark.parametrize("grid", [(64, 64), (9, 50)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", CALLS)
def test_a_survey_is_that_of_float64(name: str, d: int, dtype: torch.dtype, grid: tuple[int, int]) -> None:
    options = {key: moved(x) for key, x in CALLS[name].items()}
    x = [t.detach() for t in inputs(700, 700, d, dtype=dtype)]
    found, again = (regard.observe(*x, **options, backend="triton").survey(*grid) for _ in range(2))
    assert same_bits(list(found), list(again))
    double = {key: t.double() if isinstance(t, torch.Tensor) else t for key, t in options.items()}
    true = regard.observe(*(t.double() for t in x), **double, backend="chunked").survey(*grid)
    for field, a, b in zip(found._fields, found, true, strict=True):
        if b is None:  # what kernels alone leave
            continue
        if field == "key":
            assert (a != b).double().mean() < 0.01  # the two largest weights may be equal but for rounding
        else:
            torch.testing.assert_close(
                a.double(), b.double(), atol=2e-3, rtol=2e-2, msg=lambda text, f=field: f"{f}: {text}"
            )
