"""Compile ahead: the kernels of a first call, those of its backward pass included, compile side by side, in threads of their own.

A pass that is run inside `collecting()` starts no kernel: each launch is collected, and its kernel is compiled in the background
for the types of its arguments. A thread does nothing but fill Triton's cache, which has one entry per variant: the launch that
follows waits for the thread (`wait_for`) and finds the entry. What goes wrong in a thread is left to that launch, which compiles
again and raises. Triton's passes and the assembler release the interpreter's lock, and so does the C compiler that builds a
kernel's launcher beside them; only Triton's front end holds it. So the kernels that are needed first get a head start.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock, Thread, local
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.torch import is_capturing
from ..compat.triton import build_launcher, hash_compiler, load, start_driver

__all__ = ["collect", "collecting", "is_collecting", "is_new", "may_keep", "prepare", "wait_for"]

_LOG = logging.getLogger(__name__)
_MOST_VARIANTS = 1024
_HEAD_START = 1.0  # seconds, in which Triton's front end is done with the forward kernel
_PREPARING = Lock()
_PREPARED: set[str] = set()  # types of devices
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


def is_collecting() -> bool:
    """Whether this thread collects launches, so that nothing is computed."""
    return _COLLECTED.launches is not None


def may_keep() -> bool:
    """Whether the tensors of the moment may be kept: a graph that is captured fills its own anew, and collected launches fill none."""
    return not (is_capturing() or is_collecting())


def prepare(device: torch.device) -> None:
    """Let Triton do in the background what it does once per process before it compiles, while kernels are imported."""
    if device.type not in _PREPARED:
        import triton  # noqa: F401  here, since two threads that import it together would wait for one another

        Thread(target=_prepare, args=(device,), name="regard prepares Triton", daemon=False).start()


def _prepare(device: torch.device) -> None:
    """Hash Triton's files and start its driver; other threads wait for the first."""
    with _PREPARING:
        if device.type in _PREPARED:
            return
        _PREPARED.add(device.type)
        try:
            driver = Thread(target=_start_driver, args=(device,), name="regard starts Triton's driver", daemon=False)
            driver.start()
            hash_compiler()
            driver.join()
        except Exception:  # noqa: BLE001  the first compilation does it again and raises it
            _LOG.debug("Triton could not be prepared", exc_info=True)


def _start_driver(device: torch.device) -> None:
    try:
        if device.type == "cuda":
            start_driver()
    except Exception:  # noqa: BLE001  the first compilation does it again and raises it
        _LOG.debug("Triton's driver could not be started", exc_info=True)


@contextmanager
def collecting(device: torch.device, after: Sequence[Thread] = ()) -> Iterator[list[Thread]]:
    """Collect the launches of this thread instead of starting them, and then compile their kernels in the background.

    The list has the threads in the end. Those of an earlier one, in `after`, have a head start.
    """
    launches: list[_Launch] = []
    threads: list[Thread] = []
    before, _COLLECTED.launches = _COLLECTED.launches, launches
    try:
        yield threads
    finally:
        _COLLECTED.launches = before
    for launch in launches:
        # The interpreter waits for these threads when it exits, also for those that a backward pass starts, whose thread is a
        # daemon: a compiler that is cut off ends in a crash.
        name = f"regard compiles {launch.kernel.__name__}"
        thread = Thread(target=_compile, args=(launch, device, after), name=name, daemon=False)
        thread.start()
        threads.append(thread)
        _COMPILING.setdefault(id(launch.kernel), []).append(thread)


def collect(kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], variant: Hashable = None) -> bool:
    """Collect a launch if this thread collects them; if not, it is to be started. A `variant` with a name is collected once."""
    launches = _COLLECTED.launches
    if launches is None:
        return False
    if variant is None or is_new(variant):
        launches.append(_Launch(kernel, {name: _without_tensors(x) for name, x in arguments.items()}, dict(options)))
    return True


def wait_for(kernel: Any) -> None:
    """Wait for the threads that compile this kernel, so that nothing is compiled twice."""
    for thread in _COMPILING.pop(id(kernel), ()):
        thread.join()


def _compile(launch: _Launch, device: torch.device, after: Sequence[Thread]) -> None:
    _prepare(device)
    until = monotonic() + _HEAD_START
    for thread in after:
        thread.join(max(until - monotonic(), 0.0))
    name = f"regard builds the launcher of {launch.kernel.__name__}"
    launcher = Thread(target=_build_launcher, args=(launch, device), name=name, daemon=False)
    try:
        launcher.start()
        with _on(device):
            compiled = launch.kernel.warmup(**launch.arguments, grid=(1,), **launch.options)
            launcher.join()
            if device.type == "cuda" and compiled is not None:
                load(compiled)
    except Exception:  # noqa: BLE001  the launch compiles again and raises it
        _LOG.debug("a kernel could not be compiled ahead", exc_info=True)


def _build_launcher(launch: _Launch, device: torch.device) -> None:
    try:
        with _on(device):
            if device.type == "cuda":
                build_launcher(launch.kernel, launch.arguments, launch.options)
    except Exception:  # noqa: BLE001  it is built when the kernel is loaded, which raises it
        _LOG.debug("a launcher could not be built ahead", exc_info=True)


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
