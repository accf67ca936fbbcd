"""`chunked`: exact attention in linear memory, in pure torch, on any device, with every feature."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from ..autograd.engine import attend
from ..chunked.engine import ChunkedEngine
from ..compat.torch import forward_mode_is_active, not_traced, transforms_are_active, without_autocast
from ..core.dropout import draw_seed, drawn_in_graph
from ..core.folded import fold, unfold
from ..core.nonfinite import attend_apart
from ..core.problem import Problem
from ..core.rows import Rows
from ..core.tiling import TileSizes
from ..errors import ArgumentError
from .base import Backend

__all__ = ["Chunked"]


class Chunked(Backend):
    """Linear memory on any device; a tile has at most `chunk_size` rows, those of grouped heads counted together.

    On a CPU, tiles are smaller, and as many are in flight as torch has threads; their number changes no bits.

    >>> import regard
    >>> q = torch.randn(1, 2, 100, 8)
    >>> small = regard.attention(q, q, q, backend=regard.backends.Chunked(chunk_size=16))
    >>> torch.allclose(small, regard.attention(q, q, q), atol=1e-5)
    True
    """

    name: ClassVar[str] = "chunked"
    about: ClassVar[str] = "strips of rows in plain torch, linear memory"

    def __init__(self, chunk_size: int = 512) -> None:
        if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
            raise ArgumentError(f"Chunked: chunk_size must be a whole number of rows, at least 1. Got {chunk_size!r}.")
        self.chunk_size = chunk_size

    @property
    def tile_sizes(self) -> TileSizes:
        return TileSizes(rows=self.chunk_size)

    def refuses(self, p: Problem) -> list[str]:
        return []

    def run(self, p: Problem) -> Rows:
        if not torch.compiler.is_compiling():
            return self._run(p)
        if forward_mode_is_active() or transforms_are_active():  # an operator has no rules for them
            return self._untraced(p)
        return self._traced(p)

    def _traced(self, p: Problem) -> Rows:
        """Under torch.compile: score, scale and sink in the graph, and the passes as operators."""
        from ..kernels import custom_ops

        seed = drawn_in_graph(p.device) if p.dropout else 0
        part = custom_ops.encodable(p)
        x = fold(part if p.score is None else custom_ops.zero_unseen(part), seed, finite=True)
        engine = ChunkedEngine(replace(x.spec, read=None), self.tile_sizes, p.observed, lse_is_read=p.sink is not None)
        return unfold(p, custom_ops.attend(engine, x.inputs))

    @not_traced
    def _untraced(self, p: Problem) -> Rows:
        return self._run(p)

    @without_autocast
    def _run(self, p: Problem) -> Rows:
        seed = draw_seed(p.who) if p.dropout else 0

        def run(part: Problem, finite: bool) -> Rows:
            x = fold(part, seed, finite)
            engine = ChunkedEngine(x.spec, self.tile_sizes, p.observed)
            return unfold(p, attend(engine, x.inputs))

        return attend_apart(p, run)

    def __repr__(self) -> str:
        return f"regard.backends.Chunked(chunk_size={self.chunk_size})"
