"""The formula on one tile, in plain differentiable torch: the definition that everything else is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from ..biases import Bias
from ..compat.torch import outside_transforms
from ..scores.elementwise import Pairs, apply
from ..softmax import lowest
from .dropout import keep, keep_pairs, row_keys
from .rows import Rows
from .spec import Positions, Spec
from .tiling import BIAS, Points, Tile, mask_at

__all__ = ["attend", "bias_tile", "hidden", "kept", "logits", "pairs_of", "products", "scores"]


def products(spec: Spec, query: Tensor, key: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
    """The scores (l, k, g, r, c) of queries (l, k, g, r, D) and keys (l, k, c, D)."""
    if spec.pair is not None:
        return spec.pair(query, key.unsqueeze(-3), *shared[: spec.tables.start])
    groups, rows = query.shape[-3:-1]
    flat = query.reshape(*query.shape[:-3], groups * rows, query.shape[-1])
    S: Tensor = (flat @ key.mT).unflatten(-2, (groups, rows))
    return S


def pairs_of(spec: Spec, tile: Tile | Points, groups: int, device: torch.device) -> Pairs:
    """The indices of a tile in the whole problem, which broadcast to (l, k, g, r, c)."""
    spec.check_unchanged()
    heads = torch.arange(tile.heads.start * groups, tile.heads.stop * groups, device=device)
    item, head, row, key = *spec.origin, *spec.corner
    if spec.positions is not None:
        one, rows, keys = _places(spec.positions, tile)
        return Pairs(
            (one + item).view(1, 1, 1, 1, 1),
            (heads + head).view(-1, groups, 1, 1),
            (rows + row)[:, None, None, :, None],
            (keys + key)[:, :, None, None, :],
        )
    items = torch.arange(tile.batch.start, tile.batch.stop, device=device) % spec.period // spec.copies
    i, j = tile.indices(device)
    return Pairs(
        (items + item).view(-1, 1, 1, 1, 1), (heads + head).view(-1, groups, 1, 1), (i + row)[:, None], j + key
    )


def scores(spec: Spec, tile: Tile | Points, query: Tensor, key: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
    """The scores (l, k, g, r, c) after a function of each, which gives 0 where the mask hides a pair."""
    S = products(spec, query, key, shared)
    if spec.pointwise is None:
        return S
    groups = query.shape[-3]
    with outside_transforms():  # indices and masks are no part of what is transformed
        pairs, hide = pairs_of(spec, tile, groups, S.device), hidden(spec, tile, groups, S.device)
    return apply(spec.pointwise, pairs, shared[spec.tables], S, hide)


def bias_tile(
    spec: Spec, tile: Tile | Points, groups: int, bias: Tensor | None, shared: tuple[Tensor, ...]
) -> Tensor | None:
    """The bias of a tile, broadcastable to (l, k, g, r, c)."""
    if bias is not None:
        return bias
    if spec.bias is None:
        return None
    tables = shared[spec.paired :]
    if spec.positions is not None:
        return _gathered_bias(spec.bias, tables, spec.positions, tile)
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
    S = scores(spec, tile, query, key, shared)
    if spec.softcap is not None:
        S = spec.softcap * torch.tanh(S / spec.softcap)
    added = bias_tile(spec, tile, query.shape[-3], bias, shared)
    return S if added is None else S + added.to(S.dtype)


def hidden(spec: Spec, tile: Tile | Points, groups: int, device: torch.device) -> Tensor | None:
    """Which pairs the mask hides: bool, broadcastable to (l, k, g, r, c)."""
    if spec.positions is not None and isinstance(tile, Tile):
        return ~BIAS.part(spec.positions.shown, tile)
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
    if spec.positions is not None:
        return _kept_at(spec, spec.positions, tile)
    i, j = tile.indices(device)
    items = torch.arange(tile.batch.start, tile.batch.stop, device=device) % spec.period // spec.copies
    heads = torch.arange(tile.heads.start * groups, tile.heads.stop * groups, device=device)
    item, head, row, key = *spec.origin, *spec.corner
    survivors = keep(spec.dropout, spec.seed, items + item, heads + head, i + row, j + key)
    found: Tensor = survivors.unflatten(1, (tile.heads.stop - tile.heads.start, groups))
    return found


def _places(at: Positions, tile: Tile | Points) -> tuple[Tensor, Tensor, Tensor]:
    """Where a tile with gathered keys is in the whole problem: its item (1,), its rows (l, r), its keys (l, k|1, c)."""
    rows = at.rows[tile.batch, tile.rows]
    keys = at.keys[tile.batch, tile.heads if at.keys.shape[1] > 1 else slice(None), tile.cols]
    return torch.full((1,), at.item, device=rows.device), rows, keys


def _gathered_bias(bias: Bias, tables: tuple[Tensor, ...], at: Positions, tile: Tile | Points) -> Tensor:
    """The bias of a tile with gathered keys, broadcastable to (l, k, g, r, c)."""
    _, rows, keys = _places(at, tile)
    i, j = rows[:, None, :, None], keys[:, :, None, :]  # (l, 1, r, 1), (l, k|1, 1, c)
    if bias.heads == 1:
        return bias.pairs(tables, i, j, at.n, at.m)[0][:, :, None]
    first = tile.heads.start * at.groups
    if j.shape[1] == 1:
        found = bias.pairs(tables, i, j, at.n, at.m)[first : tile.heads.stop * at.groups, :, 0]
        grouped: Tensor = found.unflatten(0, (-1, at.groups))
        return grouped.movedim(2, 0)
    own = [
        bias.pairs(tables, i, j[:, h, None], at.n, at.m)[first + h * at.groups : first + (h + 1) * at.groups, :, 0]
        for h in range(j.shape[1])
    ]
    return torch.stack(own).movedim(2, 0)


def _kept_at(spec: Spec, at: Positions, tile: Tile) -> Tensor:
    """Which weights of a tile with gathered keys dropout keeps, by the places of its pairs in the whole problem."""
    items, rows, j = _places(at, tile)
    heads = torch.arange(tile.heads.start * at.groups, tile.heads.stop * at.groups, device=rows.device)
    item, head, row, key = *spec.origin, *spec.corner
    bits = row_keys(spec.seed, items + item, heads + head, rows.flatten() + row)[0]  # (k·g, l·r)
    bits = bits.unflatten(0, (-1, at.groups)).unflatten(2, rows.shape).movedim(2, 0)  # (l, k, g, r)
    return keep_pairs(spec.dropout, bits, j[:, :, None, None, :] + key)


def attend(
    spec: Spec, tile: Tile, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *shared: Tensor
) -> Rows:
    """Scores, scaling, row-wise softmax, weighted sum: whole rows at once, any order of derivative."""
    groups = query.shape[-3]
    S = logits(spec, tile, query, key, bias, shared)  # (l, k, g, r, c)
    hide = hidden(spec, tile, groups, S.device)
    if bias is not None or spec.hides_by_value:
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
