"""Copies between host and device that make neither wait for the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["HostCopy", "to_device"]


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
