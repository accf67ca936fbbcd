"""Calls on a GPU like an earlier one: what was checked and decided then is looked up, and not found again.

Checks, the choice of a backend and the preparation of its engine depend on shapes, strides, dtypes, a few numbers, the
mask and torch's modes. These make a key, and a call with the key of an accepted one is accepted too. A call that would
be refused never has such a key, and takes the whole road to its error.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.torch import operations_are_plain, sdpa_switches, version_of
from ..core.problem import Problem
from ..kernels.block_mask import traceable
from ..masks import Mask
from ..masks.causal import Causal
from ..masks.everything import Everything
from .base import Backend, Prepared

__all__ = ["Given", "Remembered", "key_of", "recall", "remember"]

Given = tuple[Tensor, Tensor, Tensor, Any]  # query, key, value and mask, as the caller gave them

_SIZE = 512
_CALLS: dict[object, Remembered] = {}


class Remembered(NamedTuple):
    """A call without its tensors, the backend that took it, and what that prepared."""

    backend: Backend
    attend: Prepared
    scale: float
    softcap: float | None
    lead: tuple[int, ...]

    def problem(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, sink: Tensor | None) -> Problem:
        """The problem of an observed call with the same key."""
        sink = None if sink is None else sink.expand(query.shape[1])
        softcap, lead = self.softcap, self.lead
        return Problem(query, key, value, mask, None, None, self.scale, softcap, sink, 0.0, lead, True, "observe")


class _ByValue:
    """A mask as part of a key, with its hash computed once."""

    __slots__ = ("hash", "mask")

    def __init__(self, mask: Mask) -> None:
        self.mask, self.hash = mask, hash(mask)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and self.hash == other.hash and self.mask == other.mask


def _mask_key(mask: Mask, n: int, m: int) -> object:
    """Equal for equal masks without tensors, and for intervals that differ by the values of their tensors alone.

    For others, it stands for this mask while its tensors are known not to change. None needs the whole road.
    """
    memory = mask.__dict__.setdefault("_memory", {})
    known = memory.get("key")
    if known is None:
        name = _ByValue(mask) if mask.constant else _structure(mask) if traceable(mask) else None
        known = memory["key"] = name, mask.sources
        if name is None:  # many such masks are made for one call; this one counts from its second call on
            memory["key"] = object(), mask.sources
            return None
    name, tensors = known
    if not tensors:
        return name
    versions = [version_of(t) for t in tensors]
    if -1 in versions:  # of inference mode
        return None
    if not isinstance(name, tuple):
        return name, *versions
    if memory.get("fits") != (n, m, versions):
        if mask.misfit(n, m) is not None:
            return None
        memory["fits"] = (n, m, versions)
    return name


def _structure(mask: Mask) -> tuple[object, ...]:
    """A mask without the values of its tensors."""
    made: list[object] = [type(mask)]
    for field in fields(mask):
        part = getattr(mask, field.name)
        if isinstance(part, Tensor):
            made += [part.shape, part.dtype, part.device]
        else:
            made.append(_structure(part) if isinstance(part, Mask) else part)
    return tuple(made)


def key_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    scale: object,
    softcap: object,
    sink: object,
    backend: object,
    observed: bool,
) -> tuple[object, ...] | None:
    """The key of a call whose query is on a GPU; None where torch's modes, or parts of it, need the whole road."""
    if (
        torch.compiler.is_compiling()
        or not type(query) is type(key) is type(value) is Tensor
        or type(backend) is not str
        or not operations_are_plain()
    ):
        return None
    made: tuple[object, ...] = (
        backend,
        observed,
        query.shape,
        query.is_contiguous() or query.stride(),
        key.shape,
        key.is_contiguous() or key.stride(),
        value.shape,
        value.is_contiguous() or value.stride(),
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        torch.is_grad_enabled() and (query.requires_grad, key.requires_grad, value.requires_grad),
        torch.are_deterministic_algorithms_enabled(),
    )
    if mask is not None:
        if not isinstance(mask, Mask) or (mask_key := _mask_key(mask, query.shape[-2], key.shape[-2])) is None:
            return None
        made += (mask_key,)
    if scale is not None or softcap is not None or sink is not None:
        numbers = (scale is None or type(scale) is float) and (softcap is None or type(softcap) is float)
        if not numbers or not (sink is None or type(sink) is Tensor or type(sink) is torch.nn.Parameter):
            return None
        made += (scale, softcap)
        if isinstance(sink, Tensor):
            made += (sink.shape, sink.stride(), sink.dtype, sink.device, sink.requires_grad)
    by_torch = not observed and (mask is None or isinstance(mask, Causal | Everything))
    return (*made, sdpa_switches()) if by_torch else made


def recall(key: tuple[object, ...]) -> Remembered | None:
    """The call that is remembered by this key."""
    return _CALLS.get(key)


def remember(key: tuple[object, ...], given: Given, p: Problem, backend: Backend) -> Remembered | None:
    """Remember an accepted call, if it is computed as it was given and the backend can prepare for more of it."""
    same = all(x is y for x, y in zip(given, (p.query, p.key, p.value, p.mask), strict=True))
    if not same or isinstance(p.scale, Tensor) or (prepared := backend.prepare(p)) is None:
        return None
    if len(_CALLS) >= _SIZE:
        for oldest in list(_CALLS)[:1]:  # a list, since other threads may change it meanwhile
            _CALLS.pop(oldest, None)
    found = _CALLS[key] = Remembered(backend, prepared, p.scale, p.softcap, p.lead)
    return found
