"""Heads that attend by position, not by content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..record import AttentionRecord
from .base import Finding, Rule, span
from .sampling import flatten_batch

__all__ = ["Positional"]


class _Offset(NamedTuple):
    """The offset at which a head's strongest key usually is, and how consistently."""

    offset: int
    share: float  # of the rows that have a key there, those in which it is the strongest
    weight: float  # its mean weight in these
    reach: float  # the share of rows that have a key there
    rows: int  # the number of rows that have one


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
        """Yield one finding per layer and offset, with all the heads that have it."""
        for layer in seen.layers:
            found = _offsets(seen, layer)
            groups: dict[int, dict[int, _Offset]] = {}
            for head, usual in enumerate(found):
                if self._matches(usual):
                    groups.setdefault(usual.offset, {})[head] = usual
            for offset, cases in sorted(groups.items()):
                rows, weight = (span([getattr(x, field) for x in cases.values()]) for field in ("share", "weight"))
                text = (
                    f"{rows} of the rows attend most to {_named(offset)}, with {weight} of their weight (by position)"
                )
                yield self.found(layer, {head: case.share for head, case in cases.items()}, len(found), text)

    def _matches(self, usual: _Offset) -> bool:
        enough = usual.rows >= self.rows and usual.reach >= self.reach
        return enough and usual.share >= self.share and usual.weight >= self.weight


def _offsets(seen: AttentionRecord, layer: str) -> list[_Offset]:
    last = seen[layer]
    n = last.lse.shape[-1]
    if n != last.shape[-1] or not last.lse.numel():
        return []
    weights, key = (flatten_batch(x, 2)[..., 0] for x in seen.strongest(layer))  # (items, heads, N)
    i = torch.arange(n, device=key.device)
    several = (flatten_batch(last.visible, 1) > 1) & (key >= 0)
    offsets = []
    for head in range(key.shape[1]):
        at, live = key[:, head] - i, several[:, head]
        if not bool(live.any()):
            offsets.append(_Offset(0, 0.0, 0.0, 0.0, 0))
            continue
        offset = int(at[live].mode().values)
        reaching = live & (i + offset >= 0) & (i + offset < n)
        same = reaching & (at == offset)
        count, total = int(same.sum()), int(reaching.sum())
        weight = float(weights[:, head][same].mean())
        offsets.append(_Offset(offset, count / total, weight, total / int(live.sum()), total))
    return offsets


def _named(offset: int) -> str:
    if abs(offset) <= 1:
        return {-1: "the previous token", 0: "themselves", 1: "the next token"}[offset]
    return f"the token {abs(offset)} {'before' if offset < 0 else 'after'} them"
