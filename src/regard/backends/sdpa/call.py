"""A problem as arguments of torch's function, and the kernel that torch would choose for them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch import cpu_multiplies_bfloat16, fused_sdpa_kernel, transforms_are_active
from ...core.problem import Problem
from ...masks import Mask
from ...masks.causal import Causal
from ...masks.dense import Dense
from ...masks.everything import Everything
from ...masks.padding import Keep, Padding

__all__ = [
    "FLASH",
    "KERNELS",
    "LARGEST_SCALE",
    "SMALL",
    "Call",
    "call_of",
    "computes_in_float32",
    "dense_mask",
    "is_torch_causal",
    "kernel_of",
    "probe_of",
]

SMALL = 2**16  # pairs up to which a mask may be laid out in full: a constant, so memory stays linear
LARGEST_SCALE = 1024.0  # beyond it, a row's largest logit less itself is no longer 0 in torch's fused multiply-add
FLASH = 1
KERNELS = {FLASH: "flash", 2: "memory-efficient", 3: "cuDNN", 4: "overrideable"}


class Call(NamedTuple):
    """The arguments of torch's function that mean the same as a problem."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    grouped: bool

    def attend(self) -> Tensor:
        return F.scaled_dot_product_attention(
            self.query, self.key, self.value, self.mask, 0.0, self.causal, scale=self.scale, enable_gqa=self.grouped
        )

    def attend_traced(self) -> Tensor:
        """Under torch.compile, where no value can be read: rows and keys without a visible pair are zeroed."""
        if self.mask is None:
            return self.attend()
        allowed = self.mask  # (B|1, H|1, N|1, M|1)
        rows, keys = allowed.any(-1, keepdim=True), allowed.any(1, keepdim=True).any(2, keepdim=True).mT
        query = torch.where(rows, self.query, 0.0)
        key, value = torch.where(keys, self.key, 0.0), torch.where(keys, self.value, 0.0)
        return self._replace(query=query, key=key, value=value).attend()


def call_of(p: Problem, probe: bool = False) -> Call:
    """The call that computes a problem; a probe leaves the values of a mask on a GPU undefined."""
    query, key, value, scale = p.query, p.key, p.value, p.scale
    if _casts(p):
        query, key, value = query.float(), key.float(), value.float()
    if p.score is not None:
        query, key, _ = p.score.prepare(query, key)
        scale = 1.0
    elif isinstance(scale, Tensor):
        query, scale = query * scale.to(query.dtype).reshape(-1, 1, 1), 1.0
    elif scale <= 0:  # torch's CPU kernel takes the largest logit before the scale, and then −inf · scale is not −inf
        query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
    mask, causal = (None, False) if p.mask is None else _mask_arguments(p.mask, p)
    if causal and key.shape[2] > query.shape[2]:  # no row attends to the keys after the last row
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if isinstance(p.bias, Tensor):
        mask = p.bias.to(query.dtype)
    elif mask is not None and not query.is_cpu:  # cuDNN averages a row that a bool mask leaves empty, but respects −inf
        hidden = torch.empty(mask.shape, dtype=query.dtype, device=query.device)
        mask = hidden if probe else hidden.zero_().masked_fill_(~mask, -torch.inf)
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        query, key, value = _unit_stride(query), _unit_stride(key), _unit_stride(value)
    if query.shape[1] != key.shape[1]:  # a statement and not a value: torch takes no symbolic bool
        return Call(query, key, value, mask, causal, scale, True)
    return Call(query, key, value, mask, causal, scale, False)


def probe_of(p: Problem) -> Call:
    """A call for torch to choose a kernel for: the same tensors, or empty ones where casts and scores would compute."""
    if p.score is None and not isinstance(p.scale, Tensor) and not _casts(p):
        return call_of(p._replace(scale=abs(p.scale) or 1.0), probe=True)
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    width = p.query.shape[-1] if p.score is None else p.score.width(p.query.shape[-1], p.key.shape[-1])

    def empty(x: Tensor, dim: int) -> Tensor:
        grad = x.requires_grad and torch.is_grad_enabled() and p.plain_scale
        return torch.empty(*x.shape[:-1], dim, dtype=dtype, device=x.device, requires_grad=grad)

    query, key, value = empty(p.query, width), empty(p.key, width), empty(p.value, p.value.shape[-1])
    return call_of(p._replace(query=query, key=key, value=value, score=None, scale=1.0), probe=True)


def kernel_of(call: Call) -> int:
    """The kernel that torch would choose; 0 is the matrix path."""
    if transforms_are_active():  # torch's choice cannot read wrapped tensors, but needs only their shapes
        query, key, value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in call[:3])
        call = call._replace(query=query, key=key, value=value)
    return fused_sdpa_kernel(*call)


def _casts(p: Problem) -> bool:
    """Whether a problem in half precision is computed in float32."""
    return p.dtype not in (torch.float32, torch.float64) and (not p.plain_scale or computes_in_float32(p))


def computes_in_float32(p: Problem) -> bool:
    """Whether this processor multiplies float32 faster than the half precision that it is given."""
    if p.dtype == torch.float32 or not p.query.is_cpu or torch.compiler.is_compiling():
        return False
    return not (p.dtype == torch.bfloat16 and cpu_multiplies_bfloat16())


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask_arguments(mask: Mask, p: Problem) -> tuple[Tensor | None, bool]:
    """The mask as torch takes it: (tensor, is_causal)."""
    if isinstance(mask, Everything):
        return None, False
    if isinstance(mask, Causal) and is_torch_causal(mask, p.rows, p.keys):
        if p.rows == 1 and p.keys == 1:  # a statement and not a value: it may be traced with symbols
            return None, False
        return None, True
    if isinstance(mask, Dense):
        return mask.allowed.reshape((1,) * (4 - mask.allowed.dim()) + mask.allowed.shape), False
    if isinstance(mask, Padding | Keep):
        return mask.keys(p.keys, p.query.device), False
    return (dense_mask if mask.constant else Mask.dense)(mask, p.rows, p.keys, p.query.device), False


@lru_cache(maxsize=32)
def dense_mask(mask: Mask, n: int, m: int, device: torch.device) -> Tensor:
    """A small mask in full, kept for the next call."""
    return mask.dense(n, m, device)


def is_torch_causal(mask: Causal, n: int, m: int) -> bool:
    """Whether row i attends to the keys up to i, which is what torch calls causal."""
    offset = mask.offset
    return n == m if offset is None else isinstance(offset, int) and offset == 0
