"""Tangents: of a problem's tensors, and of the logits of a tile."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..autograd.engine import MaybeTensors
from ..autograd.strip_map import filled, jvp_of
from ..core.folded import FoldedProblem
from ..core.formula import bias_tile, scores
from ..core.nonfinite import all_finite, visible_rows_and_keys
from ..core.tiling import BIAS, KEY, QUERY, Tile
from .tile_ops import Workspace

__all__ = ["LogitTangents", "tanh_tile"]


class LogitTangents:
    """The tangents of a problem's tensors, and of the logits of a tile."""

    def __init__(self, x: FoldedProblem, w: MaybeTensors) -> None:
        self.x = x
        query, key, value, self.bias, *self.shared = w
        self.query, self.key, self.value = self._visible(query, key, value)

    def _visible(self, query: Tensor | None, key: Tensor | None, value: Tensor | None) -> MaybeTensors:
        """The tangents with zeros in hidden rows and keys if a NaN or inf is there, as in the tensors themselves."""
        x, spec = self.x, self.x.spec
        hides = spec.mask is not None or spec.bias is not None or x.bias is not None
        if not hides or all_finite(*(t for t in (query, key, value) if t is not None)):
            return query, key, value
        rows, keys = visible_rows_and_keys(spec, x.query.flatten(1, 2), x.key, x.bias)
        rows, keys = rows.unflatten(1, x.query.shape[1:3])[..., None], keys[..., None]
        shown = ((query, rows), (key, keys), (value, keys))
        return tuple(None if t is None else torch.where(some, t, 0.0) for t, some in shown)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor] | None:
        """Rows and keys whose products are dq·k + q·dk; None if neither has a tangent."""
        pairs = [(self.query, self.x.key)] if self.query is not None else []
        pairs += [(self.x.query, self.key)] if self.key is not None else []
        return (torch.cat([q for q, _ in pairs], -1), torch.cat([k for _, k in pairs], -1)) if pairs else None

    @cached_property
    def values(self) -> Tensor:
        """Values, with their tangents beside them if they have any."""
        return self.x.value if self.value is None else torch.cat((self.x.value, self.value), -1)

    def scores(self, tile: Tile, workspace: Workspace) -> Tensor | None:
        """The tangent of the scores (l, k, g, r, c), before cap and bias; None if they have none."""
        spec = self.x.spec
        if spec.pairwise:
            given = (QUERY.part(self.x.query, tile), KEY.part(self.x.key, tile), *self.x.shared[: spec.paired])
            moved = [self.query, self.key, *self.shared[: spec.paired]]
            moved[0] = None if moved[0] is None else QUERY.part(moved[0], tile)
            moved[1] = None if moved[1] is None else KEY.part(moved[1], tile)
            return jvp_of(lambda q, k, *s: (scores(spec, tile, q, k, s),), given, filled(given, moved))[1][0]
        if self._factors is None:
            return None
        rows, keys = self._factors
        return workspace.product(
            "tangents",
            QUERY.part(rows, tile),
            workspace.transposed("tangents of keys", keys, spec.n, tile),
        )

    def logits(self, tile: Tile, scores: Tensor | None, groups: int) -> Tensor | None:
        """The tangent of the logits, made of that of the scores; None if they have none."""
        spec, T = self.x.spec, scores
        if T is not None and spec.softcap is not None:
            T = T * (1 - tanh_tile(self.x, tile).square_())
        added = None if self.bias is None else BIAS.part(self.bias, tile)
        tables = self.shared[spec.paired :]
        if spec.bias is not None and any(t is not None for t in tables):
            given = self.x.shared[spec.paired :]
            fixed = self.x.shared[: spec.paired]
            added = jvp_of(
                lambda *t: (bias_tile(spec, tile, groups, None, (*fixed, *t)),), given, filled(given, tables)
            )[1][0]
        if added is None or T is None:
            return T if added is None else added.to(self.x.query.dtype)
        return T.add_(added)


def tanh_tile(x: FoldedProblem, tile: Tile) -> Tensor:
    """tanh(score / cap) of a tile."""
    raw = scores(x.spec, tile, QUERY.part(x.query, tile), KEY.part(x.key, tile), x.shared)
    return raw if x.spec.softcap is None else (raw / x.spec.softcap).tanh_()
