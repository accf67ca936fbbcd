"""What nobody may see leaves no trace, not even if it is NaN or inf: keys, values, and queries without a key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arithmetic import batched, inside
from .formula import hidden
from .rule import Rule
from .tile import BIAS, ROW
from .tiling import Cut, strips

__all__ = ["all_finite", "seen", "without_unseen"]


def all_finite(*tensors: Tensor) -> bool:
    """Whether no NaN or inf is in them; a sum that overflows counts as one, which costs time and nothing else."""
    return all(x.is_meta or math.isfinite(inside(x).sum().item()) for x in tensors)


def without_unseen(
    rule: Rule, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero what takes no part, if a NaN or inf in it could reach something: (L, H, N, D), (L, K, M, …)."""
    if (rule.mask is None and bias is None) or all_finite(query, key, value):
        return query, key, value
    rows, keys = seen(rule, query, key, bias)
    keys = keys[..., None]
    return torch.where(rows[..., None], query, 0.0), torch.where(keys, key, 0.0), torch.where(keys, value, 0.0)


@torch.no_grad()
def seen(rule: Rule, query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which rows (L, H, N) may attend some key, and which keys (L, K, M) some row may attend."""
    batch, heads, m = key.shape[:3]
    groups = query.shape[1] // max(heads, 1)
    rows = torch.zeros(batch, heads, groups, rule.n, dtype=torch.bool, device=key.device)
    keys = torch.zeros(batch, heads, m, dtype=torch.bool, device=key.device)
    if bias is not None:
        bias = None if batched(bias) else inside(bias)  # a batched bias hides differently each time
    for strip in strips(rule, rows.shape, Cut()):
        for run in strip.runs:
            tile = strip.tile(run)
            row, col = ROW.part(rows, tile), keys[strip.batch, strip.heads, run.start : run.stop]
            shown = torch.ones((), dtype=torch.bool, device=key.device)
            if not run.full and (hide := hidden(rule, tile, groups, key.device)) is not None:
                shown = ~hide
            if bias is not None:
                shown = shown & (BIAS.part(bias, tile) != -torch.inf)
            shown = shown.expand(*row.shape, col.shape[-1])  # (l, k, g, r, c)
            row |= shown.any(-1)
            col |= shown.flatten(2, 3).any(2)
    return rows.flatten(1, 2), keys
