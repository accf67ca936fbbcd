"""Compile the fused kernels before the first real call: a small, named set, the same for every mask and length."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import biases
from .errors import ArgumentError, DeviceError
from .functional import attention, observe
from .masks import causal, strided

__all__ = ["DIMS", "DTYPES", "USUAL", "VARIANTS", "Warmed", "plan", "warm"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DIMS = (64, 128)
VARIANTS = ("plain", "mask", "bits", "decode", "softcap", "sink", "scale", "bias", "alibi", "relative", "dropout")
USUAL = ("plain", "mask", "bits", "decode")
_CELLS = 32
_HEADS = 2
_ROWS = 256
_KEYS = 2048  # enough for split keys


class Warmed(NamedTuple):
    """One variant that was compiled, and how long that took."""

    variant: str
    dtype: str
    dim: int
    seconds: float


def plan(
    dtypes: Sequence[str] = ("bfloat16",), dims: Sequence[int] = DIMS, variants: Sequence[str] = USUAL
) -> list[tuple[str, str, int]]:
    """List what would be compiled, as (variant, dtype, dim).

    >>> plan(dims=[64], variants=["plain", "mask"])
    [('plain', 'bfloat16', 64), ('mask', 'bfloat16', 64)]
    """
    for name, given, known in (("dtype", dtypes, DTYPES), ("variant", variants, VARIANTS)):
        if unknown := [x for x in given if x not in known]:
            raise ArgumentError(f"warmup: {name} must be one of {', '.join(known)}. Got {unknown[0]!r}.")
    if wrong := [d for d in dims if not 1 <= d <= 256]:
        raise ArgumentError(f"warmup: dim must be from 1 to 256. Got {wrong[0]}.")
    return [(variant, dtype, dim) for dtype in dtypes for dim in dims for variant in variants]


def warm(wanted: Sequence[tuple[str, str, int]], backward: bool = True, device: str = "cuda") -> Iterator[Warmed]:
    """Compile each entry of a `plan`, forward, backward and the passes of an Observation, and time it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "warmup: there is no CUDA device here; the kernels are compiled for the device that they run on."
        )
    return _warm(wanted, backward, device)  # a generator of its own, so that the error above is raised at the call


def _warm(wanted: Sequence[tuple[str, str, int]], backward: bool, device: str) -> Iterator[Warmed]:
    for variant, dtype, dim in wanted:
        start = time.perf_counter()
        _compile(variant, DTYPES[dtype], dim, backward and variant != "decode", torch.device(device))
        if device == "cuda":
            torch.cuda.synchronize()
        yield Warmed(variant, dtype, dim, time.perf_counter() - start)


def _compile(variant: str, dtype: torch.dtype, dim: int, backward: bool, device: torch.device) -> None:
    rows, keys = (1, _KEYS) if variant == "decode" else (_ROWS, _ROWS)
    q = torch.randn(1, _HEADS, rows, dim, dtype=dtype, device=device, requires_grad=backward)
    k, v = (torch.randn(1, _HEADS, keys, dim, dtype=dtype, device=device, requires_grad=backward) for _ in range(2))
    arguments = _arguments(variant, keys, device)
    seen = observe(q, k, v, **arguments, backend="triton")
    if backward:
        seen.output.float().sum().backward()
    with torch.no_grad():
        attention(q, k, v, **arguments, backend="triton")
        plain = observe(q, k, v, **arguments, backend="triton")
        plain.received, plain.gradient_health  # noqa: B018
        plain.map(1, 1), plain.top(1)
        if variant != "decode":
            plain.map(_CELLS, _CELLS)  # maps of other widths may use other kernels


def _arguments(variant: str, keys: int, device: torch.device) -> dict[str, Any]:
    per_head = torch.ones(_HEADS, device=device)
    known: dict[str, dict[str, Any]] = {
        "plain": {},
        "decode": {},
        "mask": {"mask": causal()},
        "bits": {"mask": strided(3)},
        "softcap": {"softcap": 30.0},
        "sink": {"sink": per_head},
        "scale": {"scale": per_head},
        "bias": {"bias": torch.zeros(keys, keys, device=device)},
        "alibi": {"bias": biases.alibi(per_head)},
        "relative": {"bias": biases.relative(torch.zeros(_HEADS, 17, device=device))},
        "dropout": {"dropout": 0.1},
    }
    return known[variant]
