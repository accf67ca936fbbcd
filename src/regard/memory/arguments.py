"""Checks of the arguments of Memory, made before anything is changed."""

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
    "check_dtype",
    "check_ids",
    "check_ids_are_held",
    "check_ids_are_new",
    "check_no_gradient",
    "check_part",
    "check_part_of_rank",
    "check_path",
    "check_queries",
    "check_rows",
    "check_temperature",
    "check_top",
]


class _Memory(Protocol):
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    score: Score | None


class _Store(Protocol):
    @property
    def next_id(self) -> int: ...
    def contains(self, ids: Tensor) -> Tensor: ...


def check_dtype(who: str, dtype: torch.dtype) -> torch.dtype:
    """Check the dtype of a memory."""
    if dtype not in DTYPES.values():
        names = ", ".join(str(known) for known in DTYPES.values())
        raise DtypeError(f"{who}: dtype must be one of {names}. Got {dtype!r}.")
    return dtype


def check_path(who: str, path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder."""
    if not isinstance(path, str | os.PathLike):
        raise DtypeError(f"{who}: path must be the path of a folder. Got {type(path).__name__}.")
    return Path(os.path.abspath(path))


def check_rows(who: str, memory: _Memory, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Check keys and values, and return them as (n, dim) each."""
    for name, x, dim in (("keys", keys, memory.key_dim), ("values", values, memory.value_dim)):
        _check_tensor(who, memory, name, x)
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


def check_no_gradient(who: str, keys: Tensor, values: Tensor) -> None:
    """Refuse rows whose gradient would be lost."""
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        raise ArgumentError(
            f"{who}: rows on disk have no gradient, and these require one. Write keys.detach() and values.detach(), or "
            f"use a Memory(…) that holds its rows in memory."
        )


def check_queries(who: str, memory: _Memory, queries: Tensor) -> None:
    """Check queries (…, dim)."""
    _check_tensor(who, memory, "queries", queries)
    if queries.dim() == 0:
        raise ShapeError(f"{who}: queries must be (…, {memory.key_dim}). Got a single number.")
    score, dim = memory.score, queries.shape[-1]
    reason = None if score is None else score.misfit(dim, memory.key_dim, 1)
    if reason is not None or (score is None and dim != memory.key_dim):
        reason = reason or f"the last dimension must be key_dim, {memory.key_dim}"
        raise ShapeError(f"{who}: {reason}. Got queries {tuple(queries.shape)}.")


def check_temperature(who: str, temperature: float | Tensor, device: torch.device) -> float | Tensor:
    """Check a temperature: a number above 0, or a tensor with one element, which may require a gradient."""
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1 or not temperature.is_floating_point():
            raise ShapeError(
                f"{who}: temperature must be one floating number. Got {temperature.dtype} {tuple(temperature.shape)}."
            )
        number = float(temperature.detach())
    elif isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise DtypeError(f"{who}: temperature must be a number. Got {type(temperature).__name__}.")
    else:
        number = float(temperature)
    if not number > 0 or not math.isfinite(number):
        raise ArgumentError(
            f"{who}: temperature must be finite and above 0. Got {number}; to read only the nearest row, use top=1."
        )
    return temperature.reshape(()).to(device) if isinstance(temperature, Tensor) else number


def check_top(who: str, top: int | None, count: int | None = None) -> int | None:
    """Check how many rows to read, and limit it to `count`, the number of rows, if that is known."""
    if top is not None and (isinstance(top, bool) or not isinstance(top, Integral) or top < 1):
        raise ArgumentError(f"{who}: top must be a whole number of rows, at least 1, or None for all. Got {top!r}.")
    if count == 0:
        raise ArgumentError(f"{who}: the memory is empty, so there is nothing to average. Call write(keys, values).")
    return None if top is None else int(top) if count is None else min(int(top), count)


def check_part(who: str, part: tuple[int, int] | None, mode: str) -> tuple[int, int]:
    """Check `part`, (rank, ranks); None is all rows."""
    if part is None:
        return 0, 1
    pair = tuple(part) if isinstance(part, tuple | list) else ()
    if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, Integral) for x in pair):
        raise DtypeError(f"{who}: part must be (rank, ranks), two whole numbers. Got {part!r}.")
    rank, ranks = int(pair[0]), int(pair[1])
    if not 0 <= rank < ranks:
        raise ArgumentError(f"{who}: part must be (rank, ranks) with 0 ≤ rank < ranks. Got {part!r}.")
    if mode != "r":
        raise ArgumentError(f"{who}: a part is read only, as rows are written to the whole. Open it without part=.")
    return rank, ranks


