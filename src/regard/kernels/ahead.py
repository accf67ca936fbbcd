"""Compile ahead: while the forward kernel compiles, those of the backward pass do so in threads of their own.

A pass that is run inside `collecting()` starts no kernel: each launch is collected, and its kernel is compiled in the background
for the types of its arguments. A thread does nothing but fill Triton's cache, which has one entry per variant: the launch that
follows waits for the thread (`wait_for`) and finds the entry. What goes wrong in a thread is left to that launch, which compiles
again and raises. Triton's passes and the assembler release the interpreter's lock; only its front end holds it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Thread, local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.triton import load

__all__ = ["collect", "collecting", "is_new", "wait_for"]

_LOG = logging.getLogger(__name__)
_MOST_VARIANTS = 1024
_VARIANTS: dict[Hashable, None] = {}
_COMPILING: dict[int, list[Thread]] = {}  # by the id of the kernel, which lives as long as its module


class _Collected(local):
    """The launches that this thread collects; None if it starts them."""

    launches: list[_Launch] | None = None


class _Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


_COLLECTED = _Collected()


def is_new(variant: Hashable) -> bool:
    """Whether a variant is asked for the first time."""
    if variant in _VARIANTS:
        return False
    if len(_VARIANTS) >= _MOST_VARIANTS:
        _VARIANTS.clear()
    _VARIANTS[variant] = None
    return True


@contextmanager
def collecting(device: torch.device) -> Iterator[None]:
    """Collect the launches of this thread instead of starting them, and then compile their kernels in the background."""
    launches: list[_Launch] = []
    before, _COLLECTED.launches = _COLLECTED.launches, launches
    try:
        yield
    finally:
        _COLLECTED.launches = before
    for launch in launches:
        # The interpreter waits for these threads when it exits: a compiler that is cut off could end in a crash.
        thread = Thread(target=_compile, args=(launch, device), name=f"regard compiles {launch.kernel.__name__}")
        thread.start()
        _COMPILING.setdefault(id(launch.kernel), []).append(thread)


def collect(kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Collect a launch if this thread collects them; if not, it is to be started."""
    launches = _COLLECTED.launches
    if launches is None:
        return False
    launches.append(_Launch(kernel, {name: _without_tensors(x) for name, x in arguments.items()}, dict(options)))
    return True


def wait_for(kernel: Any) -> None:
    """Wait for the threads that compile this kernel, so that nothing is compiled twice."""
    for thread in _COMPILING.pop(id(kernel), ()):
        thread.join()


def _compile(launch: _Launch, device: torch.device) -> None:
    on_device: AbstractContextManager[object] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with on_device:
            compiled = launch.kernel.warmup(**launch.arguments, grid=(1,), **launch.options)
            if device.type == "cuda" and compiled is not None:
                load(compiled)
    except Exception:  # noqa: BLE001  the launch compiles again and raises it
        _LOG.debug("a kernel could not be compiled ahead", exc_info=True)


@dataclass(frozen=True)
class _TensorType:
    """What Triton compiles for: the dtype of a tensor, and whether its address is a multiple of 16."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _without_tensors(x: Any) -> Any:
    """An argument of a launch in which types take the place of tensors, so that no memory is held."""
    if isinstance(x, Tensor):
        return _TensorType(x.dtype, x.data_ptr() % 16)
    if isinstance(x, tuple):
        parts = map(_without_tensors, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if hasattr(x, "block_shape"):  # a TMA descriptor
        twin = object.__new__(type(x))
        twin.__dict__.update(x.__dict__, base=_without_tensors(x.base))
        return twin
    return x
