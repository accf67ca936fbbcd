"""Induction heads: they attend to the token after an earlier copy of the current one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...observation import Observation
from ..record import AttentionRecord
from ..transfer import on_host
from .base import Finding, Rule, span
from .positional import heads_by_position
from .sampling import evenly_spaced, flatten_batch, row_batches

__all__ = ["Induction"]

_SPARSE = 16  # pairs of a row and a key are computed one by one if no more than one in so many is asked for


@dataclass(frozen=True)
class Induction(Rule):
    """Induction heads: they attend to the token after an earlier copy of the current one.

    Olsson et al. 2022 ("In-context Learning and Induction Heads") define them by this prefix matching and by the
    copying that follows from it; the weights show only the matching. For a row i whose token also occurs at earlier
    positions t < i − 1, the weights on all positions t + 1 are summed; the mean is taken over at most `rows` rows,
    spread over those that repeat a token and see what followed it.

    `share` is that mean, a share of the weight; it must also be `times` what uniform attention would give. At least
    `least` such rows and `kinds` different tokens that repeat, over the batch, are required, as are the model's token
    ids and as many keys as rows. The first layer has nothing to compose with: no earlier head has told its keys which
    token precedes them, so it is left out. So are heads that attend by position, which match by accident where a text
    has a rhythm.

    >>> Induction(share=0.5)
    Induction(share=0.5, times=3.0, least=16, kinds=4, rows=256)
    """

    name: ClassVar[str] = "induction"
    shares: ClassVar[frozenset[str]] = frozenset({"share"})

    share: float = 0.3
    times: float = 3.0
    least: int = 16
    kinds: int = 4
    rows: int = 256

    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield one finding with all induction heads."""
        tokens = None if seen.tokens is None else seen.tokens.cpu()
        layers = [layer for layer in seen.layers if tokens is not None and _match(tokens, seen[layer])][1:]
        if tokens is None or not layers:
            return
        again = repeated(tokens)
        if len(tokens[again].unique()) < self.kinds:
            return
        rows = evenly_spaced(again.any(0).nonzero().squeeze(-1), self.rows)
        found = _on_followers([seen[layer] for layer in layers], _followers(tokens, rows), rows)
        cases: dict[str, dict[int, float]] = {}
        uniform: dict[str, list[float]] = {}
        for layer, sums in zip(layers, found, strict=True):
            share, uniform[layer] = (sums[:2] / sums[2].clamp(min=1)).tolist()
            for head, (value, counted) in enumerate(zip(share, sums[2].tolist(), strict=True)):
                if counted >= self.least and value >= max(self.share, self.times * uniform[layer][head]):
                    cases.setdefault(layer, {})[head] = value
        by_position = heads_by_position(seen, cases, share=0.9)
        cases = {
            layer: {head: value for head, value in heads.items() if head not in by_position[layer]}
            for layer, heads in cases.items()
        }
        cases = {layer: heads for layer, heads in cases.items() if heads}
        if cases:
            even = span([uniform[layer][head] for layer, heads in cases.items() for head in heads])
            shares = span(value for heads in cases.values() for value in heads.values())
            text = (
                f"induction head: attends to the token after an earlier copy of the current one, with {shares} of its "
                f"weight where uniform attention gives {even}"
            )
            yield self.found(seen, cases, text)


def _match(tokens: Tensor, seen: Observation) -> bool:
    """Whether the rows and keys of a layer correspond one to one to the token ids (items, N)."""
    items, _, rows = flatten_batch(seen.lse, 1).shape
    return tuple(tokens.shape) == (items, rows) and bool(tokens.numel()) and seen.shape[-1] == rows