def check_part_of_rank(who: str, part: tuple[int, int], rank: int, ranks: int) -> None:
    """Refuse a part that belongs to another rank."""
    if part != (rank, ranks):
        raise ArgumentError(
            f"{who}: rank {rank} of {ranks} must hold part={(rank, ranks)} of the memory, so that each row is read "
            f"once. Got part={part}."
        )


def check_ids(who: str, ids: Tensor | Sequence[int] | None, device: torch.device) -> Tensor | None:
    """Return ids as an int64 tensor of one dimension without duplicates."""
    if ids is None:
        return None
    try:
        found = torch.as_tensor(ids, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise DtypeError(f"{who}: ids must be whole numbers in one dimension. Got {ids!r}.") from None
    found = found.to(torch.int64) if found.numel() == 0 else found
    if found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool or found.dim() > 1:
        raise DtypeError(f"{who}: ids must be whole numbers in one dimension. Got {found.dtype} {tuple(found.shape)}.")
    found = found.to(torch.int64).reshape(-1)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < 2**63 - 1:
        raise ArgumentError(
            f"{who}: ids must be from 0 to 2⁶³ − 2. Got {_first_few(found[(found < 0) | (found == 2**63 - 1)])}."
        )
    ordered = found.sort().values
    repeated = ordered[1:][ordered.diff() == 0]
    if len(repeated):
        raise ArgumentError(f"{who}: ids must be unique. These are repeated: {_first_few(repeated)}.")
    return found


def check_ids_are_new(who: str, ids: Tensor, store: _Store, count: int) -> None:
    """Refuse ids that are already held, or that are not one per row."""
    if len(ids) != count:
        raise ShapeError(f"{who}: every row needs one id. Got {count} rows and {len(ids)} ids.")
    if not len(ids) or int(ids.min()) >= store.next_id:
        return
    held = store.contains(ids).to(ids.device)
    if bool(held.any()):
        raise ArgumentError(
            f"{who}: the memory already holds the ids {_first_few(ids[held])}. Delete them first, or leave ids out."
        )


def check_ids_are_held(who: str, ids: Tensor, store: _Store) -> None:
    """Refuse ids that are not held."""
    if not len(ids):
        return
    missing = ~store.contains(ids).to(ids.device)
    if bool(missing.any()):
        raise ArgumentError(
            f"{who}: the memory holds no rows with the ids {_first_few(ids[missing])}. Nothing was deleted."
        )


def _check_tensor(who: str, memory: _Memory, name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise DtypeError(f"{who}: {name} must be a tensor. Got {type(x).__name__}.")
    if x.dtype != memory.dtype:
        raise DtypeError(f"{who}: {name} must be {memory.dtype}, as the memory is. Got {x.dtype}; convert with .to().")
    if (x.device.type, x.device.index or 0) != (memory.device.type, memory.device.index or 0):
        raise DeviceError(f"{who}: {name} must be on {memory.device}. Got {x.device}; move it with .to().")


def _first_few(ids: Tensor) -> str:
    few = ", ".join(str(int(i)) for i in ids[:5])
    return few if len(ids) <= 5 else f"{few} and {len(ids) - 5} more"
