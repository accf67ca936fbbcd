"""Hear calls of FlashAttention's functions: those of `flash_attn`, `flash_attn_interface` and `flash_attn.cute`."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..biases import Alibi
from ..core.problem import Problem
from ..core.validation import pose
from ..errors import ArgumentError
from ..masks import Mask, causal, packed, predicate, window
from ..observation import watchers
from .listener import is_changed_here, is_suspended, observer, respond_or_miss, suspended

__all__ = ["hear_flash_attention"]

_MODULES = ("flash_attn", "flash_attn_interface", "flash_attn.cute", "flash_attn.flash_attn_interface",
            "flash_attn.cute.interface")  # fmt: skip
_KINDS = ("", "qkvpacked_", "kvpacked_", "varlen_", "varlen_qkvpacked_", "varlen_kvpacked_")
_FUNCTIONS = (*(f"flash_attn_{kind}func" for kind in _KINDS), "flash_attn_with_kvcache")
_USED = {"q", "k", "v", "qkv", "kv", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
         "learnable_sink", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"}  # fmt: skip
_IGNORED = {"deterministic", "num_splits", "pack_gqa", "sm_margin", "max_seqlen", "max_seqlen_q", "max_seqlen_k",
            "return_attn_probs", "return_softmax_lse", "return_lse"}  # fmt: skip


class _Replaced:
    """The functions that are replaced in every module that holds them. All threads share it; the last one restores."""

    def __init__(self) -> None:
        self._lock, self._entered = threading.Lock(), 0
        self._stand_ins: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # by identity

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                found = {id(one): one for one in _flash_functions()}
                self._stand_ins = {key: (one, _heard(one)) for key, one in found.items()}
                _replace({key: stand_in for key, (_, stand_in) in self._stand_ins.items()})

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                _replace({id(stand_in): one for one, stand_in in self._stand_ins.values()})
                self._stand_ins = {}


_REPLACED = _Replaced()


@contextmanager
def hear_flash_attention() -> Iterator[None]:
    """Hear FlashAttention's functions, if it is imported; every reference in a module is put back on exit."""
    if not any(name in sys.modules for name in _MODULES):
        yield
        return
    with _REPLACED:
        yield


def _flash_functions() -> Iterator[Callable[..., Any]]:
    for name in _MODULES:
        module = sys.modules.get(name)
        for function in _FUNCTIONS:
            found = getattr(module, function, None)
            if callable(found):
                yield found


def _replace(by: dict[int, Callable[..., Any]]) -> None:
    """Replace functions, given by their identity, in every module that has them as a global."""
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) else {}
        if not by.keys().isdisjoint(map(id, list(names.values()))):
            names.update({name: by[id(value)] for name, value in names.items() if id(value) in by})


def _heard(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with each call of a watched thread answered."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_suspended() or not watchers() or (observer() is None and not is_changed_here()):
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        more: list[Any] = []
        together = "varlen" in function.__name__

        def original() -> Tensor:
            with suspended():
                found = function(*args, **kwargs)
            output = found[0] if isinstance(found, tuple) else found
            more.extend(found[1:] if isinstance(found, tuple) else ())
            return _heads_first(output, together)

        several = function.__module__.startswith("flash_attn.cute") or any(
            given.get(name) for name in ("return_attn_probs", "return_softmax_lse", "return_lse")
        )
        if several:  # what it gives besides the output comes from itself
            first = original()
        answered = respond_or_miss(
            lambda: _problem(function.__name__, signature, given), (lambda: first) if several else original
        )
        output = _heads_last(answered, together)
        return (output, *more) if several or more else output

    return call


def _heads_first(x: Tensor, together: bool) -> Tensor:
    """(batch, length, heads, dim), or (length, heads, dim) for packed sequences, as (batch, heads, length, dim)."""
    return (x[None] if together else x).transpose(1, 2)


def _heads_last(x: Tensor, together: bool) -> Tensor:
    x = x.transpose(1, 2).contiguous()
    return x[0] if together else x


def _problem(name: str, signature: inspect.Signature, given: dict[str, Any]) -> Problem:
    """A call as a problem; an error says which argument has no meaning here."""
    if name == "flash_attn_with_kvcache":
        raise ArgumentError(f"{name} writes into a cache while it attends, and runs as it is")
    for argument, value in given.items():
        default = signature.parameters[argument].default
        if argument not in _USED | _IGNORED and value is not None and (isinstance(value, Tensor) or value != default):
            raise ArgumentError(f"{name}: {argument} has no counterpart here")
    together = "varlen" in name
    if "qkv" in given:
        q, k, v = given["qkv"].unbind(-3)
    elif "kv" in given:
        q, (k, v) = given["q"], given["kv"].unbind(-3)
    else:
        q, k, v = given["q"], given["k"], given["v"]
    q, k, v = (_heads_first(x, together) for x in (q, k, v))
    left, right = (None if side is None or side < 0 else int(side) for side in given.get("window_size") or (None, None))
    right = 0 if given.get("causal") else right
    mask: Mask | None = _band(left, right)
    if together:
        shared = given.get("cu_seqlens")
        starts_q, starts_k = (given[f"cu_seqlens_{x}"] if shared is None else shared for x in "qk")
        mask = _packed(starts_q, starts_k, left, right)
    slopes = given.get("alibi_slopes")
    if slopes is not None and slopes.dim() != 1:
        raise ArgumentError(f"{name}: alibi_slopes per batch item have no counterpart here")
    return pose(
        q,
        k,
        v,
        mask=mask,
        bias=None if slopes is None else Alibi(slopes),
        scale=given.get("softmax_scale"),
        softcap=given.get("softcap") or None,
        sink=given.get("learnable_sink"),
        dropout=float(given.get("dropout_p") or 0.0),
        who=name,
    )


def _band(left: int | None, right: int | None) -> Mask | None:
    """Keys from `left` before a row to `right` after it, with the ends of rows and keys aligned."""
    if left is None and right is None:
        return None
    return causal() if left is None and right == 0 else window(left, right)


def _packed(starts_q: Tensor, starts_k: Tensor, left: int | None, right: int | None) -> Mask:
    """Sequences one after the other, each with the ends of its rows and keys aligned."""
    band = _band(left, right)
    if band is None:
        return packed(cu_seqlens=starts_q, key_cu_seqlens=starts_k)
    if starts_q is starts_k or torch.equal(starts_q, starts_k):
        return packed(cu_seqlens=starts_q) & band
    q, k = (x.detach().to("cpu", torch.int64) for x in (starts_q, starts_k))
    rows, keys = (torch.repeat_interleave(torch.arange(len(x) - 1, device="cpu"), x.diff()) for x in (q, k))
    place_q = torch.arange(len(rows), device="cpu") - q[1:][rows]  # counted from the end of its sequence
    place_k = torch.arange(len(keys), device="cpu") - k[1:][keys]
    rows, keys, place_q, place_k = (x.to(starts_q.device) for x in (rows, keys, place_q, place_k))

    def allows(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = rows[i] == keys[j]
        distance = place_k[j] - place_q[i]
        near = near if left is None else near & (distance >= -left)
        return near if right is None else near & (distance <= right)

    return predicate(allows)
