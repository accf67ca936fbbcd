"""Which scales `Scaled` accepts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.errors import ArgumentError, DtypeError, ShapeError
from regard.scores import Scaled


def test_a_parameter_is_registered_and_a_plain_tensor_is_a_buffer() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert list(Scaled(parameter).parameters()) == [parameter]
    assert not list(Scaled(torch.ones(3)).parameters())
    assert list(Scaled(torch.ones(3)).state_dict()) == ["scale"]
    assert not Scaled(0.5).state_dict()


def test_a_computed_scale_passes_its_gradient_on() -> None:
    source = torch.tensor(0.5, requires_grad=True)
    Scaled(source * 2)(torch.ones(1, 4), torch.ones(2, 4)).sum().backward()
    assert source.grad is not None
    assert source.grad.item() == 16.0


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (torch.ones(2, 2), ShapeError),
        (torch.ones(0), ArgumentError),
        (torch.arange(2), DtypeError),
        (float("nan"), ArgumentError),
        (float("inf"), ArgumentError),
        ("1", DtypeError),
        (True, DtypeError),
    ],
)
def test_an_invalid_scale_is_refused(scale: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="Scaled: scale must"):
        Scaled(scale)  # type: ignore[arg-type]