def _followers(tokens: Tensor, rows: Tensor) -> Tensor:
    """Which keys follow an earlier occurrence of each row's token: (items, rows, N)."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    before = (tokens[:, rows, None] == tokens[:, None, :]) & (positions < rows[:, None] - 1)
    return F.pad(before, (1, -1))


def _on_followers(calls: list[Observation], follows: Tensor, rows: Tensor) -> list[Tensor]:
    """Sums over some rows, per head: the weight on the tokens that followed, that of uniform attention, and the rows.

    A row counts if it sees a token that followed: for each call (3, heads), float64.
    """
    pairs = follows.nonzero()  # [pairs, 3]: item, place among the rows, key
    few = len(pairs) * _SPARSE <= follows.numel()
    alone = [_visible_pairs(call, pairs, rows) if few else None for call in calls]
    sums: list[Tensor] = []
    there: dict[torch.device, Tensor] = {}
    for call, mine in zip(calls, alone, strict=True):
        device = call.lse.device
        if mine is not None:
            sums += _products_of_pairs(call, mine, rows)
            continue
        there[device] = there[device] if device in there else follows.to(device)
        sums += _sums_over_followers(call, there[device], rows)
    found, read = [], iter(on_host(sums))
    for call, mine, weight, count, visible in zip(calls, alone, read, read, read, strict=True):
        if mine is not None:
            weight, count = _sums_of_pairs(mine, weight * call.problem_for("scores").scale, count)
        even = torch.where(count > 0, count / visible.clamp(min=1), 0.0)
        found.append(torch.stack([x.double().sum((0, 2)) for x in (weight, even, count > 0)]))
    return found


def _visible_pairs(call: Observation, pairs: Tensor, rows: Tensor) -> Tensor | None:
    """The pairs that the mask shows, alike for all items and heads; None if each pair needs more than q·k."""
    p = call.problem_for("scores")
    if not p.plain_scale or p.bias is not None or p.softcap is not None:
        return None
    if p.mask is None:
        return pairs
    if not p.mask.constant or p.mask.lead != (1, 1):
        return None
    return pairs[p.mask.allows(rows[pairs[:, 1]], pairs[:, 2], p.rows, p.keys).reshape(-1)]


def _products_of_pairs(call: Observation, pairs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q·k of the pairs (heads, pairs), and lse and the number of visible keys of the rows (items, heads, rows).

    A GPU loads the code of each operation at its first use, which takes longer than this work: so there are few here.
    """
    p = call.problem_for("scores")
    chosen = rows.to(p.device)
    lse, visible = (flatten_batch(x, 1).index_select(-1, chosen) for x in (call.lse, call.visible))
    (items, heads), keys = p.query.shape[:2], p.key.shape[1]
    products = [lse.new_empty(heads, 0)]
    for item in range(items):
        mine = pairs[pairs[:, 0] == item]
        for part in row_batches(mine, heads * p.query.shape[-1], p.device):
            i, j = rows[part[:, 1]].to(p.device), part[:, 2].to(p.device)
            Q = p.query[item].index_select(1, i).to(lse.dtype).unflatten(0, (keys, -1))  # [k, g, pairs, D]
            K = p.key[item].index_select(1, j).to(lse.dtype)  # [k, pairs, D]
            products.append((Q * K[:, None]).sum(-1).flatten(0, 1))
    return torch.cat(products, 1) if len(products) > 2 else products[-1], lse, visible


def _sums_of_pairs(pairs: Tensor, S: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of pairs with the logits S, and how many are visible, summed over rows: (items, heads, rows) each."""
    item, row, _ = pairs.T
    items, heads, rows = lse.shape
    shown = torch.gt(S, -torch.inf)
    P = torch.where(shown, (S - lse[item, :, row].T).exp(), 0.0)  # [heads, pairs]
    both = torch.stack((P, shown.to(P.dtype)))
    total = both.new_zeros(2, heads, items * rows).index_add_(2, item * rows + row, both)
    weight, count = total.unflatten(2, (items, rows)).transpose(1, 2)
    return weight, count


def _sums_over_followers(call: Observation, follows: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weight on the visible tokens that followed, their number, and that of all visible: (items, heads, rows)."""
    lse, visible = flatten_batch(call.lse, 1), flatten_batch(call.visible, 1)
    items, heads, _ = lse.shape
    weights, counts, start = [], [], 0
    for part in row_batches(rows, items * heads * call.shape[-1], lse.device):
        S = flatten_batch(call.scores(rows=part), 2)  # [items, heads, rows, keys]
        after = follows[:, None, start : start + len(part)] & torch.gt(S, -torch.inf)
        P = torch.where(after, (S - lse.index_select(-1, part.to(lse.device))[..., None]).exp(), 0.0)
        weights.append(P.sum(-1))
        counts.append(after.sum(-1))
        start += len(part)
    return torch.cat(weights, -1), torch.cat(counts, -1), visible.index_select(-1, rows.to(lse.device))


def repeated(tokens: Tensor) -> Tensor:
    """Which positions hold a token that also occurs at least two positions earlier, (items, N).

    >>> repeated(torch.tensor([[5, 5, 5, 7, 7, 5]])).int().tolist()
    [[0, 0, 1, 0, 0, 1]]
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    found = []
    for item in tokens:
        kinds, kind = item.unique(return_inverse=True)
        first = torch.full((len(kinds),), len(item), device=item.device).scatter_reduce(0, kind, positions, "amin")
        found.append(first[kind] < positions - 1)
    return torch.stack(found)
