"""Keys and values that nobody may attend leave no trace, not even if they are NaN or inf."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._C import _functorch

from .formula import hidden
from .rule import Rule
from .tile import BIAS
from .tiling import Cut, strips

__all__ = ["all_finite", "attended", "without_unseen"]


@torch.no_grad()
def all_finite(*tensors: Tensor) -> bool:
    """Whether no NaN or inf is in them; a sum that overflows counts as one, which costs time and nothing else."""
    total = _inside(tensors[0]).sum()
    for x in tensors[1:]:
        total = total + _inside(x).sum()
    return math.isfinite(float(total))


def without_unseen(rule: Rule, key: Tensor, value: Tensor, bias: Tensor | None, groups: int) -> tuple[Tensor, Tensor]:
    """Zero the keys and values (L, K, M, …) that no query may attend, if a NaN or inf in them could reach something."""
    if (rule.mask is None and bias is None) or all_finite(key, value):
        return key, value
    seen = attended(rule, key, bias, groups)[..., None]
    return torch.where(seen, key, 0.0), torch.where(seen, value, 0.0)


@torch.no_grad()
def attended(rule: Rule, key: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Which keys (L, K, M) some query may attend."""
    batch, heads, m = key.shape[:3]
    seen = torch.zeros(batch, heads, m, dtype=torch.bool, device=key.device)
    if bias is not None:
        bias = (
            None if _functorch.is_batchedtensor(bias) else _inside(bias)
        )  # a batched bias hides differently each time
    for strip in strips(rule, (batch, heads, groups), Cut()):
        for run in strip.runs:
            tile = strip.tile(run)
            part = seen[strip.batch, strip.heads, run.start : run.stop]
            shown = torch.ones((), dtype=torch.bool, device=seen.device)
            if not run.full and (hide := hidden(rule, tile, groups, seen.device)) is not None:
                shown = ~hide
            if bias is not None:
                shown = shown & (BIAS.part(bias, tile) != -torch.inf)
            rows = tile.rows.stop - tile.rows.start
            part |= shown.expand(*part.shape[:2], groups, rows, part.shape[2]).flatten(2, 3).any(2)
    return seen


def _inside(x: Tensor) -> Tensor:
    """The plain tensor under the wrappers of torch.func."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x
