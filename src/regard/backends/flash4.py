"""`flash4`: FlashAttention-4 (the package `flash-attn-4`), for plain and causal calls on the GPUs it was made for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..chunked.foreign import AttentionFormula, ForeignKernel
from ..compat.torch import call_function, forward_mode_is_active, may_need_grad, transforms_are_active
from ..core.problem import Problem
from ..core.rows import Rows
from ..masks.causal import Causal
from ..masks.everything import Everything
from .base import Backend

__all__ = ["Flash4"]

_PACKAGE = "flash-attn-4"
_CHIPS = (9, 10, 11)  # major compute capabilities for which every release has both passes
_ORDERED = (10, 11)  # those on which every release can sum gradients in a fixed order
_DIMS = (64, 96, 128)  # tested against a reference by every release, forward and backward
_HALF = (torch.float16, torch.bfloat16)
_MOST = 2**31  # elements; some of its offsets are 32-bit
_ALIGNED = 16  # bytes; its tile copies need rows aligned to this


class Flash4(Backend):
    """FlashAttention-4, where it is installed and does exactly what is asked."""

    name: ClassVar[str] = "flash4"
    about: ClassVar[str] = "FlashAttention-4"

    def refuses(self, p: Problem) -> list[str]:
        if torch.compiler.is_compiling():
            return ["it cannot be traced by torch.compile"]
        if not _installed():
            return [f"it is not installed: pip install {_PACKAGE}"]
        reasons = _about_device(p) + _about_logits(p) + _about_mask(p) + _about_tensors(p)
        if p.observed:
            reasons.append("it gives no statistics of the weights")
        if p.dropout:
            reasons.append("it has no dropout")
        if forward_mode_is_active() or transforms_are_active():
            reasons.append("it has no rules for forward mode and torch.func")
        if not reasons and (missing := _missing()):
            reasons.append(missing)
        return reasons

    def run(self, p: Problem) -> Rows:
        causal = isinstance(p.mask, Causal)
        scale = float(p.scale)
        fixed = torch.are_deterministic_algorithms_enabled()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _attend(q, k, v, scale, causal, fixed)

        tensors = p.query, p.key, p.value
        if may_need_grad(*tensors):
            output: Tensor = call_function(ForeignKernel, AttentionFormula(p.mask, None, scale), attend, *tensors)
        else:
            output = attend(*tensors)
        return Rows(p.shaped(output))


@cache
def _installed() -> bool:
    """Read the metadata: finding the module would import its parent, which may be an older FlashAttention."""
    try:
        version(_PACKAGE)
    except PackageNotFoundError:
        return False
    return True


@cache
def _function() -> Callable[..., Any]:
    """Its function. The import takes seconds, so it comes last, when nothing else speaks against it."""
    found: Callable[..., Any] = import_module("flash_attn.cute").flash_attn_func
    return found


@cache
def _missing() -> str:
    """Why an installed package has no such function; empty if it has."""
    try:
        taken = set(signature(_function()).parameters)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"{_PACKAGE} is installed and cannot be imported: {error}"
    if not {"softmax_scale", "causal", "deterministic"} <= taken:  # FlashAttention-2 may bring a module of that name
        return f"flash_attn.cute is not that of {_PACKAGE}: reinstall {_PACKAGE}"
    return ""


@cache
def _capability(device: torch.device) -> int:
    """The major compute capability of an NVIDIA GPU; 0 for any other device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, fixed: bool) -> Tensor:
    """Its function in our layout: it takes and gives (batch, length, heads, dim)."""
    q, k, v = (_readable(x.transpose(1, 2)) for x in (q, k, v))
    with torch.cuda.device_of(q):  # it launches on the current device, whatever device its tensors are on
        found = _function()(q, k, v, softmax_scale=scale, causal=causal, deterministic=fixed)
    output: Tensor = found[0] if isinstance(found, tuple) else found  # (output, lse) in releases so far
    if output.requires_grad:
        output.register_hook(_readable)
    return output.transpose(1, 2)


def _readable(x: Tensor) -> Tensor:
    """A tensor that its kernels can read: the same one if its strides allow it, else a copy."""
    step = _ALIGNED // x.element_size()
    readable = (
        x.stride(-1) == 1
        and x.data_ptr() % _ALIGNED == 0
        and all(stride > 0 and stride % step == 0 for stride in x.stride()[:-1])
        and sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) < _MOST
    )
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def _about_device(p: Problem) -> list[str]:
    major = _capability(p.device)
    if not major:
        return [f"the tensors are on {p.device.type}; it needs an NVIDIA GPU"]
    if major not in _CHIPS:
        return [f"the GPU has compute capability {major}; it is made for {_CHIPS[0]} to {_CHIPS[-1]}"]
    if torch.are_deterministic_algorithms_enabled() and major not in _ORDERED:
        return ["not all its releases promise the same bits here, and deterministic algorithms are asked for"]
    return []


def _about_logits(p: Problem) -> list[str]:
    reasons = []
    if p.score is not None:
        reasons.append(f"it takes q·k times a number, and no score {type(p.score).__name__}")
    elif isinstance(p.scale, Tensor):
        reasons.append("it takes the scale as a number, and not as a tensor")
    elif p.scale <= 0:
        reasons.append(f"it takes scales above 0; this one is {p.scale:g}")
    if p.softcap is not None:
        reasons.append("not all its releases have the gradient of a softcap")
    if p.sink is not None:
        reasons.append("not all its releases have the gradient of a sink")
    if p.bias is not None:
        reasons.append("it has no bias")
    return reasons


def _about_mask(p: Problem) -> list[str]:
    mask = p.mask
    if mask is None or isinstance(mask, Everything):
        return []
    if not isinstance(mask, Causal):
        return ["the only mask that it takes is causal"]
    if isinstance(mask.offset, Tensor) or mask.offset not in (None, p.keys - p.rows):
        return ["its causal mask aligns the last row with the last key, and this one does not"]
    if p.rows > p.keys:
        return [f"{p.rows - p.keys} of the rows have no visible key, and not all its releases return zeros for them"]
    return []


def _about_tensors(p: Problem) -> list[str]:
    reasons = []
    tensors = p.query, p.key, p.value
    if other := [type(x).__name__ for x in tensors if type(x) not in (Tensor, Parameter)]:
        reasons.append(f"it takes plain tensors, and not {other[0]}")
    if p.dtype not in _HALF:
        reasons.append(f"it takes float16 and bfloat16, and not {str(p.dtype).removeprefix('torch.')}")
    if not all(x.numel() for x in tensors):
        reasons.append("nothing is there to compute")
    if any(x.numel() >= _MOST for x in tensors):
        reasons.append(f"a tensor has {_MOST:,} elements or more, and some of its offsets are 32-bit")
    wide, deep = p.query.shape[-1], p.value.shape[-1]
    if wide != deep or wide not in _DIMS:
        reasons.append(f"it takes dims of 64, 96 and 128, the same for key and value; these are {wide} and {deep}")
    return reasons
