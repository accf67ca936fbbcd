"""Arguments of the mask functions, checked for type, dtype and shape; values are read only of float masks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard.compat.torch import causal_bias, check_when_run, is_capturing, is_readable, is_traced, lacks_values
from regard.errors import ArgumentError, DtypeError, MaskError

__all__ = [
    "Integers",
    "check_readable",
    "integers",
    "offset_like",
    "one_or_per_item",
    "selecting",
    "tensor_like",
    "textbook_mask",
    "whole",
]

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


def integers(
    who: str,
    name: str,
    value: object,
    dims: tuple[int, ...] = (1,),
    least: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.int64,),
) -> Tensor:
    """Read a tensor or a (nested) list of integers; a tensor of one of the dtypes stays as it is."""
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
    return found if found.dtype in dtypes else found.to(torch.int64)


def tensor_like(who: str, name: str, value: Any) -> Tensor:
    """Read a tensor, or convert a (nested) list to one; an empty list holds integers."""
    if isinstance(value, Tensor):
        check_readable(who, name, value)
        return value
    try:
        found = torch.tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(
            f"{who}: {name} must be a tensor or a list that can be converted to one; got {_kind(value)}."
        ) from None
    return found.to(torch.int64) if found.numel() == 0 and not isinstance(value, Tensor) else found


def check_readable(who: str, name: str, value: Tensor) -> None:
    """Raise for a tensor whose values cannot be read as they are: another layout, or a subclass with a meaning."""
    if not is_readable(value):
        raise DtypeError(
            f"{who}: {name} must be a plain tensor. Got a {type(value).__name__}, a subclass with a meaning of its own "
            f"that regard cannot read; convert it to a torch.Tensor first."
        )
    if value.layout != torch.strided or value.is_nested:
        raise DtypeError(
            f"{who}: {name} must be a dense tensor. Got the layout {'nested' if value.is_nested else value.layout}; "
            f"convert it with .to_dense(), or .to_padded_tensor(0) if it is nested."
        )


def selecting(who: str, name: str, mask: Tensor, zeros_hide: bool = False) -> Tensor:
    """Read a tensor as a mask: bool as it is, integers by `!= 0`, floats if all are 0 or 1.

    Floats that are all 0 hide everything if `zeros_hide`; otherwise they are refused, since they may be additive.
    """
    check_readable(who, name, mask)
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype.is_complex:
        raise DtypeError(f"{who}: {name} must be bool, integers, or floats that are 0 or 1. Got {_dtype(mask)}.")
    if not mask.dtype.is_floating_point:
        return mask != 0
    remedy = (
        "bias= adds to the logits, mask= selects: pass an additive mask as bias=, and a selecting one as mask != 0."
    )
    hidden = mask == 0
    wrong = f"{who}: a float {name} must be 0 and 1 alone. Got other values in {_dtype(mask)}. {remedy}"
    traced = is_traced() or lacks_values(mask)
    if traced or torch.compiler.is_compiling() or (mask.is_cuda and is_capturing()):
        if traced or not zeros_hide:
            raise MaskError(
                f"{who}: a float {name} is refused under torch.compile and graph capture, where its values cannot be "
                f"checked. Got {_dtype(mask)}. {remedy}"
            )
        check_when_run((hidden | (mask == 1)).all(), wrong)
        return ~hidden
    if not zeros_hide and mask.numel() and bool(hidden.all()):
        raise MaskError(f"{who}: a float {name} of zeros alone hides everything or adds nothing. {remedy}")
    if not bool((hidden | (mask == 1)).all()):
        raise MaskError(wrong)
    return ~hidden


def textbook_mask(who: str, mask: Any) -> Any:
    """Read a float tensor as textbooks do, where 0 always means hidden; every other argument stays as it is."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point() or causal_bias(mask) is not None:
        return mask
    return selecting(who, "mask", mask, zeros_hide=True)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    shown = repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(value).__name__})"
