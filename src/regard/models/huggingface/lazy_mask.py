"""The mask that Hugging Face models pass from layer to layer: a regard mask in place of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...masks import Mask

__all__ = ["LazyMask"]


class LazyMask:
    """A regard mask in place of the bool tensor (batch, 1, rows, keys), which is built only if a model needs it.

    Most models pass their mask on unread, and attention uses `mask`. A few slice it, combine it with another or read
    its dtype: they get what the tensor would give. Models that compute attention themselves add it to their logits:
    they get 0 where a pair is allowed and the lowest number where it is not.

    >>> import regard
    >>> lazy = LazyMask(regard.causal(), batch=2, rows=3, keys=3, device="cpu")
    >>> lazy.shape, lazy.mask
    (torch.Size([2, 1, 3, 3]), causal())
    >>> lazy[0, 0]
    tensor([[ True, False, False],
            [ True,  True, False],
            [ True,  True,  True]])
    """

    dtype = torch.bool
    ndim = 4

    def __init__(self, mask: Mask, batch: int, rows: int, keys: int, device: torch.device | str) -> None:
        self.mask = mask
        self.shape = torch.Size((batch, 1, rows, keys))
        self.device = torch.device(device)

    @cached_property
    def tensor(self) -> Tensor:
        """The mask in full, (batch, 1, rows, keys)."""
        batch, _, rows, keys = self.shape
        return self.mask.bind(batch, 1).dense(rows, keys, self.device).expand(batch, 1, rows, keys)

    def additive(self, dtype: torch.dtype) -> Tensor:
        """The bias that hides the same pairs when added to logits: 0, or the lowest number."""
        return torch.zeros_like(self.tensor, dtype=dtype).masked_fill_(~self.tensor, torch.finfo(dtype).min)

    def dim(self) -> int:
        """Four, like the tensor."""
        return self.ndim

    def contiguous(self) -> LazyMask:
        """Itself: there is no memory to lay out."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> LazyMask | Tensor:
        """Move it to a device; any other conversion gives a tensor."""
        target = args[0] if len(args) == 1 else kwargs.get("device")
        if not isinstance(target, torch.device | str) or "dtype" in kwargs:
            return self.tensor.to(*args, **kwargs)
        batch, _, rows, keys = self.shape
        return LazyMask(self.mask.to(target), batch, rows, keys, target)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, and neither has a tensor")
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _ADDITIONS and len(args) == 2:
            first, second = args
            return function(_as_summand(first, second), _as_summand(second, first), **(kwargs or {}))
        return function(*_as_tensors(args), **_as_tensors(kwargs or {}))

    def __and__(self, other: Tensor) -> Tensor:
        return self.tensor & other

    def __or__(self, other: Tensor) -> Tensor:
        return self.tensor | other

    def __invert__(self) -> Tensor:
        return ~self.tensor

    def __add__(self, other: Tensor) -> Tensor:
        return torch.add(_as_summand(self, other), other)

    def __repr__(self) -> str:
        return f"LazyMask({self.mask!r}, {tuple(self.shape)})"


_ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)


def _as_summand(given: Any, other: Any) -> Any:
    """What to add to `other`: a bias if `other` is a tensor of logits."""
    if not isinstance(given, LazyMask):
        return given
    return given.additive(other.dtype) if isinstance(other, Tensor) and other.is_floating_point() else given.tensor


def _as_tensors(given: Any) -> Any:
    if isinstance(given, LazyMask):
        return given.tensor
    if isinstance(given, dict):
        return {name: _as_tensors(value) for name, value in given.items()}
    return type(given)(map(_as_tensors, given)) if isinstance(given, tuple | list) else given
