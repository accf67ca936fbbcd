"""Heads that do what another head of their layer does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ...observation import Observation
from .base import Finding, Rule, by_layer, span
from .sampling import evenly_spaced, flatten_batch, row_batches

if TYPE_CHECKING:
    from ..head_statistics import Head
    from ..seen import Seen

__all__ = ["Duplicate"]


@dataclass(frozen=True)
class Duplicate(Rule):
    """Heads of a layer with nearly the same weights in every row, so that one would do.

    Michel et al. 2019 ("Are Sixteen Heads Really Better than One?") find many heads redundant. Two heads are compared
    by the exact weights of rows spread over the sequence that see more than one key: the mean over them of
    ½ Σ|p − p′|, the weight that lies elsewhere. Where pooled maps would find all causal heads alike, this does not.

    `distance` is that share of weight; `rows` is how many rows are taken at most, and `least` how many, over the batch,
    there must be. Heads that are alike because they hardly depend on content are left out: those that give at least
    `plain` of their weight to the first token, to the row's own or the previous one, and those with at least `relative`
    of the entropy of uniform attention. Heads whose logits are not finite have no weights to compare.

    >>> Duplicate(distance=0.02)
    Duplicate(distance=0.02, rows=64, least=8, plain=0.8, relative=0.99)
    """

    name: ClassVar[str] = "duplicate"
    falling: ClassVar[bool] = True
    shares: ClassVar[frozenset[str]] = frozenset({"distance", "plain", "relative"})

    distance: float = 0.05
    rows: int = 64
    least: int = 8
    plain: float = 0.8
    relative: float = 0.99

    def judge(self, seen: Seen) -> Iterator[Finding]:
        """Give one finding for each group of heads that are alike."""
        for layer, heads in by_layer(seen).items():
            telling = [head.head for head in heads if math.isfinite(head.max_logit) and not self._is_plain(head)]
            if len(telling) < 2:
                continue
            apart = distances(seen[layer], telling, self.rows, self.least)
            for group in self._groups(telling, apart):
                says = f"the same weights but for {span([max(group.values())], '.3f')} of them (duplicates)"
                yield self.found(layer, group, len(heads), says)

    def _is_plain(self, head: Head) -> bool:
        shares = (head.first_share, head.self_share, head.previous_share)
        return any(share >= self.plain for share in shares) or head.relative_entropy >= self.relative

    def _groups(self, heads: list[int], apart: list[list[float]]) -> Iterator[dict[int, float]]:
        """Gather around the first of each group the heads that are close to it, each with its distance."""
        left = list(range(len(heads)))
        while left:
            first, *others = left
            close = {other: apart[first][other] for other in others if apart[first][other] <= self.distance}
            if close:
                nearest = min(close.values())
                yield {heads[first]: nearest, **{heads[other]: far for other, far in close.items()}}
            left = [other for other in others if other not in close]


def distances(seen: Observation, heads: list[int], most: int, least: int) -> list[list[float]]:
    """Give the mean of ½ Σ|p − p′| over at most `most` rows, for every two of the heads; NaN if these are too few."""
    choosing = (flatten_batch(seen.visible, 1) > 1).any(1)  # (items, N): with one key there is no choice
    rows = evenly_spaced(choosing.any(0).nonzero().squeeze(-1), most)
    total = torch.zeros(len(heads), len(heads), dtype=torch.float64)
    each = choosing.shape[0] * flatten_batch(seen.lse, 1).shape[1] * seen.shape[-1]  # numbers in one row of all heads
    for part in row_batches(rows, each):
        P = flatten_batch(seen.weights(rows=part), 2)[:, heads].float()
        flat = P.transpose(0, 1).flatten(1)  # [heads, items · rows · keys]
        total += torch.cdist(flat, flat, p=1.0).double().cpu()
    counted = choosing[:, rows].sum().item()
    found: list[list[float]] = (total / 2 / counted if counted >= least else total + torch.nan).tolist()
    return found
