"""Where torch raises, we raise too, by an error of our own family; and the classes that the docs promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import errors


def x(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


SAME = (x(1, 2, 4, 8),) * 3
CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception] | None, type[Exception]]] = {
    "dims": (lambda f: f(x(1, 2, 4, 8), x(1, 2, 4, 6), x(1, 2, 4, 8)), RuntimeError, errors.ShapeError),
    "lengths": (lambda f: f(x(1, 2, 4, 8), x(1, 2, 4, 8), x(1, 2, 3, 8)), None, errors.ShapeError),
    "heads": (lambda f: f(x(1, 4, 4, 8), x(1, 3, 4, 8), x(1, 3, 4, 8)), RuntimeError, errors.ShapeError),
    "rank": (lambda f: f(x(8), x(8), x(8)), RuntimeError, errors.ShapeError),
    "dtypes": (lambda f: f(SAME[0], SAME[1].double(), SAME[2]), RuntimeError, errors.DtypeError),
    "integers": (lambda f: f(*(t.long() for t in SAME)), RuntimeError, errors.DtypeError),
    "no tensor": (lambda f: f([1.0], *SAME[1:]), TypeError, errors.DtypeError),
    "devices": (lambda f: f(SAME[0], x(1, 2, 4, 8, device="meta"), SAME[2]), RuntimeError, errors.DeviceError),
    "mask shape": (lambda f: f(*SAME, attn_mask=x(3, 4).bool()), RuntimeError, errors.MaskError),
    "dropout above 1": (lambda f: f(*SAME, dropout_p=1.5), RuntimeError, errors.ArgumentError),
    "dropout of 1": (lambda f: f(*SAME, dropout_p=1.0), None, errors.ArgumentError),
    "scale NaN": (lambda f: f(*SAME, scale=float("nan")), None, errors.ArgumentError),
}
MODULES: dict[str, tuple[Callable[[Any], Any], type[Exception], type[Exception]]] = {
    "embed_dim": (lambda m: m(7, 2), AssertionError, errors.ArgumentError),
    "dims": (lambda m: m(8, 2)(x(5, 2, 6), x(5, 2, 6), x(5, 2, 6)), AssertionError, errors.ShapeError),
    "lengths": (lambda m: m(8, 2)(x(5, 2, 8), x(5, 2, 8), x(4, 2, 8)), AssertionError, errors.ShapeError),
    "attn_mask": (lambda m: m(8, 2)(*(x(5, 2, 8),) * 3, attn_mask=x(4, 4).bool()), RuntimeError, errors.MaskError),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_mistake_has_the_class_that_the_reference_lists(name: str) -> None:
    call, theirs, ours = CALLS[name]
    if theirs is not None:
        with pytest.raises(theirs):
            call(F.scaled_dot_product_attention)
    with pytest.raises(ours) as found:
        call(regard.scaled_dot_product_attention)
    assert isinstance(found.value, errors.RegardError)


@pytest.mark.parametrize("name", MODULES)
def test_each_mistake_with_the_module_has_it_too(name: str) -> None:
    call, theirs, ours = MODULES[name]
    with pytest.raises(theirs):
        call(torch.nn.MultiheadAttention)
    with pytest.raises(ours):
        call(regard.nn.MultiheadAttention)
