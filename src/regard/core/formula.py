"""The formula itself on one tile, in plain differentiable torch: the truth that everything else is held to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..softmax import lowest
from .dropout import keep
from .spec import Rule
from .tiling import Spots, Tile, mask_at

__all__ = ["Rows", "attend", "bias_tile", "hidden", "kept", "logits", "products"]


class Rows(NamedTuple):
    """What the rows of the softmax come to, before the sink."""

    output: Tensor  # (L, K, G, N, E)
    lse: Tensor  # (L, K, G, N)
    entropy: Tensor  # the same; zeros where nobody observes
    max_logit: Tensor
    spread: Tensor  # lse − max_logit, to all digits even where the logits are large


def products(rule: Rule, query: Tensor, key: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
    """The scores (l, k, g, r, c) of queries (l, k, g, r, D) and keys (l, k, c, D)."""
    if rule.pair is not None:
        return rule.pair(query, key.unsqueeze(-3), *shared[: rule.paired])
    groups, rows = query.shape[-3:-1]
    flat = query.reshape(*query.shape[:-3], groups * rows, query.shape[-1])
    S: Tensor = (flat @ key.mT).unflatten(-2, (groups, rows))
    return S


def bias_tile(
    rule: Rule, tile: Tile | Spots, groups: int, bias: Tensor | None, shared: tuple[Tensor, ...]
) -> Tensor | None:
    """What is added to the logits of a tile, broadcastable to (l, k, g, r, c)."""
    if bias is not None:
        return bias
    if rule.bias is None:
        return None
    tables = shared[rule.paired :]
    i, j = tile.indices(tables[0].device)
    added = rule.bias.tile(tables, i, j, rule.n, rule.m)  # (H|1, r, c)
    if added.shape[0] == 1:
        return added[:, None]
    some: Tensor = added[tile.heads.start * groups : tile.heads.stop * groups].unflatten(0, (-1, groups))
    return some


def logits(
    rule: Rule, tile: Tile | Spots, query: Tensor, key: Tensor, bias: Tensor | None, shared: tuple[Tensor, ...]
) -> Tensor:
    """The logits of a tile: score, softcap, bias; what the mask hides is not hidden yet."""
    S = products(rule, query, key, shared)
    if rule.softcap is not None:
        S = rule.softcap * torch.tanh(S / rule.softcap)
    added = bias_tile(rule, tile, query.shape[-3], bias, shared)
    return S if added is None else S + added.to(S.dtype)


def hidden(rule: Rule, tile: Tile | Spots, groups: int, device: torch.device) -> Tensor | None:
    """Which pairs the mask hides: bool, broadcastable to (l, k, g, r, c)."""
    if rule.mask is None:
        return None
    i, j = tile.indices(device)
    allowed = mask_at(rule, tile, groups).allows(i[:, None], j, rule.n, rule.m)
    if allowed.dim() == 4:
        if allowed.shape[0] > 1 and rule.inner > 1:  # several flattened items share one item of the mask
            items = torch.arange(tile.batch.start, tile.batch.stop, device=device) // rule.inner
            allowed = allowed[items - items[0]]
        batch, heads = allowed.shape[:2]
        shape = (batch, 1, 1) if heads == 1 else (batch, heads // groups, groups)
        allowed = allowed.reshape(*shape, *allowed.shape[2:])
    return ~allowed


def kept(rule: Rule, tile: Tile, groups: int, device: torch.device) -> Tensor:
    """Which weights survive dropout: bool (l, k, g, r, c)."""
    i, j = tile.indices(device)
    items = torch.arange(tile.batch.start, tile.batch.stop, device=device) % rule.period // rule.copies
    heads = torch.arange(tile.heads.start * groups, tile.heads.stop * groups, device=device)
    item, head, row, key = *rule.origin, *rule.corner
    survivors = keep(rule.dropout, rule.seed, items + item, heads + head, i + row, j + key)
    found: Tensor = survivors.unflatten(1, (-1, groups))
    return found


def attend(
    rule: Rule, tile: Tile, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *shared: Tensor
) -> Rows:
    """Scores, scaling, row-wise softmax, weighted sum: whole rows at once, any order of derivative."""
    groups = query.shape[-3]
    S = logits(rule, tile, query, key, bias, shared)  # (l, k, g, r, c)
    hide = hidden(rule, tile, groups, S.device)
    if bias is not None or rule.bias is not None:
        lost = torch.isneginf(S)
        hide = lost if hide is None else torch.logical_or(hide, lost)
    if hide is not None:
        S = torch.where(hide, 0.0, S)
    peak = _peak(S.detach(), hide)  # (l, k, g, r, 1)
    level = peak.clamp(min=lowest(S.dtype))
    X = S - level if hide is None else torch.where(hide, 0.0, S - level)
    E = X.exp() if hide is None else torch.where(hide, 0.0, X.exp())
    total = E.sum(-1, keepdim=True)  # (l, k, g, r, 1)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    P = E / total
    spread = total.log()
    lse = torch.where(empty, -torch.inf, level + spread).squeeze(-1)
    spread = spread.squeeze(-1)
    entropy = spread - (P * X).sum(-1)
    if rule.dropout:
        P = P * kept(rule, tile, groups, P.device) / (1 - rule.dropout)
    output = (P.flatten(-3, -2) @ value).unflatten(-2, P.shape[-3:-1])
    return Rows(output, lse, entropy, peak.squeeze(-1), spread.detach())


def _peak(S: Tensor, hide: Tensor | None) -> Tensor:
    """The largest visible logit of each row, −inf where there is none."""
    if S.shape[-1] == 0:
        return S.new_full((*S.shape[:-1], 1), -torch.inf)
    return (S if hide is None else S.masked_fill(hide, -torch.inf)).amax(-1, keepdim=True)
