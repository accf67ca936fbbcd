"""Keys that receive weight for being there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...observation import Observation
from .base import Finding, Rule, span
from .sampling import flatten_batch

if TYPE_CHECKING:
    from ..seen import Seen

__all__ = ["Sink"]


@dataclass(frozen=True)
class Sink(Rule):
    """Heads that give much of their weight to one key, whatever the row: mostly the first token, or a separator.

    Xiao et al. 2023 ("Efficient Streaming Language Models with Attention Sinks") find that language models park weight
    on the first tokens, and fail when these leave the window; Clark et al. 2019 ("What Does BERT Look At?") find it on
    [SEP]; Gu et al. 2024 ("When Attention Sink Emerges in Language Models") count a head from a share of 0.3 on.

    `share` is the share of all rows' weight, the mean over batch items; `times` is how many times more than uniform
    attention could give it that must be, which matters for short sequences.

    >>> Sink(share=0.5)
    Sink(share=0.5, times=3.0)
    """

    name: ClassVar[str] = "sink"
    shares: ClassVar[frozenset[str]] = frozenset({"share"})

    share: float = 0.3
    times: float = 3.0

    def judge(self, seen: Seen) -> Iterator[Finding]:
        """Give one finding a layer and key, with all the heads whose sink it is."""
        for layer in seen.layers:
            share, uniform, place = _strongest(seen[layer])
            groups: dict[str, dict[int, float]] = {}
            for head in range(len(share)):
                value = float(share[head])
                if value >= self.share and value >= self.times * float(uniform[head]):
                    groups.setdefault(_named(place[:, head], seen[layer]), {})[head] = value
            for key, cases in groups.items():
                says = f"{span(cases.values())} of the weight goes to {key} (an attention sink)"
                yield self.found(layer, cases, len(share), says)


def _strongest(seen: Observation) -> tuple[Tensor, Tensor, Tensor]:
    """Each head's share on its most attended key and what uniform attention could give one, (heads,); where that is."""
    received, visible = flatten_batch(seen.received, 1).float(), flatten_batch(seen.visible, 1)
    if not received.shape[-1] or not received.shape[0]:
        empty = received.new_zeros(received.shape[1])
        return empty, empty, received.new_zeros(0, received.shape[1], dtype=torch.int64)
    most, place = received.max(-1)
    rows = (visible > 0).sum(-1).clamp(min=1)
    even = torch.where(visible > 0, 1.0 / visible.clamp(min=1), 0.0).sum(-1)
    return (most / rows).mean(0), (even / rows).mean(0), place


def _named(places: Tensor, seen: Observation) -> str:
    """Say which key it is, over the batch items."""
    first, last = int(places.min()), int(places.max())
    if first != last:
        return "one key of each sequence"
    if first == 0:
        return "the first token"
    return "the last token" if first == seen.received.shape[-1] - 1 else f"the token at place {first}"
