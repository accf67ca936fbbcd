"""Heads that look at a place, not at a content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from .base import Finding, Rule, span
from .sampling import flatten_batch

if TYPE_CHECKING:
    from ..seen import Seen

__all__ = ["Positional"]


class _Habit(NamedTuple):
    """Where a head mostly looks from a row, and how firmly."""

    offset: int
    share: float  # of the rows in which that key is the strongest
    weight: float  # its mean weight there
    reach: float  # the share of rows that have a key there
    rows: int  # how many these are


@dataclass(frozen=True)
class Positional(Rule):
    """Heads whose strongest key stands at the same offset in nearly every row: itself, the one before, one further off.

    Voita et al. 2019 ("Analyzing Multi-Head Self-Attention") call a head positional if its largest weight is at one
    relative position 90 % of the time; Clark et al. 2019 ("What Does BERT Look At?") find heads for the previous and
    the next token.

    Of the rows that see more than one key, a share of `reach`, and `rows` at least, must have a key at that offset (on
    text that repeats itself, an induction head looks at a fixed, far one); in a share of `share` of these it must be
    the strongest, with a mean weight of `weight`. Rows and keys must be as many.

    >>> Positional(weight=0.5)
    Positional(share=0.9, weight=0.5, reach=0.75, rows=8)
    """

    name: ClassVar[str] = "positional"
    shares: ClassVar[frozenset[str]] = frozenset({"share", "weight", "reach"})

    share: float = 0.9
    weight: float = 0.3
    reach: float = 0.75
    rows: int = 8

    def judge(self, seen: Seen) -> Iterator[Finding]:
        """Give one finding a layer and offset, with all the heads that have it."""
        for layer in seen.layers:
            habits = _habits(seen, layer)
            groups: dict[int, dict[int, _Habit]] = {}
            for head, habit in enumerate(habits):
                if self._has(habit):
                    groups.setdefault(habit.offset, {})[head] = habit
            for offset, cases in sorted(groups.items()):
                rows, weight = (span([x[n] for x in cases.values()]) for n in (1, 2))
                says = f"{rows} of the rows attend {_named(offset)} most, with {weight} of their weight (by position)"
                yield self.found(layer, {head: case.share for head, case in cases.items()}, len(habits), says)

    def _has(self, habit: _Habit) -> bool:
        enough = habit.rows >= self.rows and habit.reach >= self.reach
        return enough and habit.share >= self.share and habit.weight >= self.weight


def _habits(seen: Seen, layer: str) -> list[_Habit]:
    last = seen[layer]
    n = last.lse.shape[-1]
    if n != last.shape[-1] or not last.lse.numel():
        return []
    weights, place = (flatten_batch(x, 2)[..., 0] for x in seen.strongest(layer))  # (items, heads, N)
    i = torch.arange(n, device=place.device)
    looking = (flatten_batch(last.visible, 1) > 1) & (place >= 0)
    habits = []
    for head in range(place.shape[1]):
        at, live = place[:, head] - i, looking[:, head]
        if not bool(live.any()):
            habits.append(_Habit(0, 0.0, 0.0, 0.0, 0))
            continue
        offset = int(at[live].mode().values)
        reaching = live & (i + offset >= 0) & (i + offset < n)
        same = reaching & (at == offset)
        count, total = int(same.sum()), int(reaching.sum())
        weight = float(weights[:, head][same].mean())
        habits.append(_Habit(offset, count / total, weight, total / int(live.sum()), total))
    return habits


def _named(offset: int) -> str:
    if abs(offset) <= 1:
        return {-1: "the previous token", 0: "themselves", 1: "the next token"}[offset]
    return f"the token {abs(offset)} {'before' if offset < 0 else 'after'} them"
