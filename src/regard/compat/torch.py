"""What stands between a tensor and its numbers: autocast, which must not touch ours, torch.func's wrappers, export."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

__all__ = [
    "autocast_enabled",
    "cached_signature",
    "call_function",
    "is_batched",
    "is_capturing",
    "is_exporting",
    "is_recording",
    "may_need_grad",
    "no_autocast",
    "not_compiled",
    "outside_transforms",
    "unwrap",
    "without_autocast",
]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=torch.autograd.Function)


def no_autocast(device: torch.device | None = None) -> AbstractContextManager[object]:
    """A context in which autocast casts nothing; a compiler, which cannot trace torch's own, needs the device."""
    if device is not None and torch.compiler.is_compiling():
        return torch.autocast(device.type, enabled=False)
    return torch._C._DisableAutocast()


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in that context: a backward pass may be called from inside autocast too."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with no_autocast():
            return function(*args, **kwargs)

    return wrapped


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function that starts kernels: behind a graph break it would trace their launcher."""
    hidden: list[Callable[P, R]] = []

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:  # the import takes seconds, and without it nothing is traced
            return function(*args, **kwargs)
        if not hidden:
            hidden.append(torch._dynamo.disable(function))
        return hidden[0](*args, **kwargs)

    return wrapped


def is_exporting() -> bool:
    """Whether torch.export is at work: no value can be read, and every operator must be a plain one."""
    return torch.compiler._is_exporting_flag  # what is_exporting() says, which torch.compile up to 2.12 takes for True


def outside_transforms() -> AbstractContextManager[object]:
    """A context outside of torch.func's transforms, for tensors that none of them has touched."""
    return torch._C._DisableFuncTorch()


def is_recording() -> bool:
    """Whether operations are recorded, as by `torch.func.linearize`: then no value can be read."""
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")  # what is not imported records nothing
    return tracer is not None and tracer.get_proxy_mode() is not None


def unwrap(x: Tensor) -> Tensor:
    """The plain tensor under the wrappers of torch.func."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def is_batched(x: Tensor) -> bool:
    """Whether vmap runs over a tensor, at any level."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def autocast_enabled(device: torch.device) -> bool:
    """Whether torch.autocast is on for a device."""
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def may_need_grad(*tensors: Tensor | None) -> bool:
    """Whether a derivative may be asked for, in any mode, or a transform of torch.func is at work."""
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def cached_signature(function: type[F]) -> type[F]:
    """An autograd function with the signature of its forward written down: torch looks for it at every call."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def call_function(function: Any, *args: Any) -> Any:
    """Apply an autograd function; torch leaves `apply` without a type."""
    return function.apply(*args)
