"""`reference`: the formula on the whole matrix, in any precision: the truth, and slow."""

from __future__ import annotations

from typing import ClassVar

from ..core.dropout import draw_seed
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
        seed = draw_seed(p.who) if p.dropout else 0

        def run(part: Problem, finite: bool) -> Rows:
            x = fold(part, seed, finite)
            batch, heads = x.query.shape[:2]
            spec = x.spec
            tile = Tile(slice(0, batch), slice(0, heads), slice(0, spec.n), slice(0, spec.m))
            return unfold(p, attend(spec, tile, x.query, x.key, x.value, x.bias, *x.shared))

        return attend_apart(p, run)
