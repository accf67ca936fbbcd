"""Keys and values that nobody may attend leave no trace, not even if they are NaN or inf."""

from __future__ import annotations

import torch
from torch import Tensor

from .canonical import Canonical
from .formula import hidden
from .tile import BIAS
from .tiling import Cut, strips

__all__ = ["all_finite", "attended", "without_unseen"]


def all_finite(*tensors: Tensor) -> bool:
    """Whether no NaN or inf is in them; a sum that overflows counts as one, which costs time and nothing else."""
    return all(bool(torch.isfinite(x.sum())) for x in tensors)


def without_unseen(x: Canonical, cut: Cut) -> Canonical:
    """Zero the keys and values that no query may attend, if a NaN or inf in them could reach something."""
    if (x.rule.mask is None and x.bias is None) or all_finite(x.key.detach(), x.value.detach()):
        return x
    seen = attended(x, cut)[..., None]
    return x._replace(key=torch.where(seen, x.key, 0.0), value=torch.where(seen, x.value, 0.0))


def attended(x: Canonical, cut: Cut) -> Tensor:
    """Which keys some query may attend: bool (L, K, M)."""
    seen = torch.zeros(x.key.shape[:-1], dtype=torch.bool, device=x.key.device)
    groups = x.query.shape[2]
    for strip in strips(x, cut):
        for run in strip.runs:
            tile = strip.tile(run)
            part = seen[strip.batch, strip.heads, run.start : run.stop]
            shown = torch.ones((), dtype=torch.bool, device=seen.device)
            if not run.full and (hide := hidden(x.rule, tile, groups, seen.device)) is not None:
                shown = ~hide
            if x.bias is not None:
                shown = shown & (BIAS.part(x.bias.detach(), tile) != -torch.inf)
            rows = tile.rows.stop - tile.rows.start
            part |= shown.expand(*part.shape[:2], groups, rows, part.shape[2]).flatten(2, 3).any(2)
    return seen
