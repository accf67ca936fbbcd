"""Copies of a mask's tensors on another device, made without waiting for that device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.compat.torch import is_capturing, is_wrapped, lacks_values, versions_of

__all__ = ["Arrival", "copy_by_value", "copy_to"]

_MOST_NUMBERS = 1024  # of a tensor that is copied once for all equal ones
_MOST_COPIES = 64


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; from the CPU to a GPU through pinned memory, and the host does not wait."""
    if not _is_queued(x, device):
        return x.to(device)
    with torch.inference_mode(False):  # tensors of inference mode count no changes, and nothing made of them is cached
        return x.pin_memory().to(device, non_blocking=True)


def copy_by_value(x: Tensor, device: torch.device) -> Tensor:
    """The same, with one copy for all equal tensors of a few integers, which nobody may change."""
    if x.numel() > _MOST_NUMBERS or x.is_floating_point() or not _is_queued(x, device):
        return copy_to(x, device)
    key = (x.dtype, x.shape, tuple(x.flatten().tolist()), device)
    found = _COPIES.pop(key, None)
    if found is None or versions_of((found.tensor,)) != found.versions:
        made = copy_to(x, device)
        if is_wrapped(made):  # within a transform, which ends before the copy does
            return made
        found = _Copy(made, versions_of((made,)), Arrival.of([made]))
    found.arrival.wait([found.tensor])
    _COPIES[key] = found  # now the most recently used
    if len(_COPIES) > _MOST_COPIES:
        for oldest in list(_COPIES)[:1]:
            _COPIES.pop(oldest, None)
    return found.tensor


def _is_queued(x: Tensor, device: torch.device) -> bool:
    return x.is_cpu and device.type == "cuda" and not is_wrapped(x) and not lacks_values(x) and not is_capturing()


class Arrival(NamedTuple):
    """The stream that copies some tensors, and the event after the copies; None if nobody has to wait."""

    stream: int = 0
    event: torch.cuda.Event | None = None

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Arrival:
        """The copies that the current stream has just been given."""
        if not tensors or not tensors[0].is_cuda or is_capturing():
            return Arrival()
        stream = torch.cuda.current_stream(tensors[0].device)
        return Arrival(stream.cuda_stream, stream.record_event())

    def wait(self, tensors: Sequence[Tensor]) -> None:
        """Let the current stream wait for the copies, and keep them alive while it reads them."""
        if self.event is None or is_capturing():  # a capture starts after all other work is done
            return
        stream = torch.cuda.current_stream(tensors[0].device)
        if stream.cuda_stream == self.stream:
            return
        stream.wait_event(self.event)
        for x in tensors:
            x.record_stream(stream)


class _Copy(NamedTuple):
    """A copy that equal tensors share, its versions when it was made, and when it is there."""

    tensor: Tensor
    versions: list[int]
    arrival: Arrival


_COPIES: dict[
    tuple[object, ...], _Copy
] = {}  # by dtype, shape, numbers and device; the least recently used comes first
