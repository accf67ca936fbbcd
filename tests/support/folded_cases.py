"""Folded problems in float64, with keys in more than one run, and the formula on the whole matrix of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard
from regard import biases, scores
from regard.chunked.engine import ChunkedEngine
from regard.core.folded import FoldedProblem, fold
from regard.core.formula import attend
from regard.core.problem import Problem
from regard.core.tiling import Tile, TileSizes
from regard.core.validation import pose

__all__ = [
    "BATCH",
    "CASES",
    "FEW_ROWS",
    "HEADS",
    "KEYS",
    "KEY_HEADS",
    "ROWS",
    "cotangents",
    "engine_of",
    "folded",
    "formula_of",
    "posed",
    "random_like",
    "tensors_of",
]

BATCH, HEADS, KEY_HEADS, ROWS, KEYS = 2, 4, 2, 9, 300
FEW_ROWS = TileSizes(rows=4)  # two rows of two grouped heads


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": regard.causal()},
    "a gap between runs": {"mask": regard.prefix(40) | ~regard.prefix(270)},
    "rows without keys": {"mask": regard.causal(offset=-4)},
    "bias": {"bias": _randn(HEADS, ROWS, KEYS)},
    "alibi": {"bias": biases.alibi(_randn(HEADS).abs())},
    "relative": {"bias": biases.relative(_randn(HEADS, 11))},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout": 0.3},
    "additive": {"score": scores.Additive(4, 4, 3).double()},
    "together": {"mask": regard.window(150), "bias": _randn(ROWS, KEYS), "softcap": 2.0, "dropout": 0.2},
}


def posed(name: str) -> Problem:
    """The problem of a case, checked."""
    made = torch.Generator().manual_seed(0)
    shapes = (BATCH, HEADS, ROWS, 4), (BATCH, KEY_HEADS, KEYS, 4), (BATCH, KEY_HEADS, KEYS, 3)
    tensors = (torch.randn(s, dtype=torch.float64, generator=made) for s in shapes)
    return pose(*tensors, **CASES[name], observed=True)


def folded(name: str) -> FoldedProblem:
    """The folded problem of a case, without a graph."""
    x = fold(posed(name), seed=3)
    return x._replace(
        query=x.query.detach(),
        key=x.key.detach(),
        value=x.value.detach(),
        bias=None if x.bias is None else x.bias.detach(),
        shared=tuple(t.detach() for t in x.shared),
    )


def tensors_of(x: FoldedProblem) -> tuple[Tensor | None, ...]:
    return x.query, x.key, x.value, x.bias, *x.shared


def engine_of(x: FoldedProblem) -> ChunkedEngine:
    return ChunkedEngine(x.spec, FEW_ROWS, observed=True)


def formula_of(x: FoldedProblem) -> tuple[Any, tuple[Tensor, ...]]:
    """Output, lse (0 where a row has no key) and entropy as a function of the tensors that are there, and these."""
    there = tuple(t is not None for t in tensors_of(x))
    tile = Tile(slice(0, BATCH), slice(0, KEY_HEADS), slice(0, ROWS), slice(0, KEYS))

    def formula(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left = iter(given)
        rows = attend(x.spec, tile, *(next(left) if is_there else None for is_there in there))
        return rows.output, torch.where(rows.lse > -torch.inf, rows.lse, 0.0), rows.entropy

    return formula, tuple(t for t in tensors_of(x) if t is not None)


def random_like(t: Tensor | None, seed: int) -> Tensor | None:
    made = torch.Generator().manual_seed(seed)
    return None if t is None else torch.randn(t.shape, dtype=t.dtype, generator=made)


def cotangents(x: FoldedProblem, only: int | None, seed: int = 0) -> tuple[Tensor | None, ...]:
    """Cotangents of output, lse and entropy, all or one of them."""
    rows = engine_of(x).forward(tensors_of(x))
    return tuple(random_like(t, seed + at) if only in (None, at) else None for at, t in enumerate(rows[:3]))
