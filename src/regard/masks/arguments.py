"""Arguments of the mask functions, checked for type, dtype and shape; the values of tensors are never read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard.errors import ArgumentError, DtypeError, MaskError

__all__ = ["Integers", "integers", "offset_like", "one_or_per_item", "tensor_like", "whole"]

Integers: TypeAlias = Tensor | Sequence[int]


def whole(who: str, name: str, value: object, least: int | None = None) -> int:
    """Read one integer."""
    rule = f"{who}: {name} must be an integer" + (f" of at least {least}" if least is not None else "")
    if isinstance(value, (bool, Tensor)):
        raise DtypeError(f"{rule}; got {_kind(value)}. Pass a plain Python int.")
    try:
        number = value if isinstance(value, int) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise DtypeError(f"{rule}; got {_kind(value)}. Pass a plain Python int.") from None
    if least is not None and number < least:
        raise ArgumentError(f"{rule}; got {number}.")
    return number


def one_or_per_item(who: str, name: str, value: object, least: int | None = None) -> int | Tensor:
    """Read an integer, or integers with one entry per batch item."""
    if isinstance(value, (Tensor, list, tuple)):
        found = integers(who, name, value, dims=(0, 1), least=least)
        return found.reshape(1) if found.dim() == 0 else found
    return whole(who, name, value, least)


def offset_like(who: str, value: object) -> int | Tensor | None:
    """Read an offset: `None`, an integer, or integers with one entry per batch item."""
    return None if value is None else one_or_per_item(who, "offset", value)


def integers(who: str, name: str, value: object, dims: tuple[int, ...] = (1,), least: int | None = None) -> Tensor:
    """Read a tensor or a (nested) list of integers."""
    found = tensor_like(who, name, value)
    if found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        raise MaskError(
            f"{who}: {name} must hold integers; got {found.dtype}. Convert with .long() if that is intended."
        )
    if found.dim() not in dims:
        allowed = " or ".join(f"{d}-D" for d in dims)
        raise MaskError(f"{who}: {name} must be {allowed}; got shape {tuple(found.shape)}.")
    if least is not None and isinstance(value, list | tuple) and any(isinstance(x, int) and x < least for x in value):
        raise ArgumentError(f"{who}: {name} must be at least {least}; got {min(value)}.")
    return found.to(torch.int64)


def tensor_like(who: str, name: str, value: Any) -> Tensor:
    """Read a tensor, or convert a (nested) list to one; an empty list holds integers."""
    if isinstance(value, Tensor):
        return value
    try:
        found = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(
            f"{who}: {name} must be a tensor or a list that can be converted to one; got {_kind(value)}."
        ) from None
    return found.to(torch.int64) if found.numel() == 0 and not isinstance(value, Tensor) else found


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    shown = repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(value).__name__})"
