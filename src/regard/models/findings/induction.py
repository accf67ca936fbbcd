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
    sums: list[Tensor] = []
    there: dict[torch.device, Tensor] = {}
    for call in calls:
        device = call.lse.device
        there[device] = there[device] if device in there else follows.to(device)
        sums += _sums_over_followers(call, there[device], rows)
    found, read = [], iter(on_host(sums))
    for weight, count, visible in zip(read, read, read, strict=True):
        even = torch.where(count > 0, count / visible.clamp(min=1), 0.0)
        found.append(torch.stack([x.double().sum((0, 2)) for x in (weight, even, count > 0)]))
    return found


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
