"""What may be written, read and deleted: checked before anything is done."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError
from ..scores import Score
from .index import DTYPES

__all__ = [
    "floating",
    "graphless",
    "ids",
    "known",
    "new",
    "part",
    "part_of",
    "path",
    "queries",
    "rows",
    "temperature",
    "top",
]


class _Memory(Protocol):
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    score: Score | None


class _Rows(Protocol):
    @property
    def next_id(self) -> int: ...
    def present(self, ids: Tensor) -> Tensor: ...


def floating(who: str, dtype: torch.dtype) -> torch.dtype:
    """Read the dtype of a memory."""
    if dtype not in DTYPES.values():
        names = ", ".join(str(known) for known in DTYPES.values())
        raise DtypeError(f"{who}: dtype must be one of {names}. Got {dtype!r}.")
    return dtype


def path(who: str, given: str | os.PathLike[str]) -> Path:
    """Read the path of a folder."""
    if not isinstance(given, str | os.PathLike):
        raise DtypeError(f"{who}: path must be the path of a folder. Got {type(given).__name__}.")
    return Path(os.path.abspath(given))


def rows(who: str, memory: _Memory, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Read keys and values as (n, dim) each."""
    for name, x, dim in (("keys", keys, memory.key_dim), ("values", values, memory.value_dim)):
        _fits(who, memory, name, x)
        if x.dim() not in (1, 2) or x.shape[-1] != dim:
            raise ShapeError(f"{who}: {name} must be (n, {dim}), or ({dim},) for one row. Got {tuple(x.shape)}.")
        if not bool(x.detach().isfinite().all()):
            raise ArgumentError(f"{who}: {name} must be finite: one NaN would reach every read. Replace or drop it.")
    keys, values = (x if x.dim() == 2 else x[None] for x in (keys, values))
    if len(keys) != len(values):
        raise ShapeError(
            f"{who}: every key needs one value. Got keys {tuple(keys.shape)} and values {tuple(values.shape)}."
        )
    return keys, values


def graphless(who: str, keys: Tensor, values: Tensor) -> None:
    """Refuse rows whose gradient would be lost."""
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        raise ArgumentError(
            f"{who}: rows on disk have no gradient, and these require one. Write keys.detach() and values.detach(), or "
            f"hold them in a Memory(…) in memory."
        )


def queries(who: str, memory: _Memory, given: Tensor) -> None:
    """Check queries (…, dim)."""
    _fits(who, memory, "queries", given)
    if given.dim() == 0:
        raise ShapeError(f"{who}: queries must be (…, {memory.key_dim}). Got a single number.")
    score, dim = memory.score, given.shape[-1]
    reason = None if score is None else score.misfit(dim, memory.key_dim, 1)
    if reason is not None or (score is None and dim != memory.key_dim):
        reason = reason or f"the last dimension must be key_dim, {memory.key_dim}"
        raise ShapeError(f"{who}: {reason}. Got queries {tuple(given.shape)}.")


def temperature(who: str, given: float | Tensor, device: torch.device) -> float | Tensor:
    """Read a temperature: one number above 0, or a tensor of one, which may have a gradient."""
    if isinstance(given, Tensor):
        if given.numel() != 1 or not given.is_floating_point():
            raise ShapeError(f"{who}: temperature must be one floating number. Got {given.dtype} {tuple(given.shape)}.")
        number = float(given.detach())
    elif isinstance(given, bool) or not isinstance(given, Real):
        raise DtypeError(f"{who}: temperature must be a number. Got {type(given).__name__}.")
    else:
        number = float(given)
    if not number > 0 or not math.isfinite(number):
        raise ArgumentError(
            f"{who}: temperature must be finite and above 0. Got {number}; for the nearest row alone take top=1."
        )
    return given.reshape(()).to(device) if isinstance(given, Tensor) else number


