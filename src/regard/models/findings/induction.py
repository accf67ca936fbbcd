"""Induction heads: they attend to what followed an earlier occurrence of the current token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...observation import Observation
from ..record import AttentionRecord
from .base import Finding, Rule, span
from .sampling import evenly_spaced, flatten_batch, row_batches

__all__ = ["Induction"]


@dataclass(frozen=True)
class Induction(Rule):
    """Induction heads: they attend to the token that followed an earlier occurrence of the current one.

    Olsson et al. 2022 ("In-context Learning and Induction Heads") define them by this prefix matching and by the
    copying that follows from it; the weights show only the matching. For a row i whose token also occurs at earlier
    positions t < i − 1, the weights on all positions t + 1 are summed; the mean is taken over at most `rows` rows,
    spread over those that repeat a token and see what followed it.

    `share` is that mean, a share of the weight; it must also be `times` what uniform attention would give. At least
    `least` such rows, over the batch, are required, as are the model's token ids and as many keys as rows.

    >>> Induction(share=0.5)
    Induction(share=0.5, times=3.0, least=8, rows=256)
    """

    name: ClassVar[str] = "induction"
    shares: ClassVar[frozenset[str]] = frozenset({"share"})

    share: float = 0.3
    times: float = 3.0
    least: int = 8
    rows: int = 256

    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield one finding per layer, with all its induction heads."""
        for layer in seen.layers:
            tokens = _matching_tokens(seen.tokens, seen[layer])
            if tokens is None:
                continue
            share, uniform, counted = _weight_on_followers(seen[layer], tokens, self.rows)
            cases = {
                head: value
                for head, value in enumerate(share)
                if counted[head] >= self.least and value >= max(self.share, self.times * uniform[head])
            }
            if cases:
                even = span([uniform[head] for head in cases])
                text = (
                    f"{span(cases.values())} of the weight goes to the token that followed its previous occurrence, "
                    f"where uniform attention gives {even} (an induction head)"
                )
                yield self.found(layer, cases, len(share), text)


def _matching_tokens(tokens: Tensor | None, seen: Observation) -> Tensor | None:
    """The token ids (items, N) on the layer's device, if its rows and keys correspond to them one to one."""
    lse = flatten_batch(seen.lse, 1)
    if tokens is None or tuple(tokens.shape) != (lse.shape[0], lse.shape[2]) or not tokens.numel():
        return None
    return tokens.to(lse.device) if seen.shape[-1] == tokens.shape[1] else None


def _weight_on_followers(seen: Observation, tokens: Tensor, most: int) -> tuple[list[float], list[float], list[int]]:
    """Per head: the mean weight on the tokens that followed, the same for uniform attention, and the number of rows."""
    lse, visible = flatten_batch(seen.lse, 1), flatten_batch(seen.visible, 1)
    rows = evenly_spaced(repeated(tokens).any(0).nonzero().squeeze(-1), most)
    sums = torch.zeros(3, lse.shape[1], dtype=torch.float64, device="cpu")
    j = torch.arange(tokens.shape[1], device=tokens.device)
    for part in row_batches(rows, visible[..., 0].numel() * len(j)):
        before = (tokens[:, part, None] == tokens[:, None, :]) & (j < part[:, None] - 1)  # [items, rows, keys]
        S = flatten_batch(seen.scores(rows=part), 2)  # [items, heads, rows, keys]
        after = F.pad(before, (1, -1))[:, None] & S.isneginf().logical_not()
        P = torch.where(after, (S - lse[..., part, None]).exp(), 0.0)
        found = after.any(-1)
        even = after.sum(-1) / visible[..., part].clamp(min=1)
        for row, x in enumerate((P.sum(-1), even, found)):
            sums[row] += torch.where(found, x, 0).double().sum((0, 2)).cpu()
    counted = sums[2].clamp(min=1)
    return (sums[0] / counted).tolist(), (sums[1] / counted).tolist(), [int(count) for count in sums[2]]


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
