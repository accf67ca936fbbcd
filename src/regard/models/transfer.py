"""Reading results back from a device: many tensors in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["on_host"]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, by one transfer per device and dtype: each transfer waits for all work of its device.

    >>> [x.tolist() for x in on_host([torch.ones(2), torch.zeros(1, 1)])]
    [[1.0, 1.0], [[0.0]]]
    """
    found = list(tensors)
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        if not x.is_cpu:
            places.setdefault((x.device, x.dtype), []).append(i)
    for same in places.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in same]).cpu()
        for i, part in zip(same, flat.split([tensors[i].numel() for i in same]), strict=True):
            found[i] = part.view(tensors[i].shape)
    return found
