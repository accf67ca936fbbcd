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
        found = on_host([_weight_on_followers(seen[layer], tokens, rows) for layer in layers])
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


def _weight_on_followers(seen: Observation, tokens: Tensor, rows: Tensor) -> Tensor:
    """Sums over some rows, per head: the weight on the tokens that followed, that of uniform attention, and the rows.

    A row counts if it sees a token that followed: (3, heads), float64, on the device of the layer.
    """
    lse, visible = flatten_batch(seen.lse, 1), flatten_batch(seen.visible, 1)
    sums = torch.zeros(3, lse.shape[1], dtype=torch.float64, device=lse.device)
    tokens, j = tokens.to(lse.device), torch.arange(tokens.shape[1], device=lse.device)
    for part in row_batches(rows, visible[..., 0].numel() * len(j), lse.device):
        S = flatten_batch(seen.scores(rows=part), 2)  # [items, heads, rows, keys]
        i = part.to(lse.device)
        before = (tokens[:, i, None] == tokens[:, None, :]) & (j < i[:, None] - 1)  # [items, rows, keys]
        after = F.pad(before, (1, -1))[:, None] & S.isneginf().logical_not()
        P = torch.where(after, (S - lse[..., i, None]).exp(), 0.0)
        found = after.any(-1)
        even = after.sum(-1) / visible[..., i].clamp(min=1)
        sums += torch.stack([torch.where(found, x, 0).double().sum((0, 2)) for x in (P.sum(-1), even, found)])
    return sums


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
