"""Copies between host and device that make neither wait for the other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

__all__ = ["HostCopy", "to_device", "to_host"]

_AT_ONCE = 1 << 22  # bytes that a thread copies through pinned memory
_THREADS = 8


def to_device(x: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the host on the device. From pinned memory, since any other copy waits for all work of a GPU."""
    x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host; `read` waits for these alone, not for work that was started later."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._found: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        for x in tensors:
            if not x.is_cuda:
                self._found.append(x)
                continue
            with torch.cuda.device(x.device):
                self._found.append(
                    torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu").copy_(x, non_blocking=True)
                )
                self._events.append(torch.cuda.Event())
                self._events[-1].record()

    def read(self) -> list[np.ndarray]:
        """The tensors as arrays."""
        for event in self._events:
            event.synchronize()
        return [x.cpu().numpy() for x in self._found]


def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copies of tensors as arrays. Memory that is new is slow to write, so several threads write it."""
    if not any(x.is_cuda for x in tensors):
        return [x.to("cpu", copy=True).numpy() for x in tensors]
    found, parts = [], []
    for x in tensors:
        found.append(np.empty(tuple(x.shape), dtype=torch.empty(0, dtype=x.dtype, device="cpu").numpy().dtype))
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        step = _AT_ONCE // x.element_size()
        targets = np.split(found[-1].reshape(-1), range(step, x.numel(), step))
        parts += [(*pair, stream) for pair in zip(x.reshape(-1).split(step), targets, strict=True)]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(_fill, parts))
    return found


def _fill(part: tuple[Tensor, np.ndarray, torch.cuda.Stream | None]) -> None:
    """Copy a tensor into an array."""
    source, target, stream = part
    if stream is None:
        np.copyto(target, source.cpu().numpy())
        return
    with torch.cuda.stream(stream):
        (staged,) = HostCopy([source]).read()
    np.copyto(target, staged)
