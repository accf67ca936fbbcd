"""Attention sinks: keys that receive weight from every row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...observation import Observation
from ..head_statistics import HeadSums
from ..record import AttentionRecord
from ..transfer import on_host
from .base import Finding, Rule, span

__all__ = ["Sink"]


@dataclass(frozen=True)
class Sink(Rule):
    """Heads that put much of their weight on one key in every row, usually the first token or a separator.

    Xiao et al. 2023 ("Efficient Streaming Language Models with Attention Sinks") find that language models park weight
    on the first tokens, and fail when these leave the window; Clark et al. 2019 ("What Does BERT Look At?") find it on
    [SEP]; Gu et al. 2024 ("When Attention Sink Emerges in Language Models") count a head from a share of 0.3.

    `share` is a share of the weight of all rows, averaged over the batch; it must also be `times` what uniform
    attention would give that key, which matters for short sequences.

    >>> Sink(share=0.5)
    Sink(share=0.5, times=3.0)
    """

    name: ClassVar[str] = "sink"
    shares: ClassVar[frozenset[str]] = frozenset({"share"})

    share: float = 0.3
    times: float = 3.0

    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield one finding per layer and key, with all the heads that have this sink."""
        found = on_host([_strongest(sums) for sums in seen.sums().values()])
        for layer, numbers in zip(seen.layers, found, strict=True):
            groups: dict[str, dict[int, float]] = {}
            for head, (share, uniform, first, last) in enumerate(numbers.T.tolist()):
                if share >= self.share and share >= self.times * uniform:
                    groups.setdefault(_named(int(first), int(last), seen[layer]), {})[head] = share
            for key, cases in groups.items():
                text = f"{span(cases.values())} of the weight goes to {key} (an attention sink)"
                yield self.found(layer, cases, numbers.shape[1], text)


def _strongest(sums: HeadSums) -> Tensor:
    """Per head: the share on its most attended key, what uniform attention would give one, and the key's position.

    The position is the lowest and the highest over the batch: (4, heads), float64.
    """
    rows = sums.rows.some.clamp(min=1)
    shares = (sums.most / rows).mean(0), (sums.rows.uniform / rows).mean(0)
    return torch.stack([*shares, sums.key.amin(0), sums.key.amax(0)])


def _named(first: int, last: int, seen: Observation) -> str:
    """Name the key, if all batch items share it."""
    if first != last:
        return "one key of each sequence"
    if first == 0:
        return "the first token"
    return "the last token" if first == seen.shape[-1] - 1 else f"the token at position {first}"
