"""The forward pass over batches of equal tiles: the online softmax folds each batch into the rows that it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.folded import FoldedProblem
from ..softmax import lowest
from .tile_batches import TileBatch, masked_logits
from .tile_ops import FLOOR, Workspace, exp_normal, multiply

__all__ = ["fold_batches"]


class RowSums(NamedTuple):
    """Running sums of rows: the max, Σ exp(X), Σ exp(X)·X and Σ exp(X)·V, with X = S − max."""

    max: Tensor  # (L, K, G, N)
    total: Tensor
    e: Tensor
    numerator: Tensor  # (L, K, G, N, E)

    def of(self, tiles: TileBatch) -> RowSums:
        """Those of a batch, (l, k, count, g, r) each, as views."""
        return RowSums(*(tiles.rows(x) for x in self))


def fold_batches(
    x: FoldedProblem, batches: Iterable[TileBatch], observed: bool, output: Tensor, totals: Tensor, workspace: Workspace
) -> None:
    """Leave row max, row sum and e of all rows in `totals`, and their numerators divided by the row sum in `output`."""
    sums = RowSums(totals[0], totals[1], totals[2], output)
    sums.max.fill_(lowest(totals.dtype))
    for tiles in batches:
        own = sums.of(tiles)
        new = _sums_of(x, tiles, observed, workspace)
        if tiles.opens:
            for old, found in zip(own, new, strict=True):
                old.copy_(found)
        else:
            _merge(own, new, observed)
    output.div_(sums.total.clamp(min=1.0)[..., None])


def _sums_of(x: FoldedProblem, tiles: TileBatch, observed: bool, workspace: Workspace) -> RowSums:
    S = masked_logits(x, tiles, workspace)
    m = S.amax(-1, keepdim=True)
    X = S.sub_(m if tiles.hidden is None else m.clamp_(min=lowest(S.dtype)))
    P = workspace.like("weights", X) if observed else X
    if tiles.hidden is None:
        torch.exp(X, out=P)
    else:
        exp_normal(X.clamp_(min=FLOOR[X.dtype]), out=P)
    l = P.sum(-1)  # noqa: E741
    e = X.mul_(P).sum(-1) if observed else torch.zeros_like(l)
    O = multiply(P, tiles.key_matrices(x.value))  # noqa: E741
    shape = tiles.rows(x.query).shape[:-1]
    return RowSums(m.view(shape), l.view(shape), e.view(shape), O.view(*shape, O.shape[-1]))


def _merge(old: RowSums, new: RowSums, observed: bool) -> None:
    """Add new sums to old ones, in place, both relative to the larger max."""
    top = torch.maximum(old.max, new.max)
    down = torch.stack((old.max, new.max)).sub_(top)
    a, b = down.exp().unbind()
    if observed:
        u, v = down.clamp_(min=-1e4).unbind()  # finite, and deep enough for exp to be 0
        old.e.addcmul_(u, old.total).mul_(a).addcmul_(b, new.e.addcmul_(v, new.total))
    old.total.mul_(a).addcmul_(b, new.total)
    old.numerator.mul_(a[..., None]).addcmul_(b[..., None], new.numerator)
    old.max.copy_(top)
