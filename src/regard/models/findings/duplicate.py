"""Heads that do what another head of the same layer does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...observation import Observation
from ..head_statistics import Head
from ..record import AttentionRecord
from .base import Finding, Rule, by_layer, span
from .sampling import evenly_spaced, flatten_batch, row_batches

__all__ = ["Duplicate"]


@dataclass(frozen=True)
class Duplicate(Rule):
    """Heads of a layer with nearly the same weights in every row, so that one would be enough.

    Michel et al. 2019 ("Are Sixteen Heads Really Better than One?") find many heads redundant. Two heads are compared
    by their exact weights in rows spread over the sequence that see more than one key: the mean of ½ Σ|p − p′|, the
    share of the weight that differs. Pooled maps would make all causal heads look alike; this does not.

    `distance` is that share of the weight; at most `rows` rows are compared, and at least `least`, over the batch, are
    required. Heads that are alike because they hardly depend on content are left out: those that put at least `plain`
    of their weight on the first token, the row's own or the previous one, and those with at least `relative` of the
    entropy of uniform attention. Heads whose logits are not finite have no weights to compare.

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

    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield one finding per group of heads that are alike."""
        for layer, heads in by_layer(seen).items():
            candidates = [head.head for head in heads if math.isfinite(head.max_logit) and not self._is_plain(head)]
            if len(candidates) < 2:
                continue
            apart = distances(seen[layer], candidates, self.rows, self.least)
            for group in self._groups(candidates, apart):
                text = f"the same weights except for {span([max(group.values())], '.3f')} of them (duplicates)"
                yield self.found(layer, group, len(heads), text)

    def _is_plain(self, head: Head) -> bool:
        shares = (head.first_share, head.self_share, head.previous_share)
        return any(share >= self.plain for share in shares) or head.relative_entropy >= self.relative

    def _groups(self, heads: list[int], apart: list[list[float]]) -> Iterator[dict[int, float]]:
        """Group heads with the first one that they are close to, each with its distance."""
        left = list(range(len(heads)))
        while left:
            first, *others = left
            close = {other: apart[first][other] for other in others if apart[first][other] <= self.distance}
            if close:
                nearest = min(close.values())
                yield {heads[first]: nearest, **{heads[other]: far for other, far in close.items()}}
            left = [other for other in others if other not in close]


def distances(seen: Observation, heads: list[int], most: int, least: int) -> list[list[float]]:
    """The mean of ½ Σ|p − p′| over at most `most` rows, for each pair of heads; NaN if there are fewer than `least`."""
    several = (flatten_batch(seen.visible, 1) > 1).any(1)  # (items, N): rows with one visible key have no choice
    rows = evenly_spaced(several.any(0).nonzero().squeeze(-1), most)
    total = torch.zeros(len(heads), len(heads), dtype=torch.float64, device="cpu")
    each = (
        several.shape[0] * flatten_batch(seen.lse, 1).shape[1] * seen.shape[-1]
    )  # weights per row, over all items and heads
    for part in row_batches(rows, each):
        P = flatten_batch(seen.weights(rows=part), 2)[:, heads].float()
        flat = P.transpose(0, 1).flatten(1)  # [heads, items · rows · keys]
        total += torch.cdist(flat, flat, p=1.0).double().cpu()
    counted = several[:, rows].sum().item()
    found: list[list[float]] = (total / 2 / counted if counted >= least else total + torch.nan).tolist()
    return found
