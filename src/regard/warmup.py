"""Compile the fused kernels before the first real call: a small, named set, the same for every mask and length.

Processes compile side by side. What they share is the cache of Triton, a folder, which serves all later processes too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    import torch

__all__ = ["DIMS", "DTYPES", "USUAL", "VARIANTS", "Warmed", "cache_folder", "plan", "warm"]

DTYPES = ("bfloat16", "float16", "float32")
DIMS = (64, 128)
VARIANTS = ("plain", "mask", "bits", "decode", "softcap", "sink", "scale", "bias", "alibi", "relative", "dropout")
USUAL = ("plain", "mask", "bits", "decode")
_CELLS = 32
_HEADS = 2
_ROWS = 256
_KEYS = 2048  # enough for split keys
_MOST_JOBS = 8  # each process holds some hundred megabytes of the GPU


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
    if wrong := [d for d in dims if not 1 <= d <= 512]:
        raise ArgumentError(f"warmup: dim must be from 1 to 512. Got {wrong[0]}.")
    return [(variant, dtype, dim) for dtype in dtypes for dim in dims for variant in variants]


def warm(
    wanted: Sequence[tuple[str, str, int]], backward: bool = True, device: str = "cuda", jobs: int | None = None
) -> Iterator[Warmed]:
    """Compile each entry of a `plan`, forward, backward and the passes of an Observation, and time it.

    `jobs` processes share the work, by default one per core and at most 8; with 1 it is done in this process.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "warmup: there is no CUDA device here; the kernels are compiled for the device that they run on."
        )
    if jobs is None:
        jobs = min(_MOST_JOBS, os.cpu_count() or 1) if device == "cuda" else 1
    jobs = min(jobs, len(wanted))
    # Generators of their own, so that the error above is raised at the call.
    alone = (_warm_one(entry, backward, device) for entry in wanted)
    return _warm_in_processes(wanted, backward, device, jobs) if jobs > 1 else alone


def cache_folder() -> str:
    """The folder in which Triton keeps what it compiles."""
    from triton import knobs

    return str(knobs.cache.dir)


def _warm_in_processes(
    wanted: Sequence[tuple[str, str, int]], backward: bool, device: str, jobs: int
) -> Iterator[Warmed]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:  # CUDA does not survive a fork
        tasks = [pool.submit(_warm_one, entry, backward, device) for entry in wanted]
        try:
            for done in as_completed(tasks):
                yield done.result()
        except BrokenProcessPool as error:
            raise DeviceError(
                f"warmup: one of {jobs} processes that compile ended without a result, perhaps for lack of memory. "
                f"Use fewer: --jobs 1 compiles in one process."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _warm_one(entry: tuple[str, str, int], backward: bool, device: str) -> Warmed:
    import torch

    variant, dtype, dim = entry
    start = time.perf_counter()
    _compile(variant, getattr(torch, dtype), dim, backward and variant != "decode", torch.device(device))
    if device == "cuda":
        torch.cuda.synchronize()
    return Warmed(variant, dtype, dim, time.perf_counter() - start)


def _compile(variant: str, dtype: torch.dtype, dim: int, backward: bool, device: torch.device) -> None:
    import torch

    from .functional import attention, observe

    rows, keys = (1, _KEYS) if variant == "decode" else (_ROWS, _ROWS)
    q = torch.randn(1, _HEADS, rows, dim, dtype=dtype, device=device, requires_grad=backward)
    k, v = (torch.randn(1, _HEADS, keys, dim, dtype=dtype, device=device, requires_grad=backward) for _ in range(2))
    for arguments in _arguments(variant, keys, device):
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


def _arguments(variant: str, keys: int, device: torch.device) -> list[dict[str, Any]]:
    """The arguments of the calls that a variant stands for: an option goes without a mask and with one."""
    import torch

    from . import biases
    from .masks import causal, strided, window

    per_head = torch.ones(_HEADS, device=device)
    whole: dict[str, dict[str, Any]] = {
        "plain": {},
        "decode": {},
        "mask": {"mask": causal()},
        "bits": {"mask": strided(3)},
    }
    options: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 30.0},
        "sink": {"sink": per_head},
        "scale": {"scale": per_head},
        "bias": {"bias": torch.zeros(keys, keys, device=device)},
        "alibi": {"bias": biases.alibi(per_head)},
        "relative": {"bias": biases.relative(torch.zeros(_HEADS, 17, device=device))},
        "dropout": {"dropout": 0.1},
    }
    if variant in whole:
        return (
            [whole[variant], {"mask": window(1)}] if variant == "mask" else [whole[variant]]
        )  # narrow ones have a tile of their own
    return [options[variant], {**options[variant], "mask": causal()}]
