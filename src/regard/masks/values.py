"""The values that masks hold, numbers and tensors: whether two are equal, a hash, and how they are printed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

__all__ = ["digest", "same_value", "shown_value"]


def same_value(a: object, b: object) -> bool:
    """Whether two values are equal; tensors are compared number by number."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and bool((a.cpu() == b.cpu()).all()))  # of 32 or 64 bits
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def digest(value: Any) -> Hashable:
    """The same for equal values; from a tensor's shape, its sum and its first numbers."""
    if isinstance(value, Tensor):
        flat = value.detach().flatten()
        return tuple(value.shape), int(flat.sum()), tuple(flat[:64].tolist())
    return hash(value)


def shown_value(value: object) -> str:
    """A value as a mask prints it: short tensors as lists, long ones in part, large ones by dtype and shape."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_meta or (value.dim() > 1 and not 0 < value.numel() <= 16):
        return f"<{str(value.dtype).removeprefix('torch.')} {'×'.join(map(str, value.shape))}>"
    if value.numel() > 16:
        return f"[{', '.join(map(str, value[:3].tolist()))}, ..., {value[-1].item()}]"
    return repr(value.tolist())
