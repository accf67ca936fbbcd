"""`reference`: the formula on the whole matrix, in any precision: the truth, and slow."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..compat.torch import is_traced
from ..core.dropout import draw_seed, drawn_in_graph
from ..core.folded import fold, unfold
from ..core.formula import attend
from ..core.nonfinite import attend_apart
from ..core.problem import Problem
from ..core.rows import Rows
from ..core.tiling import Tile
from .base import Backend

__all__ = ["Reference"]


class Reference(Backend):
    """Plain differentiable torch; the only backend that holds the N × M weights."""

    name: ClassVar[str] = "reference"
    about: ClassVar[str] = "the whole matrix, in plain torch"

    def refuses(self, p: Problem) -> list[str]:
        return []

    def run(self, p: Problem) -> Rows:
        seed: int | Tensor = 0
        if p.dropout:
            compiled = torch.compiler.is_compiling() and not is_traced()
            seed = drawn_in_graph(p.device) if compiled else draw_seed(p.who)

        def run(part: Problem, finite: bool) -> Rows:
            x = fold(part, seed, finite)
            batch, heads = x.query.shape[:2]
            spec = x.spec
            tile = Tile(slice(0, batch), slice(0, heads), slice(0, spec.n), slice(0, spec.m))
            return unfold(p, attend(spec, tile, x.query, x.key, x.value, x.bias, *x.shared))

        return attend_apart(p, run)
