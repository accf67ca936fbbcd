"""The formula in four readable steps: scores, scaled scores, weights, output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .compat.torch import without_autocast
from .core.problem import Problem
from .display import block, matrix
from .softmax import stable

__all__ = ["Steps", "walk"]

_SHOWN, _MORE = 8, "…"  # rows and columns that are printed, and what stands for the others


@dataclass(frozen=True, repr=False)
class Steps:
    """The four stages of softmax(Q Kᵀ · scale) V; `str` prints them as matrices, each with a sentence on what it is."""

    scores: Tensor  # (…, N, M)  Q Kᵀ
    scaled: Tensor  # (…, N, M)  scores · scale, −inf where hidden
    weights: Tensor  # (…, N, M)  softmax of each row
    output: Tensor  # (…, N, Dv)  weights V
    scale: float

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n\n".join(_stage(name, getattr(self, name), fact) for name, fact in self._facts().items())

    def _repr_html_(self) -> str:
        parts = []
        for name, fact in self._facts().items():
            x = getattr(self, name)
            first = x[(0,) * (x.dim() - 2)] if x.numel() else x.new_zeros(0, 0)
            more = "" if x.dim() == 2 or not x.numel() else " (the first of them)"
            shades = first[:_SHOWN, :_SHOWN].tolist() if name == "weights" else ()
            parts.append(matrix(f"{name} {tuple(x.shape)}: {fact}{more}", _cells(first), shades))
        return block("", *parts)

    def _facts(self) -> dict[str, str]:
        """What each stage is, in a sentence."""
        sums = self.weights.double().sum(-1)
        empty = sums == 0
        return {
            "scores": "Q Kᵀ: entry (i, j) is the dot product of query i and key j",
            "scaled": f"scores × {self.scale:.4g}" + ("; −inf where the mask hides" if self._hides() else ""),
            "weights": f"softmax of each row: non-negative, row sums {_range(sums[~empty])}"
            + (f"; {int(empty.sum())} rows see nothing and are 0" if bool(empty.any()) else ""),
            "output": "weights V: each row is a convex combination of the values",
        }

    def _hides(self) -> bool:
        return bool((self.scaled == -torch.inf).any())


@without_autocast
def walk(p: Problem) -> Steps:
    """Compute the four steps in float32, or in float64 for float64 inputs."""
    exact = p.exact_dtype
    query, key, value = p.query.to(exact), p.key.to(exact), p.value.to(exact)
    groups = query.shape[1] // max(key.shape[1], 1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT
    scaled = scores * p.scale
    if p.mask is not None:
        allowed = p.mask.dense(p.rows, p.keys, p.device)
        if allowed.dim() == 4 and allowed.shape[0] > 1:  # several flattened items share one item of the mask
            allowed = allowed.repeat_interleave(query.shape[0] // allowed.shape[0], 0)
        scaled = scaled.masked_fill(~allowed, -torch.inf)
        value = torch.where(allowed.any(-2)[..., None], value, 0.0)  # or 0 · NaN would be NaN
    weights = stable(scaled)
    output = (weights @ value).to(p.dtype)
    return Steps(p.shaped(scores), p.shaped(scaled), p.shaped(weights.to(p.dtype)), p.shaped(output), float(p.scale))


def _stage(name: str, x: Tensor, fact: str) -> str:
    head = f"{name} {tuple(x.shape)}: {fact}"
    if not x.numel():
        return head
    return head + "\n" + _matrix(x[(0,) * (x.dim() - 2)]) + ("" if x.dim() == 2 else "\n  (the first of them)")


def _matrix(x: Tensor) -> str:
    """The first rows and columns of a matrix as text."""
    cells = _cells(x)
    width = max((len(c) for row in cells for c in row), default=0)
    return "\n".join("  " + "  ".join(c if c == _MORE else c.rjust(width) for c in row) for row in cells)


def _cells(x: Tensor) -> list[list[str]]:
    """The first rows and columns of a matrix as texts, with an ellipsis where there are more."""
    rows, cols = x.shape
    cells = [[_cell(v) for v in row[:_SHOWN]] + [_MORE] * (cols > _SHOWN) for row in x[:_SHOWN].tolist()]
    return cells + [[_MORE]] * (rows > _SHOWN)


def _cell(v: float) -> str:
    return "−inf" if v == -torch.inf else f"{v:.3f}"


def _range(sums: Tensor) -> str:
    if not sums.numel():
        return "–"
    return f"{sums.min():.6f}" + (f" to {sums.max():.6f}" if f"{sums.min():.6f}" != f"{sums.max():.6f}" else "")
