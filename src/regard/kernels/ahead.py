"""Compile ahead: the kernels of a first call, those of its backward pass included, compile side by side, in threads of their own.

A pass that is run inside `collecting()` starts no kernel: each launch is collected, and its kernel is compiled in the background
for the types of its arguments. A thread does nothing but fill Triton's cache, which has one entry per variant: the launch that
follows waits for the thread (`wait_for`) and finds the entry. What goes wrong in a thread is left to that launch, which compiles
again and raises. Triton's passes and the assembler release the interpreter's lock, and so does the C compiler that builds a
kernel's launcher beside them; only Triton's front end holds it. So the front ends run one after the other, of the kernels that wait
the longest first. While Triton still hashes its files, which it needs to look into its cache, they run as if the cache were empty.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Condition, Lock, Thread, local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.torch import import_for_backward, is_capturing
from ..compat.triton import build_launcher, hash_compiler, intermediate_code, load, start_driver, warm_up

__all__ = ["collect", "collecting", "import_meanwhile", "is_collecting", "is_new", "may_keep", "prepare", "wait_for"]

_LOG = logging.getLogger(__name__)
_MOST_VARIANTS = 1024
_LONGEST_TURN = 5.0  # seconds that a front end waits for the one before it
_SWITCH = 5e-4  # seconds after which a thread gives up the interpreter's lock while others compile, which ask for it often
_PREPARING = Lock()
_PREPARED: set[str] = set()  # types of devices
_VARIANTS: dict[Hashable, None] = {}
_COMPILING: dict[Hashable, list[Thread]] = {}  # by the id of the kernel, which lives as long as its module, and the variant


class _Collected(local):
    """The launches that this thread collects; None if it starts them."""

    launches: list[_Launch] | None = None


class _Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    variant: Hashable


class _Turn:
    """A kernel whose front end waits for its turn, or runs; and whether Triton's cache had the kernel, once that is known."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cached: bool | None = None


class _FrontEnds:
    """Whose turn it is: one kernel at a time, the longest of those that wait, and of equals the first."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._known: list[_Turn] = []  # those of threads that have not ended
        self._switch = 0.0

    def join(self, size: int) -> _Turn:
        turn = _Turn(size)
        with self._changed:
            if not self._known:
                self._switch = sys.getswitchinterval()
                sys.setswitchinterval(min(self._switch, _SWITCH))
            self._waiting.append(turn)
            self._known.append(turn)
        return turn

    def begin(self, turn: _Turn) -> None:
        """Wait for this turn, but not forever for another one."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._running and turn is max(self._waiting, key=lambda x: x.size), _LONGEST_TURN
            )
            self._waiting.remove(turn)
            self._running.append(turn)

    def end(self, turn: _Turn, cached: bool | None = None) -> None:
        """The front end is done with it, or is not needed."""
        with self._changed:
            if turn in self._running:
                self._running.remove(turn)
            if turn.cached is None:
                turn.cached = cached
            self._changed.notify_all()

    def leave(self, turn: _Turn) -> None:
        """Its thread ends, or could not be started."""
        with self._changed:
            self._known.remove(turn)
            if turn in self._waiting:
                self._waiting.remove(turn)
            if not self._known:
                sys.setswitchinterval(self._switch)
        self.end(turn, cached=True)

    def are_over(self) -> bool:
        """Wait until no front end will run any more, and say whether there are kernels that were not in Triton's cache."""
        with self._changed:
            self._changed.wait_for(lambda: all(x.cached is not None for x in self._known), _LONGEST_TURN)
            return any(not x.cached for x in self._known)


_FRONT_ENDS = _FrontEnds()
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
        try:
            driver = Thread(target=_start_driver, args=(device,), name="regard starts Triton's driver", daemon=False)
            driver.start()
            hash_compiler()
            driver.join()
        except Exception:  # noqa: BLE001  the first compilation does it again and raises it
            _LOG.debug("Triton could not be prepared", exc_info=True)
        finally:
            _PREPARED.add(device.type)


def _start_driver(device: torch.device) -> None:
    try:
        if device.type == "cuda":
            start_driver()
    except Exception:  # noqa: BLE001  the first compilation does it again and raises it
        _LOG.debug("Triton's driver could not be started", exc_info=True)


@contextmanager
def collecting(device: torch.device) -> Iterator[list[Thread]]:
    """Collect the launches of this thread instead of starting them, and then compile their kernels in the background.

    The list has the threads in the end.
    """
    launches: list[_Launch] = []
    threads: list[Thread] = []
    before, _COLLECTED.launches = _COLLECTED.launches, launches
    try:
        yield threads
    finally:
        _COLLECTED.launches = before
    for launch in sorted(launches, key=_size, reverse=True):
        # The interpreter waits for these threads when it exits, also for those that a backward pass starts, whose thread is a
        # daemon: a compiler that is cut off ends in a crash.
        name = f"regard compiles {launch.kernel.__name__}"
        turn = _FRONT_ENDS.join(_size(launch))
        thread = Thread(target=_compile, args=(launch, device, turn), name=name, daemon=False)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads: the launch compiles
            _FRONT_ENDS.leave(turn)
            continue
        threads.append(thread)
        _COMPILING.setdefault((id(launch.kernel), launch.variant), []).append(thread)


def _size(launch: _Launch) -> int:
    """A guess at how long a kernel compiles: the one with the most arguments has the most code."""
    return len(launch.arguments)


def collect(kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], variant: Hashable = None) -> bool:
    """Collect a launch if this thread collects them; if not, it is to be started. A `variant` with a name is collected once."""
    launches = _COLLECTED.launches
    if launches is None:
        return False
    if variant is None or is_new(variant):
        given = {name: _without_tensors(x) for name, x in arguments.items()}
        launches.append(_Launch(kernel, given, dict(options), variant))
    return True


def wait_for(kernel: Any, variant: Hashable = None) -> None:
    """Wait for the threads that compile this kernel, of a named variant only that one, so that nothing is compiled twice."""
    for thread in _COMPILING.pop((id(kernel), variant), ()):
        thread.join()


def import_meanwhile() -> None:
    """Import what torch imports in the first backward pass, while the assembler is busy and the interpreter is not.

    In this thread, since two that import the same modules may see each other's before they are complete. If nothing is left to
    compile, because Triton's cache has it all, there is no time to use.
    """
    if _FRONT_ENDS.are_over():
        import_for_backward()


def _compile(launch: _Launch, device: torch.device, turn: _Turn) -> None:
    name = f"regard builds the launcher of {launch.kernel.__name__}"
    launcher = Thread(target=_build_launcher, args=(launch, device), name=name, daemon=False)
    try:
        _FRONT_ENDS.begin(turn)
        made = None
        if device.type not in _PREPARED:
            made = intermediate_code(launch.kernel, launch.arguments, launch.options, device)
            if made is not None:
                _FRONT_ENDS.end(turn)
        _prepare(device)
        launcher.start()
        with _on(device):
            then = partial(_FRONT_ENDS.end, turn, cached=False)
            compiled = warm_up(launch.kernel, launch.arguments, launch.options, then, made)
            _FRONT_ENDS.end(turn, cached=True)  # unless `then` was called
            launcher.join()
            if device.type == "cuda" and compiled is not None:
                load(compiled)
    except Exception:  # noqa: BLE001  the launch compiles again and raises it
        _LOG.debug("a kernel could not be compiled ahead", exc_info=True)
    finally:
        _FRONT_ENDS.leave(turn)


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
