"""Problems whose tiles are computed in batches."""

from __future__ import annotations

from collections.abc import Callable

import torch

import regard
from regard.core.folded import FoldedProblem
from regard.core.spec import Spec
from regard.masks import Mask

__all__ = ["MASKS", "N", "problem"]

N = 300
MASKS: dict[str, Callable[[], Mask | None]] = {
    "none": lambda: None,
    "causal": lambda: regard.causal(),
    "a window": lambda: regard.window(40),
    "a window with both sides": lambda: regard.window(200, 20),
    "a window that hides the first rows' keys": lambda: regard.causal(offset=-70),
    "equal documents": lambda: regard.documents(torch.arange(N) // 50) & regard.causal(),
    "unequal documents": lambda: regard.documents(torch.tensor([0] * 7 + [1] * 130 + [2] * 163)),
    "padding": lambda: regard.padding(torch.tensor([177])),
    "nothing": lambda: ~regard.everything(),
    "a window and a global token": lambda: regard.window(40) | regard.global_tokens([0]),
    "a causal window and sinks": lambda: regard.causal() & (regard.window(20, 200) | regard.prefix(70)),
    "all but a window": lambda: ~regard.window(90, 10),
    "a window or padding": lambda: regard.window(30, 0) | regard.padding(torch.tensor([77])),
}


def problem(mask: Mask | None, heads: int = 2, groups: int = 1) -> FoldedProblem:
    query = torch.randn(1, heads, groups, N, 4)
    key, value = torch.randn(1, heads, N, 4), torch.randn(1, heads, N, 4)
    return FoldedProblem(query, key, value, None, (), Spec(N, N, mask))
