"""What the ranks of a group tell each other of a call before anything is exchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import Backend
from ..biases import Bias
from ..core.problem import Problem
from ..masks import Mask
from .ranks import Told

__all__ = ["COLS", "FINITE", "KEYS", "ROWS", "SEED", "told", "word"]

ROWS, KEYS, SEED, FINITE, COLS = range(5)  # what a rank says in numbers: COLS of the mask's tensor, then of the bias's


def told(
    p: Problem, mask: Mask | Tensor | None, bias: Tensor | Bias | None, seed: int, finite: bool, how: dict[str, Any]
) -> Told:
    """What this rank is about to do, from its own part of the problem; `how` names the other arguments."""
    tensors = [t if isinstance(t, Tensor) else None for t in (mask, bias)]
    cols = [0 if t is None else 1 if not t.dim() else t.shape[-1] for t in tensors]
    facts = {name: _shape(t) for name, t in (("query", p.query), ("key", p.key), ("value", p.value))}
    facts["the device"] = p.device.type
    facts["the number of batch items and heads"] = str(p.lead)
    facts["mask"] = _tensor(mask) if isinstance(mask, Tensor) else word(mask)
    facts["bias"] = _tensor(bias) if isinstance(bias, Tensor) else word(bias)
    facts["score"] = word(p.score)
    facts |= {name: word(getattr(p, name)) for name in ("scale", "softcap", "sink", "dropout", "observed")}
    facts |= {name: value.name if isinstance(value, Backend) else str(value) for name, value in how.items()}
    facts["requires_grad"] = _asked(p, bias)
    return Told((p.rows, p.keys, seed, int(finite), *cols), facts)


def word(x: object) -> str:
    """A text that is the same on two ranks if, and only if, what they were given is."""
    if isinstance(x, int | float | str | None) or (isinstance(x, Mask) and x.constant):
        return repr(x)
    content = hashlib.sha256()
    _write(content, x)
    return f"{_small(x) if isinstance(x, Tensor) else repr(x)} (contents {content.hexdigest()[:10]})"


def _write(content: Any, x: object) -> None:
    """Write out what a thing is made of; tensors by their bytes, functions by their code."""
    if isinstance(x, Mask | Bias):
        if isinstance(x, Mask) and x.tensors:
            content.update(x.remembered("contents", lambda: _digest(lambda c: _write_fields(c, x))))
        else:
            _write_fields(content, x)
    elif isinstance(x, Tensor):
        content.update(f"{x.dtype} {tuple(x.shape)}".encode())
        content.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(x, nn.Module):
        content.update(repr(x).encode())
        for name, t in (*x.named_parameters(), *x.named_buffers()):
            content.update(f"{name} {t.requires_grad}".encode())
            _write(content, t)
    elif callable(x) and not isinstance(x, type):
        content.update(f"{getattr(x, '__module__', '')}.{getattr(x, '__qualname__', type(x).__qualname__)}".encode())
        _write_code(content, getattr(x, "__code__", None))
    else:
        content.update(repr(x).encode())


def _write_fields(content: Any, x: Any) -> None:
    content.update(type(x).__qualname__.encode())
    for field in fields(x):
        content.update(field.name.encode())
        _write(content, getattr(x, field.name))


def _write_code(content: Any, code: CodeType | None) -> None:
    if code is None:
        return
    content.update(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _write_code(content, constant)
        else:
            content.update(repr(constant).encode())


def _digest(write: Callable[[Any], None]) -> bytes:
    content = hashlib.sha256()
    write(content)
    return content.digest()


def _shape(x: Tensor) -> str:
    """The dtype and shape of (batch, heads, length, dim), but for the length."""
    batch, heads, _, dim = x.shape
    return f"{_name(x.dtype)} ({batch}, {heads}, …, {dim})"


def _tensor(x: Tensor) -> str:
    """The dtype and shape of a tensor for the rows of this rank, but for their number."""
    shape = [*map(str, x.shape[:-2]), *(["…"] if x.dim() > 1 else []), *map(str, x.shape[-1:])]
    return f"a {_name(x.dtype)} tensor ({', '.join(shape)})"


def _small(x: Tensor) -> str:
    return f"{_name(x.dtype)} {x.detach().tolist() if x.numel() <= 8 else tuple(x.shape)}"


def _asked(p: Problem, bias: Tensor | Bias | None) -> str:
    """Of which inputs gradients will be asked."""
    if not torch.is_grad_enabled():
        return "none"
    named = {"query": p.query, "key": p.key, "value": p.value, "scale": p.scale, "sink": p.sink, "bias": bias}
    found = [name for name, t in named.items() if isinstance(t, Tensor) and t.requires_grad]
    found += [f"bias {at}" for at, t in enumerate(bias.tensors if isinstance(bias, Bias) else ()) if t.requires_grad]
    return ", ".join(found) or "none"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
