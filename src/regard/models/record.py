"""The record of a watched model: for each layer the sums over its calls and the last Observation, never the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.observation import Observation
from regard.report.page_budget import keys_per_query

from .head_statistics import Head, measure_heads

__all__ = ["MAP_SIDE", "AttentionRecord", "LayerRecord"]

MAP_SIDE = 64  # cells along each side of a pooled map
_STRONGEST = 16  # keys that a report names per row, at most


@dataclass
class LayerRecord:
    """What is kept of one layer: sums over its calls, and the last call."""

    last: Observation
    map: Tensor  # (heads, height, width)
    totals: dict[str, Tensor]
    counts: dict[str, Tensor]  # the number of calls in which a statistic was defined
    strongest: tuple[Tensor, Tensor] | None = None  # for the last call, computed on first use

    def heads(self, name: str) -> list[Head]:
        """The statistics of each head, averaged over the calls."""
        means = {key: (total / self.counts[key]).tolist() for key, total in self.totals.items()}
        means["max_logit"] = self.totals["max_logit"].tolist()
        return [
            Head(name, head, **{key: values[head] for key, values in means.items()}) for head in range(len(self.map))
        ]


@dataclass
class AttentionRecord:
    """The layers, heads and tokens of a watched model: what the rules of `findings` read."""

    tokens: Tensor | None = None  # (batch, n), if the model was called with integers
    calls: int = 0
    missed: dict[str, str] = field(default_factory=dict)  # calls that could not be observed, and why
    random_weights: tuple[str, ...] = ()  # weights of the model that its files lack, and that were drawn at random
    _records: dict[str, LayerRecord] = field(default_factory=dict)

    @property
    def layers(self) -> list[str]:
        """The names of the modules that attended, in the order of their first calls."""
        return list(self._records)

    @property
    def heads(self) -> list[Head]:
        """One record per head, layer by layer."""
        return [head for name, layer in self._records.items() for head in layer.heads(name)]

    def __getitem__(self, layer: str) -> Observation:
        return self._record(layer).last

    def map(self, layer: str) -> Tensor:
        """The pooled weights of the layer's last call, mean over the batch: (heads, height, width), at most 64 × 64."""
        return self._record(layer).map

    def strongest(self, layer: str) -> tuple[Tensor, Tensor]:
        """The strongest keys of each row in the layer's last call, as `Observation.top` gives them; computed once.

        There are 16 per row, or for long texts as many as a report can hold, but at least 3.
        """
        record = self._record(layer)
        if record.strongest is None:
            worth = keys_per_query([one.last.shape[-3:] for one in self._records.values()], _STRONGEST)
            record.strongest = record.last.top(min(worth, record.last.shape[-1]))
        return record.strongest

    def add(self, name: str, seen: Observation) -> None:
        """Record a call."""
        self.calls += 1
        if not math.prod(seen.shape):
            why = f"a call had nothing to see: its weights are {seen.shape} as (batch, heads, queries, keys)"
            self.missed.setdefault(name, why)
            return
        heads = seen.shape[-3]
        while name in self._records and len(self._records[name].map) != heads:  # another attention in the same module
            name += "#"
        now = measure_heads(seen, MAP_SIDE)
        defined = {key: x.isnan().logical_not() for key, x in now.numbers.items()}
        values = {key: torch.where(defined[key], x, 0.0) for key, x in now.numbers.items() if key != "max_logit"}
        values["max_logit"] = now.numbers["max_logit"]  # keep a NaN visible
        record = self._records.get(name)
        if record is None:
            self._records[name] = LayerRecord(seen, now.map, values, {key: x.long() for key, x in defined.items()})
            return
        record.last, record.map, record.strongest = seen, now.map, None
        for key, x in values.items():
            total = record.totals[key]
            record.counts[key] += defined[key]
            record.totals[key] = torch.maximum(total, x) if key == "max_logit" else total + x

    def _record(self, name: str) -> LayerRecord:
        if name not in self._records:
            known = ", ".join(map(repr, self._records)) or "none; did the model run inside watch, and does it call "
            known += "" if self._records else "scaled_dot_product_attention, regard or torch.nn.MultiheadAttention?"
            raise ArgumentError(f"Seen: no attention was seen in {name!r}. Seen: {known}.")
        return self._records[name]
