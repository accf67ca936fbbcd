"""Calls on a GPU like an earlier one: what was checked and decided then is looked up, and not found again.

Checks, the choice of a backend and the preparation of its engine depend on shapes, strides, dtypes, a few numbers, the
mask, the kind of a structured bias, what a function of the scores captures, and torch's modes. These make a key, and a
call with the key of an accepted one is accepted too. A call that would be refused never has such a key, and takes the
whole road to its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..biases import Alibi, Relative
from ..compat.torch import call_modes, is_capturing, likeness, operations_are_plain, versions_of
from ..core.problem import Problem
from ..kernels.block_mask import on_device, traceable
from ..kernels.known_form import Size, kept_form
from ..masks import Mask
from ..masks.base import And
from ..masks.causal import Causal
from ..masks.documents import Documents
from ..masks.everything import Everything
from ..scores import Pointwise, Scaled
from .base import Backend, Prepared, PreparedSurvey

__all__ = ["Given", "Key", "Remembered", "key_of", "recall", "remember"]

Given = tuple[Tensor, Tensor, Tensor, Any]  # query, key, value and mask, as the caller gave them

_SIZE = 512
_VARIANTS = 8  # calls that differ by dtypes, strides, devices or derivatives alone
_CALLS: dict[object, tuple[tuple[Callable[..., bool], Remembered], ...]] = {}
_VALUES: dict[Mask, object] = {}


class Key(NamedTuple):
    """What calls are compared by, and the bias of this one."""

    values: tuple[object, ...]
    tensors: tuple[Tensor, ...]  # each once; compared by all but their values
    bias: Alibi | Relative | None = None  # given, or what the call's function of the scores is


class Remembered(NamedTuple):
    """A call without its tensors, the backend that took it, and what that prepared."""

    backend: Backend
    attend: Prepared
    scale: float
    softcap: float | None
    lead: tuple[int, ...]
    by_lengths: bool  # whether its weights depend on lengths, queries and keys, and on no other tensor but a sink
    survey: PreparedSurvey | None = None  # of an observed call

    def problem(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, sink: Tensor | None, bias: Any, score: Any
    ) -> Problem:
        """The problem of an observed call with the same key."""
        sink = None if sink is None else sink.expand(query.shape[1])
        mask = None if mask is None else on_device(mask, query.device)
        softcap, lead = self.softcap, self.lead
        return Problem(query, key, value, mask, bias, score, self.scale, softcap, sink, 0.0, lead, True, "observe")


@lru_cache(maxsize=_SIZE)
def _kind_of(kind: type) -> tuple[bool, bool]:
    """Whether a class is one of masks, and whether torch's kernels may take such a mask."""
    return issubclass(kind, Mask), issubclass(kind, Causal | Everything)


def _by_value(mask: Mask) -> object:
    """One object for all equal masks, which a dict finds sooner than the mask itself."""
    if len(_VALUES) >= _SIZE:
        _VALUES.clear()  # an equal mask gets another object then, and its calls are prepared again
    return _VALUES.setdefault(mask, object())


def _mask_key(mask: Mask, n: int, m: int) -> object:
    """Equal for equal masks without tensors, and for intervals that differ by the values of their tensors alone.

    For others, it stands for this mask while its tensors are known not to change. None needs the whole road.
    """
    memory = mask.__dict__.setdefault("_memory", {})
    known = memory.get("key")
    is_new = known is None
    if known is None:
        name = _by_value(mask) if mask.constant else _structure(mask)
        known = memory["key"] = name, mask.sources if name is None else mask.tensors
        if name is None:  # many such masks are made for one call; this one counts from its second call on
            memory["key"] = object(), mask.sources
            return None
    name, tensors = known
    if not tensors:
        return name
    versions = versions_of(tensors)
    if -1 in versions:  # of inference mode
        return None
    if not isinstance(name, tuple):
        return name, *versions
    if memory.get("fits") != (n, m, versions):
        if mask.misfit(n, m) is not None or not (is_new or _is_interval(mask)):
            return None
        memory["fits"] = (n, m, versions)
    return name


def _structure(mask: Mask) -> tuple[object, ...] | None:
    """A mask without the values of its tensors, if it is an interval per row whatever they are, or has sorted ids."""
    if type(mask) is And:
        left = _structure(mask.left)
        right = None if left is None else _structure(mask.right)
        return None if right is None else (And, left, right)
    if not _is_interval(mask):
        return None
    made: list[object] = [type(mask)]
    for name in _fields_of(type(mask)):
        part = getattr(mask, name)
        if isinstance(part, Tensor):
            made += [part.shape, part.dtype, part.device]
        else:
            made.append(part)
    return tuple(made)


def _is_interval(mask: Mask) -> bool:
    if type(mask) is And:
        return _is_interval(mask.left) and _is_interval(mask.right)
    return traceable(mask) or (type(mask) is Documents and not is_capturing() and mask.is_sorted())


