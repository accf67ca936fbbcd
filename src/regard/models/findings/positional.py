"""Heads that attend by position, not by content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..record import AttentionRecord
from ..transfer import on_host
from .base import Finding, Rule, span
from .sampling import flatten_batch

__all__ = ["Positional", "heads_by_position"]


class _Offset(NamedTuple):
    """The offset at which a head's strongest key usually is, and how consistently."""

    offset: int
    share: float  # of the rows that have a key there, those in which it is the strongest
    weight: float  # its mean weight in these
    reach: float  # the share of rows that have a key there
    rows: int  # the number of rows that have one

    @classmethod
    def of(cls, offset: float, same: float, reaching: float, live: float, weight: float) -> Self:
        """From the numbers of rows, and the sum of the weights in those with that offset."""
        if not same:
            return cls(0, 0.0, 0.0, 0.0, 0)
        return cls(int(offset), same / reaching, weight / same, reaching / live, int(reaching))


@dataclass(frozen=True)
class Positional(Rule):
    """Heads whose strongest key is at the same offset in nearly every row: itself, the previous one, or further away.

    Voita et al. 2019 ("Analyzing Multi-Head Self-Attention") call a head positional if its largest weight is at one
    relative position 90 % of the time; Clark et al. 2019 ("What Does BERT Look At?") find heads that attend to the
    previous and to the next token.

    Among the rows that see more than one key, a share of `reach`, and at least `rows` of them, must have a key at that
    offset (on repetitive text, an induction head attends at a fixed, distant offset); in a share of `share` of these it
    must be the strongest, with a mean weight of `weight`. There must be as many keys as rows.

    >>> Positional(weight=0.5)
    Positional(share=0.9, weight=0.5, reach=0.75, rows=8)
    """

    name: ClassVar[str] = "positional"
    shares: ClassVar[frozenset[str]] = frozenset({"share", "weight", "reach"})

    share: float = 0.9
    weight: float = 0.3
    reach: float = 0.75
    rows: int = 8

    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield one finding per offset, with all the heads that have it."""
        groups: dict[int, dict[str, dict[int, _Offset]]] = {}
        for layer, heads in _usual_offsets(seen, seen.layers).items():
            for head, usual in enumerate(heads):
                if self._matches(usual):
                    groups.setdefault(usual.offset, {}).setdefault(layer, {})[head] = usual
        for offset, layers in sorted(groups.items()):
            cases = [case for heads in layers.values() for case in heads.values()]
            rows, weight = (span([getattr(x, field) for x in cases]) for field in ("share", "weight"))
            text = f"attends to {_named(offset)} in {rows} of the rows, with {weight} of their weight"
            shares = {layer: {head: case.share for head, case in heads.items()} for layer, heads in layers.items()}
            yield self.found(seen, shares, text)

    def _matches(self, usual: _Offset) -> bool:
        enough = usual.rows >= self.rows and usual.reach >= self.reach
        return enough and usual.share >= self.share and usual.weight >= self.weight


def heads_by_position(seen: AttentionRecord, layers: Iterable[str], share: float = 0.5) -> dict[str, set[int]]:
    """The heads of some layers that attend to one offset in at least `share` of the rows that have it."""
    names = list(layers)
    usual = _usual_offsets(seen, names)
    return {
        layer: {head for head, x in enumerate(usual.get(layer, ())) if x.share >= share and x.reach >= Positional.reach}
        for layer in names
    }


def _usual_offsets(seen: AttentionRecord, layers: Iterable[str]) -> dict[str, list[_Offset]]:
    """The usual offset of each head, in layers with as many keys as rows."""
    surveys = seen.surveys()
    square = [layer for layer in layers if seen[layer].shape[-1] == seen[layer].shape[-2] and seen[layer].lse.numel()]
    calls = {layer: surveys[layer] for layer in square}
    numbers = [(call.survey.key, call.survey.largest, call.seen.visible) for call in calls.values()]
    read = iter(on_host([flatten_batch(x, 1) for each in numbers for x in each]) if calls else ())
    return {
        layer: [_Offset.of(*head) for head in _offsets(next(read), next(read), next(read) > 1).T.tolist()]
        for layer in calls
    }


def _offsets(key: Tensor, weight: Tensor, several: Tensor) -> Tensor:
    """The arguments of `_Offset.of` for each head, with its most frequent offset: (5, heads), float64.

    From the strongest key of each row, its weight, and whether the row sees several keys: (items, heads, N) each.
    """
    heads, n = key.shape[1:]
    i, head = torch.arange(n, device=key.device), torch.arange(heads, device=key.device)[:, None]
    at, live = key - i, several & (key >= 0)
    place = torch.where(live, head * (2 * n) + at + n, heads * 2 * n).flatten()  # the last place is for all others
    counts = place.bincount(minlength=heads * 2 * n + 1)[:-1].view(heads, 2 * n)
    offset = counts.argmax(-1, keepdim=True) - n  # (heads, 1)
    reaching = live & (i + offset >= 0) & (i + offset < n)
    same = reaching & (at == offset)
    total = torch.where(same, weight.double(), 0.0).sum((0, 2))
    return torch.stack([offset[:, 0].double(), *(x.sum((0, 2)).double() for x in (same, reaching, live)), total])


def _named(offset: int) -> str:
    if abs(offset) <= 1:
        return {-1: "the previous token", 0: "its own position", 1: "the next token"}[offset]
    return f"the token {abs(offset)} {'before' if offset < 0 else 'after'}"
