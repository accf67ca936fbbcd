"""What the ranks of a group compare before a call: sizes, and fingerprints of everything that must be the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..backends import Backend
from ..biases import Bias
from ..core.problem import Problem
from ..masks import Mask
from ..masks.predicate import Predicate
from .captured import digest
from .ranks import RankInfo

__all__ = ["CallSizes", "call_info", "fingerprint", "pairs_checksum", "unread_captures"]

_PAIRS_AT_ONCE = 1 << 22


class CallSizes(NamedTuple):
    """The numbers of a call that may differ between ranks."""

    rows: int
    keys: int
    seed: int
    finite: int
    mask_keys: int  # keys of a mask that is a tensor; 0 if there is none
    bias_keys: int


def call_info(
    p: Problem, mask: Mask | Tensor | None, bias: Tensor | Bias | None, seed: int, finite: bool, how: dict[str, Any]
) -> RankInfo:
    """What this rank is about to compute, from its part of the problem; `how` holds the other arguments."""
    facts = {name: _shape(t) for name, t in (("query", p.query), ("key", p.key), ("value", p.value))}
    facts["the device"] = p.device.type
    facts["the number of batch items and heads"] = str(p.lead)
    facts["mask"] = _tensor_shape(mask) if isinstance(mask, Tensor) else fingerprint(mask)
    facts["bias"] = _tensor_shape(bias) if isinstance(bias, Tensor) else fingerprint(bias)
    facts["score"] = fingerprint(p.score)
    facts |= {name: fingerprint(getattr(p, name)) for name in ("scale", "softcap", "sink", "dropout", "observed")}
    facts |= {name: value.name if isinstance(value, Backend) else str(value) for name, value in how.items()}
    facts["requires_grad"] = _inputs_with_grad(p, bias)
    return RankInfo(CallSizes(p.rows, p.keys, seed, int(finite), _key_count(mask), _key_count(bias)), facts)


def _key_count(x: object) -> int:
    if not isinstance(x, Tensor):
        return 0
    return x.shape[-1] if x.dim() else 1


def fingerprint(x: object) -> str:
    """A text that is the same on two ranks if, and only if, the argument is."""
    if isinstance(x, int | float | str | None) or (isinstance(x, Mask) and x.constant):
        return repr(x)
    content = hashlib.sha256()
    _update(content, x)
    return f"{_summary(x) if isinstance(x, Tensor) else repr(x)} (contents {content.hexdigest()[:10]})"


def _update(content: Any, x: object) -> None:
    """Hash what an object consists of: tensors by their bytes, functions by their code and what it reads."""
    if isinstance(x, Mask | Bias):
        if isinstance(x, Mask) and x.tensors and not _parts(x):
            content.update(x.remembered("contents", lambda: _digest(lambda c: _update_fields(c, x))))
        else:
            _update_fields(content, x)
    elif isinstance(x, Tensor):
        content.update(f"{x.dtype} {tuple(x.shape)}".encode())
        content.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(x, nn.Module):
        content.update(repr(x).encode())
        for name, t in (*x.named_parameters(), *x.named_buffers()):
            content.update(f"{name} {t.requires_grad}".encode())
            _update(content, t)
    elif callable(x) and not isinstance(x, type):
        content.update(repr(digest(x)).encode())
    else:
        content.update(repr(x).encode())


def _parts(mask: Mask) -> list[Mask]:
    found = (getattr(mask, field.name) for field in fields(mask))
    return [part for part in found if isinstance(part, Mask)]


def unread_captures(mask: Mask | Tensor | None) -> tuple[str, ...]:
    """The types of values that a predicate captures and that a fingerprint cannot read."""
    if isinstance(mask, Predicate):
        return digest(mask.f).unread
    parts = _parts(mask) if isinstance(mask, Mask) else []
    return tuple(name for part in parts for name in unread_captures(part))


def pairs_checksum(mask: Mask, n: int, m: int, device: torch.device) -> str:
    """A checksum of all pairs that a mask allows: it takes n · m steps, in memory linear in m."""
    content = hashlib.sha256()
    j = torch.arange(m, device=device)
    height = max(1, _PAIRS_AT_ONCE // max(1, m * mask.lead[0] * mask.lead[1]))
    for i in torch.arange(n, device=device).split(height):
        content.update(np.packbits(mask.allows(i[:, None], j, n, m).cpu().numpy()).tobytes())
    return f"{mask!r} (pairs {content.hexdigest()[:10]})"


def _update_fields(content: Any, x: Any) -> None:
    content.update(type(x).__qualname__.encode())
    for field in fields(x):
        content.update(field.name.encode())
        _update(content, getattr(x, field.name))


def _digest(update: Callable[[Any], None]) -> bytes:
    content = hashlib.sha256()
    update(content)
    return content.digest()


def _shape(x: Tensor) -> str:
    """The dtype and shape of (batch, heads, length, dim), except the length."""
    batch, heads, _, dim = x.shape
    return f"{_name(x.dtype)} ({batch}, {heads}, …, {dim})"


def _tensor_shape(x: Tensor) -> str:
    """The dtype and shape of a tensor with the rows of this rank, except their number."""
    shape = [*map(str, x.shape[:-2]), *(["…"] if x.dim() > 1 else []), *map(str, x.shape[-1:])]
    return f"a {_name(x.dtype)} tensor ({', '.join(shape)})"


def _summary(x: Tensor) -> str:
    return f"{_name(x.dtype)} {x.detach().tolist() if x.numel() <= 8 else tuple(x.shape)}"


def _inputs_with_grad(p: Problem, bias: Tensor | Bias | None) -> str:
    """The names of the inputs that require gradients."""
    if not torch.is_grad_enabled():
        return "none"
    named = {"query": p.query, "key": p.key, "value": p.value, "scale": p.scale, "sink": p.sink, "bias": bias}
    names = [name for name, t in named.items() if isinstance(t, Tensor) and t.requires_grad]
    names += [f"bias {at}" for at, t in enumerate(bias.tensors if isinstance(bias, Bias) else ()) if t.requires_grad]
    return ", ".join(names) or "none"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
