"""The record of a watched model: for each layer the sums over its calls and the last Observation, never the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.chunked.stacked_survey import StackedSurvey
from regard.chunked.statistics import Survey
from regard.errors import ArgumentError
from regard.observation import Observation
from regard.report.page_budget import keys_per_query

from .head_statistics import STATISTICS, Head, HeadSums, SurveyedCall, average_heads, sum_heads, survey_call
from .transfer import on_host

__all__ = ["MAP_SIDE", "AttentionRecord", "LayerRecord"]

MAP_SIDE = 64  # cells along each side of a pooled map
_IS_LARGEST = torch.tensor([name == "max_logit" for name in STATISTICS], device="cpu")[:, None]
_STRONGEST = 16  # keys that a report names per row, at most


@dataclass
class LayerRecord:
    """What is kept of one layer: sums over its calls, and the last call."""

    last: Observation  # the last call
    found: Survey | StackedSurvey  # what the pass over its weights found
    totals: Tensor | None = None  # (statistics, heads), on its device: the sums over calls, and the largest logit
    counts: Tensor | None = None  # the number of calls in which a statistic was defined
    is_counted: bool = False  # whether the totals include the last call
    grid: Tensor | None = None  # for the last call, read back on first use
    strongest: tuple[Tensor, Tensor] | None = None  # for the last call, computed on first use

    @property
    def call(self) -> SurveyedCall:
        """The last call and its survey."""
        return SurveyedCall(self.last, self.found if isinstance(self.found, Survey) else self.found.survey)

    @property
    def size(self) -> int:
        """The number of heads."""
        return self.last.shape[-3]

    def count(self, means: Tensor) -> None:
        """Add the statistics of the last call, (statistics, heads)."""
        defined = means.isnan().logical_not()
        values = torch.where(defined, means, 0.0)
        if self.totals is None or self.counts is None:
            self.totals, self.counts = torch.where(_IS_LARGEST.to(means.device), means, values), defined.long()
        else:
            totals = self.totals.to(means.device)  # a table that was read before is on the host
            largest = torch.maximum(totals, means)  # it keeps a NaN visible
            self.totals = torch.where(_IS_LARGEST.to(means.device), largest, totals + values)
            self.counts = self.counts.to(means.device) + defined
        self.is_counted = True


@dataclass
class AttentionRecord:
    """The layers, heads and tokens of a watched model: what the rules of `findings` read."""

    tokens: Tensor | None = None  # (batch, n), if the model was called with integers
    # Of the tokens, if somebody gave them: one list, or one per batch item.
    texts: list[str] | list[list[str]] | None = field(default=None, kw_only=True)
    title: str = field(default="attention", kw_only=True)  # what a report is called: the model
    calls: int = 0
    missed: dict[str, str] = field(default_factory=dict)  # calls that could not be observed, and why
    random_weights: tuple[str, ...] = ()  # weights of the model that its files lack, and that were drawn at random
    _records: dict[str, LayerRecord] = field(default_factory=dict)
    _heads: list[Head] | None = field(default=None, compare=False)
    _sums: dict[str, HeadSums] | None = field(default=None, compare=False)

    def texts_by_item(self) -> list[list[str]]:
        """The texts of each batch item, or one list for all of them, checked; empty if nobody gave them."""
        texts: Any = self.texts
        if texts is None or (isinstance(texts, list | tuple) and not texts):
            return []
        lists = texts if isinstance(texts, list | tuple) and not isinstance(texts[0], str) else [texts]
        for one in lists:
            others = [x for x in one if not isinstance(x, str)] if isinstance(one, list | tuple) else [one]
            if others:
                raise ArgumentError(
                    "Seen: texts must be the texts of the tokens, a list of strings, or one such list per batch item. "
                    f"Got {type(others[0]).__name__}; decode the token ids one by one."
                )
        return [list(one) for one in lists]

    @property
    def layers(self) -> list[str]:
        """The names of the modules that attended, in the order of their first calls."""
        return list(self._records)

    @property
    def heads(self) -> list[Head]:
        """One record per head, layer by layer."""
        if self._heads is None:
            self._heads = self._read_heads()
        return list(self._heads)

    def __getitem__(self, layer: str | int) -> Observation:
        """The last call of a layer, by its name or by its place in the order of the first calls."""
        return self._record(layer).last

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def map(self, layer: str | int) -> Tensor:
        """The pooled weights of the layer's last call, mean over the batch: (heads, height, width), at most 64 × 64."""
        record = self._record(layer)
        if record.grid is None:
            record.grid = record.call.survey.map.mean(0).float().cpu()
        return record.grid

    def strongest(self, layer: str | int) -> tuple[Tensor, Tensor]:
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
        shape = seen.shape
        if not math.prod(shape):
            why = f"a call had nothing to see: its weights are {shape} as (batch, heads, queries, keys)"
            self.missed.setdefault(name, why)
            return
        while name in self._records and self._records[name].size != shape[-3]:  # another attention in the same module
            name += "#"
        found, record = survey_call(seen, MAP_SIDE), self._records.get(name)
        self._heads = self._sums = None
        if record is None:
            self._records[name] = LayerRecord(seen, found)
            return
        if not record.is_counted:
            record.count(average_heads(*sum_heads([record.call])))
        record.last, record.found = seen, found
        record.is_counted, record.grid, record.strongest = False, None, None

    def surveys(self) -> dict[str, SurveyedCall]:
        """The last call of each layer, and what the pass over its weights found."""
        return {name: record.call for name, record in self._records.items()}

    def sums(self) -> dict[str, HeadSums]:
        """Sums over the rows and keys of each head in the last call of each layer; on the host if kernels made them."""
        if self._sums is None:
            calls = [record.call for record in self._records.values()]
            self._sums = dict(zip(self._records, sum_heads(calls, read_back=True), strict=True))
        return self._sums

    def _read_heads(self) -> list[Head]:
        """Average what has not been averaged yet, and read all layers back at once."""
        sums = self.sums()
        waiting = {name: record for name, record in self._records.items() if not record.is_counted}
        for record, means in zip(
            waiting.values(), on_host([average_heads(sums[name]) for name in waiting]), strict=True
        ):
            record.count(means)
        totals = [record.totals for record in self._records.values() if record.totals is not None]
        counts = [record.counts for record in self._records.values() if record.counts is not None]
        read = on_host([*totals, *counts])
        heads = []
        for name, total, count in zip(self._records, read[: len(totals)], read[len(totals) :], strict=True):
            means = torch.where(_IS_LARGEST, total, total / count)
            for head, numbers in enumerate(means.T.tolist()):
                heads.append(Head(name, head, **dict(zip(STATISTICS, numbers, strict=True))))
        return heads

    def layer_name(self, layer: str | int) -> str:
        """The name of a layer that is given by its name, or by its place in the order of the first calls."""
        if isinstance(layer, str):
            return layer
        if type(layer) is not int or not -len(self._records) <= layer < len(self._records):
            most = f"from 0 to {len(self._records) - 1}" if self._records else "but none was seen"
            raise ArgumentError(f"Seen: a layer is its name, or its place, {most}. Got {layer!r}.")
        return self.layers[layer]

    def _record(self, layer: str | int) -> LayerRecord:
        name = self.layer_name(layer)
        if name not in self._records:
            known = ", ".join(map(repr, self._records)) or "none; did the model run inside watch, and does it call "
            known += "" if self._records else "scaled_dot_product_attention, flex_attention, FlashAttention or regard?"
            raise ArgumentError(f"Seen: no attention was seen in {name!r}. Seen: {known}.")
        return self._records[name]
