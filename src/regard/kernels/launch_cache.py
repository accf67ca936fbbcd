"""The launch cache: a call like an earlier one starts the kernels compiled then, with its own tensors.

Triton inspects every argument of every launch, and we choose a kernel and a tile, describe tensors to TMA and count blocks. All
that takes longer on the host than many calls take on the GPU. Its results depend on nothing but sizes, strides, dtypes,
alignments, a few numbers and the kind of mask (`KernelArgs.signature`), so they are kept for a few hundred of these. No tensor of
a call is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ..compat.torch import is_capturing_cuda, raw_stream
from ..compat.triton import INTERPRETED, starter
from . import ahead

__all__ = ["Launch", "Shortcuts", "clear", "find", "start", "store", "zeros"]

_SIZE = 512
_LAUNCHES: dict[Hashable, Any] = {}
_SHORTCUTS: WeakSet[Shortcuts] = WeakSet()
_ZEROS: dict[Hashable, Any] = {}
_AT_ONCE = 64  # tensors of zeros that are filled by one launch
_LARGEST = 2**14  # numbers up to which that pays


class Launch(NamedTuple):
    """A compiled kernel on its grid."""

    again: Callable[..., None]  # starts it with other tensors of the same sizes and strides
    bound: Callable[..., Callable[..., None]]  # from names of its arguments to a function that takes these in order
    about: Any = None  # what the launcher must know of it, such as a tile


class Shortcuts:
    """The passes of a remembered call, each as one function from tensors to results; None until it has run the long way.

    The forward pass gives the output and the statistics in the order of `core.rows.unstacked`, in one tensor or apart. A shortcut returns
    None where something is not as it was then, such as the strides or the address of a tensor.
    """

    def __init__(self) -> None:
        _SHORTCUTS.add(self)
        self.forward: Callable[..., tuple[Tensor, Any] | None] | None = None
        self.backward: Callable[..., tuple[Tensor, Tensor, Tensor] | None] | None = None
        self.surveys: dict[tuple[int, int], Callable[..., Any]] = {}  # by height and width of the map


def find(key: Hashable) -> Any:
    """What was stored under this key, or None; no launch while launches are collected, since nothing may start then."""
    found = _LAUNCHES.get(key)
    return None if type(found) is Launch and ahead.is_collecting() else found


def store(key: Hashable, thing: Any) -> None:
    """Keep something under a key, and drop the oldest of too many."""
    if len(_LAUNCHES) >= _SIZE:
        for oldest in list(_LAUNCHES)[:1]:  # a list, since other threads may change it meanwhile
            _LAUNCHES.pop(oldest, None)
    _LAUNCHES[key] = thing


def clear() -> None:
    """Forget all launches."""
    _LAUNCHES.clear()
    for shortcuts in _SHORTCUTS:
        shortcuts.forward = shortcuts.backward = None
        shortcuts.surveys.clear()


def start(
    key: Hashable,
    kernel: Any,
    programs: int,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    changing: Collection[str],
    about: Any = None,
) -> None:
    """Start a kernel the first time, and keep the launch; `changing` names the arguments that hold tensors of a call."""
    if ahead.collect(kernel, arguments, options):
        return
    ahead.wait_for(kernel)
    compiled = kernel[(programs,)](**arguments, **options)
    if key is None or compiled is None or INTERPRETED:
        return
    compiled = compiled.result() if hasattr(compiled, "result") else compiled
    in_order = {name: arguments[name] for name in kernel.arg_names}
    store(key, Launch(*starter(compiled, programs, in_order, changing), about))


def zeros(size: int, device: torch.device) -> Tensor:
    """int32 zeros for one launch on the current stream; those for many launches are filled together."""
    if size > _LARGEST or device.type != "cuda" or is_capturing_cuda():
        return torch.zeros(size, dtype=torch.int32, device=device)
    key = (size, device, raw_stream(device))
    ready = _ZEROS.get(key)
    found = None if ready is None else next(ready, None)
    if found is None:
        step = -(-size // 4) * 4  # each begins at a multiple of 16 bytes
        ready = iter([row[:size] for row in torch.zeros(_AT_ONCE, step, dtype=torch.int32, device=device)])
        found = next(ready)
        if len(_ZEROS) >= _AT_ONCE:
            _ZEROS.clear()
        _ZEROS[key] = ready
    tensor: Tensor = found
    return tensor
