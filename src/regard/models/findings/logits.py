"""Logits that are too large for stable training and for half precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..record import AttentionRecord
from ..transfer import on_host
from .base import Finding, Rule, by_layer, span

__all__ = ["LargeLogits"]


@dataclass(frozen=True)
class LargeLogits(Rule):
    """Logits beyond a threshold: they grow before training diverges.

    Dehghani et al. 2023 ("Scaling Vision Transformers to 22 Billion Parameters") saw training diverge as logits grew,
    and normalised queries and keys to prevent it. Wortsman et al. 2023 ("Small-scale proxies for large-scale
    Transformer training instabilities") reproduce it in small models at high learning rates. Kimi K2 (2025) scales
    down the weights of a head whose largest logit exceeds 100 (`regard.models.qk_clip_`).

    `notable` and `problem` are in units of scaled logits, as they enter the softmax. Logits that are not finite are
    always a problem.

    >>> LargeLogits(notable=50.0)
    LargeLogits(notable=50.0, problem=1000.0)
    """

    name: ClassVar[str] = "logits"

    notable: float = 100.0
    problem: float = 1000.0

    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield at most three findings: logits not finite, beyond `problem`, and beyond `notable`."""
        layers = by_layer(seen)
        sums = seen.sums()
        last = on_host([sums[layer].rows.max_logit.amax(0) for layer in layers])
        groups: dict[str, dict[str, dict[int, float]]] = {}
        for (layer, heads), largest_logits in zip(layers.items(), last, strict=True):
            broken = largest_logits.isnan().tolist()
            for head in heads:
                largest = math.inf if broken[head.head] else head.max_logit
                if largest > min(self.notable, self.problem):
                    groups.setdefault(self._kind(largest), {}).setdefault(layer, {})[head.head] = largest
        for kind, cases in groups.items():
            sizes = [value for heads in cases.values() for value in heads.values()]
            text = "the logits are not finite" if kind == "infinite" else _sizes(sizes)
            yield self.found(seen, cases, text, "notable" if kind == "notable" else "problem")

    def _kind(self, largest: float) -> str:
        if largest == math.inf:
            return "infinite"
        return "problem" if largest > self.problem else "notable"


def _sizes(largest: Iterable[float]) -> str:
    apart = 2.0 ** (math.floor(math.log2(max(largest))) - 7)
    return f"the largest logit is {span(largest, '.0f')} (in bfloat16, numbers of that size are {apart:g} apart)"