def top(who: str, given: int | None, count: int | None = None) -> int | None:
    """Read how many rows to read, where there are any; `count` is how many there are, where that is known."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, Integral) or given < 1):
        raise ArgumentError(f"{who}: top must be a whole number of rows, at least 1, or None for all. Got {given!r}.")
    if count == 0:
        raise ArgumentError(f"{who}: the memory is empty, so there is nothing to average. Call write(keys, values).")
    return None if given is None else int(given) if count is None else min(int(given), count)


def part(who: str, given: tuple[int, int] | None, mode: str) -> tuple[int, int]:
    """Read which part of the rows, and of how many."""
    if given is None:
        return 0, 1
    pair = tuple(given) if isinstance(given, tuple | list) else ()
    if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, Integral) for x in pair):
        raise DtypeError(f"{who}: part must be (rank, ranks), two whole numbers. Got {given!r}.")
    if not 0 <= pair[0] < pair[1]:
        raise ArgumentError(f"{who}: part must be (rank, ranks) with 0 ≤ rank < ranks. Got {given!r}.")
    if mode != "r":
        raise ArgumentError(f"{who}: a part is read only: rows go to the whole memory. Open it without part= to write.")
    return int(pair[0]), int(pair[1])


def part_of(who: str, given: tuple[int, int], ranks: tuple[int, int]) -> None:
    """Refuse a part that is not the rank's own."""
    if given != ranks:
        raise ArgumentError(
            f"{who}: rank {ranks[0]} of {ranks[1]} must hold part={ranks} of the memory, so that each row is read "
            f"once. Got part={given}."
        )


def ids(who: str, given: Tensor | Sequence[int] | None, device: torch.device) -> Tensor | None:
    """Read ids: whole numbers in one dimension, none twice."""
    if given is None:
        return None
    try:
        found = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise DtypeError(f"{who}: ids must be whole numbers in one dimension. Got {given!r}.") from None
    found = found.to(torch.int64) if found.numel() == 0 else found
    if found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool or found.dim() > 1:
        raise DtypeError(f"{who}: ids must be whole numbers in one dimension. Got {found.dtype} {tuple(found.shape)}.")
    found = found.to(torch.int64).reshape(-1)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < 2**63 - 1:
        raise ArgumentError(
            f"{who}: ids must be from 0 to 2⁶³ − 2. Got {_some(found[(found < 0) | (found == 2**63 - 1)])}."
        )
    order = found.sort().values
    if len(order) and bool((order.diff() == 0).any()):
        raise ArgumentError(f"{who}: an id must come once. Twice came {_some(order[1:][order.diff() == 0])}.")
    return found


def new(who: str, found: Tensor, held: _Rows, count: int) -> None:
    """Refuse ids that are held already, or that are not one a row."""
    if len(found) != count:
        raise ShapeError(f"{who}: every row needs one id. Got {count} rows and {len(found)} ids.")
    if not len(found) or int(found.min()) >= held.next_id:
        return
    there = held.present(found).to(found.device)
    if bool(there.any()):
        raise ArgumentError(
            f"{who}: the memory holds the ids {_some(found[there])} already. Delete them first, or leave ids out."
        )


def known(who: str, found: Tensor, held: _Rows) -> None:
    """Refuse ids that are not held."""
    if not len(found):
        return
    absent = ~held.present(found).to(found.device)
    if bool(absent.any()):
        raise ArgumentError(f"{who}: the memory holds no rows with the ids {_some(found[absent])}. Nothing is deleted.")


def _fits(who: str, memory: _Memory, name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise DtypeError(f"{who}: {name} must be a tensor. Got {type(x).__name__}.")
    if x.dtype != memory.dtype:
        raise DtypeError(f"{who}: {name} must be {memory.dtype}, as the memory is. Got {x.dtype}; convert with .to().")
    if (x.device.type, x.device.index or 0) != (memory.device.type, memory.device.index or 0):
        raise DeviceError(f"{who}: {name} must be on {memory.device}. Got {x.device}; move with .to().")


def _some(found: Tensor) -> str:
    few = ", ".join(str(int(i)) for i in found[:5])
    return few if len(found) <= 5 else f"{few} and {len(found) - 5} more"
