"""Heads that do what another head of the same layer does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.report.labels import layer_label

from ...observation import Observation
from ..head_statistics import Head
from ..record import AttentionRecord
from ..transfer import on_host
from .base import Finding, Place, Rule, by_layer
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
        """Yield one finding with every group of heads that are alike."""
        layers = {
            layer: [head.head for head in heads if math.isfinite(head.max_logit) and not self._is_plain(head)]
            for layer, heads in by_layer(seen).items()
        }
        layers = {layer: candidates for layer, candidates in layers.items() if len(candidates) > 1}
        apart = distances([seen[layer] for layer in layers], self.rows, self.least)
        groups = [
            (Place(layer, tuple(sorted(group))), group)
            for (layer, candidates), far in zip(layers.items(), apart, strict=True)
            for group in self._groups(candidates, far)
        ]
        if groups:
            named = "; ".join(
                f"{layer_label(place.layer, seen.layers)} H{' = H'.join(map(str, place.heads))}" for place, _ in groups
            )
            furthest = max(far for _, group in groups for far in group.values())
            says = f"duplicates: the same weights except for {furthest:.3f} of them"
            place, group = min(groups, key=lambda one: min(one[1].values()))
            places = tuple(place for place, _ in groups)
            yield Finding(self.name, "notable", f"{named}: {says}", *place, min(group.values()), places, says)

    def _is_plain(self, head: Head) -> bool:
        shares = (head.first_share, head.self_share, head.previous_share)
        return any(share >= self.plain for share in shares) or head.relative_entropy >= self.relative

    def _groups(self, heads: list[int], apart: list[list[float]]) -> Iterator[dict[int, float]]:
        """Group heads with the first one that they are close to, each with its distance."""
        left = list(range(len(heads)))
        while left:
            first, *others = left
            near = {other: apart[heads[first]][heads[other]] for other in others}
            close = {other: far for other, far in near.items() if far <= self.distance}
            if close:
                nearest = min(close.values())
                yield {heads[first]: nearest, **{heads[other]: far for other, far in close.items()}}
            left = [other for other in others if other not in close]


def distances(calls: list[Observation], most: int, least: int) -> list[list[list[float]]]:
    """The mean of ½ Σ|p − p′| over at most `most` rows, for each pair of heads of each call.

    NaN if there are fewer than `least` rows. Rows with one visible key have no choice, and do not count.
    """
    seeing = on_host([flatten_batch(call.visible > 1, 1) for call in calls])
    several = [each.any(1) for each in seeing]  # (items, N)
    rows = [evenly_spaced(each.any(0).nonzero().squeeze(-1), most) for each in several]
    totals = on_host([_total_distances(call, chosen) for call, chosen in zip(calls, rows, strict=True)])
    found = []
    for each, chosen, total in zip(several, rows, totals, strict=True):
        counted = int(each[:, chosen].sum())
        found.append((total / 2 / counted if counted >= least else total + torch.nan).tolist())
    return found


def _total_distances(call: Observation, rows: Tensor) -> Tensor:
    """Σ|p − p′| over some rows, for each pair of heads: float64, on the device of the call."""
    items, heads = flatten_batch(call.lse, 1).shape[:2]
    total = torch.zeros(heads, heads, dtype=torch.float64, device=call.lse.device)
    for part in row_batches(rows, items * heads * call.shape[-1], total.device):
        P = flatten_batch(call.weights(rows=part), 2).float()
        flat = P.transpose(0, 1).flatten(1)  # [heads, items · rows · keys]
        total += torch.cdist(flat, flat, p=1.0).double()
    return total