@lru_cache(maxsize=_SIZE)
def _fields_of(kind: type[Mask]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


class _Added(NamedTuple):
    """The bias of a call, or that which its score is, and what else of the two is compared by value."""

    bias: Alibi | Relative | None
    values: tuple[object, ...]


def _added(query: Tensor, key: Tensor, bias: object, score: object) -> _Added | None:
    """What is added by a structured bias, or by a function of the scores that is one or a cap; None for all others.

    Only the whole road finds what a function is, in a call that was accepted.
    """
    values: tuple[object, ...] = ()
    if score is not None:
        if type(score) is not Pointwise or type(score.base) is not Scaled or isinstance(score.base.scale, Tensor):
            return None
        if query.dim() != 4 or key.dim() != 4 or is_capturing():  # a graph finds the form anew at each replay
            return None
        kept = kept_form(score, Size(query.shape[1], query.shape[2], key.shape[2], query.device))
        if kept is None or (bias is not None and kept.form.bias is not None):
            return None
        values = kept.token, score.base.scale
        bias = bias if kept.form.bias is None else kept.form.bias
    if bias is None:
        return _Added(None, values)
    return _Added(bias, (*values, type(bias), bias.offset)) if isinstance(bias, Alibi | Relative) else None


def key_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scale: object,
    softcap: object,
    sink: object,
    backend: object,
    observed: bool,
    bias: object = None,
    score: object = None,
) -> Key | None:
    """The key of a call whose query is on a GPU; None where torch's modes, or parts of it, need the whole road."""
    if torch.compiler.is_compiling() or isinstance(bias, Tensor):
        return None
    if not type(query) is type(key) is type(value) is Tensor or type(backend) is not str:
        return None
    if query.dim() < 2 or key.dim() < 2:
        return None
    mask_key: object = None
    by_torch = True
    if mask is not None:
        kind: Any = type(mask)
        is_mask, by_torch = _kind_of(kind)
        mask_key = _mask_key(mask, query.shape[-2], key.shape[-2]) if is_mask else None
        if mask_key is None:
            return None
    modes = call_modes(by_torch and not observed)
    if modes is None:
        return None
    made: tuple[object, ...] = (backend, observed, query.shape, key.shape, mask_key, modes)
    tensors: tuple[Tensor, ...] = (query, key, value)
    if scale is not None or softcap is not None or sink is not None:
        numbers = (scale is None or type(scale) is float) and (softcap is None or type(softcap) is float)
        if not numbers or not (sink is None or type(sink) is Tensor or type(sink) is torch.nn.Parameter):
            return None
        made += (scale, softcap, sink is None)
        if isinstance(sink, Tensor):
            tensors += (sink,)
    structured = None
    if bias is not None or score is not None:
        added = _added(query, key, bias, score)
        if added is None:
            return None
        structured = added.bias
        made += added.values
        if structured is not None:
            if any(x is y for x in structured.tensors for y in tensors):  # a tensor is compared once
                return None
            tensors += structured.tensors
    if query is key or key is value or query is value:  # a tensor is compared once
        made += (query is key, key is value)
        tensors = tuple(dict.fromkeys(tensors))
    return Key(made, tensors, structured)


def recall(key: Key) -> Remembered | None:
    """The call that is remembered by this key."""
    for alike, call in _CALLS.get(key.values, ()):
        if alike(*key.tensors):
            return call
    return None


def remember(key: Key, given: Given, p: Problem, backend: Backend) -> Remembered | None:
    """Remember an accepted call, if it is computed as it was given and the backend can prepare for more of it.

    Under modes such as autocast nothing is remembered, and nothing that was is recalled: tensors are not alike there.
    """
    if not operations_are_plain():
        return None
    same = all(x is y for x, y in zip(given[:3], (p.query, p.key, p.value), strict=True))
    same = same and (p.bias is None or p.bias is key.bias)
    same = same and (given[3] is p.mask or (isinstance(given[3], Mask) and on_device(given[3], p.device) is p.mask))
    if not same or isinstance(p.scale, Tensor) or (prepared := backend.prepare(p)) is None:
        return None
    if len(_CALLS) >= _SIZE:
        for oldest in list(_CALLS)[:1]:  # a list, since other threads may change it meanwhile
            _CALLS.pop(oldest, None)
    survey = backend.prepare_survey(p) if p.observed else None
    by_lengths = p.bias is None and p.score is None and (p.mask is None or p.mask.constant)
    found = Remembered(backend, prepared, p.scale, p.softcap, p.lead, by_lengths, survey)
    others = _CALLS.get(key.values, ())[: _VARIANTS - 1]
    _CALLS[key.values] = ((likeness(key.tensors), found), *others)
    return found
