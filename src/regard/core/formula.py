"""The formula on one tile, in plain differentiable torch: the definition that everything else is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from ..softmax import lowest
from .dropout import keep
from .rows import Rows
from .spec import Spec
from .tiling import Points, Tile, mask_at

__all__ = ["attend", "bias_tile", "hidden", "kept", "logits", "products"]


def products(spec: Spec, query: Tensor, key: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
    """The scores (l, k, g, r, c) of queries (l, k, g, r, D) and keys (l, k, c, D)."""
    if spec.pair is not None:
        return spec.pair(query, key.unsqueeze(-3), *shared[: spec.paired])
    groups, rows = query.shape[-3:-1]
    flat = query.reshape(*query.shape[:-3], groups * rows, query.shape[-1])
    S: Tensor = (flat @ key.mT).unflatten(-2, (groups, rows))
    return S


def bias_tile(
    spec: Spec, tile: Tile | Points, groups: int, bias: Tensor | None, shared: tuple[Tensor, ...]
) -> Tensor | None:
    """The bias of a tile, broadcastable to (l, k, g, r, c)."""
    if bias is not None:
        return bias
    if spec.bias is None:
        return None
    tables = shared[spec.paired :]
    i, j = tile.indices(tables[0].device)
    added = spec.bias.tile(tables, i, j, spec.n, spec.m)  # (H|1, r, c)
    if added.shape[0] == 1:
        return added[:, None]
    some: Tensor = added[tile.heads.start * groups : tile.heads.stop * groups].unflatten(0, (-1, groups))
    return some


def logits(
    spec: Spec, tile: Tile | Points, query: Tensor, key: Tensor, bias: Tensor | None, shared: tuple[Tensor, ...]
) -> Tensor:
    """The logits of a tile: score, softcap, bias; the mask is not applied yet."""
    S = products(spec, query, key, shared)
    if spec.softcap is not None:
        S = spec.softcap * torch.tanh(S / spec.softcap)
    added = bias_tile(spec, tile, query.shape[-3], bias, shared)
    return S if added is None else S + added.to(S.dtype)


def hidden(spec: Spec, tile: Tile | Points, groups: int, device: torch.device) -> Tensor | None:
    """Which pairs the mask hides: bool, broadcastable to (l, k, g, r, c)."""
    if spec.mask is None:
        return None
    i, j = tile.indices(device)
    allowed = mask_at(spec, tile, groups).allows(i[:, None], j, spec.n, spec.m)
    if allowed.dim() == 4:
        if spec.inner > 1 and allowed.shape[0] > 1:  # several flattened items share one item of the mask
            items = torch.arange(tile.batch.start, tile.batch.stop, device=device) // spec.inner
            allowed = allowed[items - items[0]]
        batch, heads = allowed.shape[:2]
        shape = (batch, 1, 1) if heads == 1 else (batch, heads // max(groups, 1), groups)
        allowed = allowed.reshape(*shape, *allowed.shape[2:])
    return ~allowed


def kept(spec: Spec, tile: Tile, groups: int, device: torch.device) -> Tensor:
    """Which weights dropout keeps: bool (l, k, g, r, c)."""
    i, j = tile.indices(device)
    items = torch.arange(tile.batch.start, tile.batch.stop, device=device) % spec.period // spec.copies
    heads = torch.arange(tile.heads.start * groups, tile.heads.stop * groups, device=device)
    item, head, row, key = *spec.origin, *spec.corner
    survivors = keep(spec.dropout, spec.seed, items + item, heads + head, i + row, j + key)
    found: Tensor = survivors.unflatten(1, (tile.heads.stop - tile.heads.start, groups))
    return found


def attend(
    spec: Spec, tile: Tile, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *shared: Tensor
) -> Rows:
    """Scores, scaling, row-wise softmax, weighted sum: whole rows at once, any order of derivative."""
    groups = query.shape[-3]
    S = logits(spec, tile, query, key, bias, shared)  # (l, k, g, r, c)
    hide = hidden(spec, tile, groups, S.device)
    if bias is not None or spec.bias is not None:
        lost = torch.isneginf(S)
        hide = lost if hide is None else torch.logical_or(hide, lost)
    if hide is not None:
        S = torch.where(hide, 0.0, S)
    row_max = _row_max(S.detach(), hide)  # (l, k, g, r, 1)
    level = row_max.clamp(min=lowest(S.dtype))
    X = S - level if hide is None else torch.where(hide, 0.0, S - level)
    E = X.exp() if hide is None else torch.where(hide, 0.0, X.exp())
    total = E.sum(-1, keepdim=True)  # (l, k, g, r, 1)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    P = E / total
    log_row_sum = total.log()
    lse = torch.where(empty, -torch.inf, level + log_row_sum).squeeze(-1)
    log_row_sum = log_row_sum.squeeze(-1)
    entropy = log_row_sum - (P * X).sum(-1)
    if spec.dropout:
        P = P * kept(spec, tile, groups, P.device) / (1 - spec.dropout)
    output = (P.flatten(-3, -2) @ value).unflatten(-2, P.shape[-3:-1])
    return Rows(output, lse, entropy, row_max.squeeze(-1), log_row_sum.detach())


def _row_max(S: Tensor, hide: Tensor | None) -> Tensor:
    """The largest visible logit of each row, −inf where there is none."""
    if S.shape[-1] == 0:
        return S.new_full((*S.shape[:-1], 1), -torch.inf)
    return (S if hide is None else S.masked_fill(hide, -torch.inf)).amax(-1, keepdim=True)
