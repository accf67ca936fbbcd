"""The derivatives of an engine under vmap: one more dimension, folded into the batch."""

from __future__ import annotations

from typing import Any

import torch

from ..compat.torch import call_function

__all__ = ["apply_batched"]


def apply_batched(
    function: Any,
    size: int,
    in_dims: tuple[Any, ...],
    fixed: tuple[Any, ...],
    given: tuple[Any, ...],
    inputs: int | None = None,
) -> tuple[Any, Any]:
    """Apply a function over one more dimension: folded into the batch, or item by item if inputs have no batch."""
    x = given[: len(given) if inputs is None else inputs]
    if all(t is None for t in x[3:]):
        engine, at = fixed[0].batched(size)
        folded = [_folded(t, d, size, at) for t, d in zip(given, in_dims, strict=True)]
        batch = folded[0].shape[0] // size
        shape = (size, batch) if at == 0 else (batch, size)
        results = [
            None if r is None else r.unflatten(0, shape) for r in call_function(function, engine, *fixed[1:], *folded)
        ]
        return tuple(results), tuple(None if r is None else at for r in results)
    items = [
        call_function(
            function, *fixed, *(t if d is None else t.select(d, v) for t, d in zip(given, in_dims, strict=True))
        )
        for v in range(size)
    ]
    results = [None if column[0] is None else torch.stack(column) for column in zip(*items, strict=True)]
    return tuple(results), tuple(None if r is None else 0 for r in results)


def _folded(t: Any, d: int | None, size: int, at: int) -> Any:
    if t is None:
        return None
    wide = t.unsqueeze(at).expand(*t.shape[:at], size, *t.shape[at:]) if d is None else t.movedim(d, at)
    return wide.flatten(0, 1)
