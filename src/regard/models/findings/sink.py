"""Attention sinks: keys that receive weight from every row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..head_statistics import HeadSums
from ..record import AttentionRecord
from ..transfer import on_host
from .base import Finding, Rule, span

__all__ = ["Sink", "resting_heads"]

_SPECIAL = re.compile(r"\[[A-Za-z_]+\]|<[^<>\s]+>")  # [CLS], [SEP], <s>, <|endoftext|>


class _Strongest(NamedTuple):
    """The key that a head attends to most, over all rows."""

    share: float  # of the weight of all rows
    uniform: float  # what uniform attention gives one key
    first: int  # its position, the lowest over the batch
    last: int  # and the highest

    @property
    def odds(self) -> float:
        """The odds of its share against those of a uniform share: how many times the weight of an average other key."""
        least = 1e-12
        return self.share / max(1.0 - self.share, least) * (1.0 - self.uniform) / max(self.uniform, least)


@dataclass(frozen=True)
class Sink(Rule):
    """Heads that put much of their weight on one key in every row, usually the first token or a separator.

    Xiao et al. 2023 ("Efficient Streaming Language Models with Attention Sinks") find that language models park weight
    on the first tokens, and fail when these leave the window; Clark et al. 2019 ("What Does BERT Look At?") find it on
    [SEP]; Gu et al. 2024 ("When Attention Sink Emerges in Language Models") count a head from a share of 0.3.

    `share` is a share of the weight of all rows, averaged over the batch. A share alone says little, since on a short
    text any key has a large one; so a key must also have `times` the weight of an average other key. In a healthy
    model many heads rest on the first token, on the last, and on special tokens such as [CLS], [SEP] and BOS; there the
    weight must be `expected` times the average. At most `part` of the model's heads are named, the strongest first. A
    few rows prove nothing: `rows` is the number required.

    >>> Sink(share=0.5)
    Sink(share=0.5, times=20.0, expected=200.0, part=0.25, rows=8)
    """

    name: ClassVar[str] = "sink"
    shares: ClassVar[frozenset[str]] = frozenset({"share", "part"})

    share: float = 0.3
    times: float = 20.0
    expected: float = 200.0
    part: float = 0.25
    rows: int = 8

    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield one finding per key, with the heads that have this sink."""
        groups: dict[str, dict[tuple[str, int], float]] = {}
        for layer, heads in _strongest_keys(seen, seen.layers).items():
            for head, strongest in enumerate(heads):
                if seen[layer].lse.numel() >= self.rows * len(heads) and self._matches(strongest, seen, layer):
                    groups.setdefault(_named(strongest, seen, layer), {})[layer, head] = strongest.share
        most = max(1, math.floor(self.part * len(seen.heads)))
        for key, cases in groups.items():
            named = sorted(cases, key=cases.__getitem__, reverse=True)[:most]
            layers: dict[str, dict[int, float]] = {}
            for layer, head in sorted(named, key=lambda place: (seen.layers.index(place[0]), place[1])):
                layers.setdefault(layer, {})[head] = cases[layer, head]
            shares = span(cases[place] for place in named)
            rest = len(cases) - len(named)
            more = f"; {rest:,} more {'head does' if rest == 1 else 'heads do'} so less strongly" if rest else ""
            yield self.found(seen, layers, f"attention sink: {shares} of the weight goes to {key}{more}")

    def _matches(self, strongest: _Strongest, seen: AttentionRecord, layer: str) -> bool:
        times = self.expected if _is_expected(strongest, seen, layer) else self.times
        return strongest.share >= self.share and strongest.odds >= times


def resting_heads(
    seen: AttentionRecord, layers: Iterable[str], share: float = 0.5, *, healthy: bool = False
) -> dict[str, set[int]]:
    """The heads of some layers that put at least `share` of the weight of all rows on one key.

    With `healthy`, only those that do so where heads of healthy models rest: at either end, or on a special token.
    """
    return {
        layer: {
            head
            for head, strongest in enumerate(heads)
            if strongest.share >= share and (not healthy or _is_expected(strongest, seen, layer))
        }
        for layer, heads in _strongest_keys(seen, layers).items()
    }


def _strongest_keys(seen: AttentionRecord, layers: Iterable[str]) -> dict[str, list[_Strongest]]:
    names = list(layers)
    if not names:
        return {}
    sums = seen.sums()
    found = on_host([_strongest(sums[layer]) for layer in names])
    return {
        layer: [_Strongest(share, uniform, int(first), int(last)) for share, uniform, first, last in numbers.T.tolist()]
        for layer, numbers in zip(names, found, strict=True)
    }


def _strongest(sums: HeadSums) -> Tensor:
    """The fields of `_Strongest` for each head: (4, heads), float64."""
    rows = sums.rows.some.clamp(min=1)
    shares = (sums.most / rows).mean(0), (sums.rows.uniform / rows).mean(0)
    return torch.stack([*shares, sums.key.amin(0), sums.key.amax(0)])


def _text(position: int, seen: AttentionRecord, layer: str) -> str:
    """The text of a key, if the texts are known and all batch items have the same one there."""
    size = seen[layer].shape[-1]
    found = {texts[position] if len(texts) == size else "" for texts in seen.texts_by_item()}
    return found.pop() if len(found) == 1 else ""


def _is_expected(strongest: _Strongest, seen: AttentionRecord, layer: str) -> bool:
    """Whether the key is one on which heads of healthy models rest: at either end, or a special token."""
    first, last = strongest.first, strongest.last
    ends = (0, seen[layer].shape[-1] - 1)
    return first == last and (first in ends or bool(_SPECIAL.fullmatch(_text(first, seen, layer).strip())))


def _named(strongest: _Strongest, seen: AttentionRecord, layer: str) -> str:
    """Name the key, if all batch items share it."""
    first = strongest.first
    if first != strongest.last:
        return "one key of each sequence"
    text = _text(first, seen, layer).strip()
    quoted = f", {text if _SPECIAL.fullmatch(text) else repr(text)}" if text else ""
    if first == 0:
        return f"the first token{quoted}"
    return f"the last token{quoted}" if first == seen[layer].shape[-1] - 1 else f"the token at position {first}{quoted}"
