"""Heads that continue what came before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...observation import Observation
from .base import Finding, Rule, span
from .sampling import evenly_spaced, flatten_batch, row_batches

if TYPE_CHECKING:
    from ..seen import Seen

__all__ = ["Induction"]


@dataclass(frozen=True)
class Induction(Rule):
    """Induction heads: at a token that came before, they attend the token that followed it then.

    Olsson et al. 2022 ("In-context Learning and Induction Heads") name them by this matching of prefixes, and by the
    copying that follows from it; the weights show the matching alone. For a row whose token stands at an earlier place
    t < i − 1 as well, the weight on all places t + 1 is summed; the mean is taken over at most `rows` rows, spread over
    those that repeat a token and see what followed.

    `share` is that mean, a share of the weight; it must also be `times` what uniform attention would give; there must
    be `least` such rows, over the batch. It needs the model's token ids, and as many keys as rows.

    >>> Induction(share=0.5)
    Induction(share=0.5, times=3.0, least=8, rows=256)
    """

    name: ClassVar[str] = "induction"
    shares: ClassVar[frozenset[str]] = frozenset({"share"})

    share: float = 0.3
    times: float = 3.0
    least: int = 8
    rows: int = 256

    def judge(self, seen: Seen) -> Iterator[Finding]:
        """Give one finding a layer, with all its induction heads."""
        for layer in seen.layers:
            tokens = _fitting(seen.tokens, seen[layer])
            if tokens is None:
                continue
            share, uniform, counted = _followed(seen[layer], tokens, self.rows)
            cases = {
                head: value
                for head, value in enumerate(share)
                if counted[head] >= self.least and value >= max(self.share, self.times * uniform[head])
            }
            if cases:
                even = span([uniform[head] for head in cases])
                says = (
                    f"{span(cases.values())} of the weight goes to what followed the token before, where uniform "
                    f"attention gives {even} (an induction head)"
                )
                yield self.found(layer, cases, len(share), says)


def _fitting(tokens: Tensor | None, seen: Observation) -> Tensor | None:
    """The token ids (items, N) on the device of the layer, if each of its rows and keys is one of them."""
    lse = flatten_batch(seen.lse, 1)
    if tokens is None or tuple(tokens.shape) != (lse.shape[0], lse.shape[2]) or not tokens.numel():
        return None
    return tokens.to(lse.device) if seen.shape[-1] == tokens.shape[1] else None


def _followed(seen: Observation, tokens: Tensor, most: int) -> tuple[list[float], list[float], list[int]]:
    """For each head the mean weight on what followed, the same for uniform attention, and over how many rows."""
    lse, visible = flatten_batch(seen.lse, 1), flatten_batch(seen.visible, 1)
    rows = evenly_spaced(repeated(tokens).any(0).nonzero().squeeze(-1), most)
    sums = torch.zeros(3, lse.shape[1], dtype=torch.float64)
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
    """Which places hold a token that stands at least two places earlier too, (items, N).

    >>> repeated(torch.tensor([[5, 5, 5, 7, 7, 5]])).int().tolist()
    [[0, 0, 1, 0, 0, 1]]
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    found = []
    for item in tokens:
        kinds, kind = item.unique(return_inverse=True)
        first = torch.full((len(kinds),), len(item), device=item.device).scatter_reduce(0, kind, places, "amin")
        found.append(first[kind] < places - 1)
    return torch.stack(found)
