"""The plainest calls, answered before they are posed: `Sdpa` would do the same after a longer host path."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...compat.torch import any_autocast_enabled, is_recording, lacks_values, may_need_grad
from ...masks import Mask
from ...masks.causal import Causal
from ...masks.padding import Padding
from .call import FLASH, SMALL, Call, dense_mask, kernel_of

__all__ = ["fast_path"]


def fast_path(query: Tensor, key: Tensor, value: Tensor, mask: object) -> Tensor | None:
    """The output of a plain call, or None if it needs the whole path.

    Plain means square float32 on the CPU, no derivative asked for, and no mask or a simple one.
    """
    if not type(query) is type(key) is type(value) is Tensor or query.is_nested or key.is_nested or value.is_nested:
        return None
    shape = query.shape
    if (
        len(shape) != 4
        or 0 in shape
        or not shape == key.shape == value.shape
        or not query.dtype == key.dtype == value.dtype == torch.float32
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or any_autocast_enabled()
        or torch.compiler.is_compiling()
        or may_need_grad(query, key, value)
    ):
        return None
    allowed, causal = None, False
    if mask is not None:
        if type(mask) is Causal and mask.offset is None and mask.size is None:
            causal = True
        elif is_recording() or lacks_values(query) or (allowed := _simple_mask(query, mask)) is None:
            return None
    call = Call(query, key, value, allowed, causal, shape[3] ** -0.5, False)
    if kernel_of(call) != FLASH:
        return None
    output = call.attend()
    if allowed is not None and not math.isfinite(output.sum().item()):
        return None  # a NaN of a hidden key may have leaked
    return output


def _simple_mask(query: Tensor, mask: object) -> Tensor | None:
    """A simple mask that fits, as a tensor; None for any other."""
    batch, _, n, _ = query.shape
    if type(mask) is Padding:
        fits = mask.lengths.is_cpu and mask.lengths.shape == (batch,)
        return mask.keys(n, query.device) if fits else None
    if isinstance(mask, Mask) and n * n <= SMALL and mask.constant and mask.lead == (1, 1):
        return dense_mask(mask, n, n, query.device) if mask.misfit(n, n) is None else None
    return None
