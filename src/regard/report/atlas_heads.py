"""The list of heads beside an atlas: a small map, statistics and findings of each, as they become known."""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from regard.report.files import json_safe
from regard.report.look import Remark
from regard.report.page_budget import merge_factor
from regard.report.page_pack import quantize_maps
from regard.report.page_statistics import describe

__all__ = ["HeadList", "search_tokens"]

_THUMBNAIL = 32  # cells along each side of a small map, at most
_STEPS = 255
_MOST_FOUND = 2000  # matches of a search


class HeadList:
    """What is known of the heads of each layer, in the order of the layers; one thread adds, others read.

    >>> import torch
    >>> heads = HeadList()
    >>> heads.add([{"entropy": 0.5}], torch.eye(2)[None])
    >>> heads.conclude([])
    >>> heads.as_json(["layer 0"])["first"]
    [0, 0]
    """

    def __init__(self) -> None:
        self._layers: list[list[dict[str, Any]]] = []
        self._names: list[str] = []
        self._remarks: list[Remark] = []
        self._complete = False

    def add(self, statistics: Sequence[Mapping[str, float]], maps: Tensor) -> None:
        """Add the next layer: the statistics of each head, and pooled maps (heads, height, width)."""
        height, width = maps.shape[-2:]
        merged = merge_factor(height, _THUMBNAIL), merge_factor(width, _THUMBNAIL)
        largest, cells = quantize_maps(list(maps), (height, width), merged, _STEPS)
        self._names = self._names or list(statistics[0])
        heads = [
            {
                "values": [json_safe(float(numbers.get(name, float("nan")))) for name in self._names],
                "largest": float(top),
                "cells": base64.b64encode(cell.tobytes()).decode("ascii"),
                "shape": list(cell.shape),
            }
            for numbers, top, cell in zip(statistics, largest, cells, strict=True)
        ]
        self._layers.append(heads)

    def conclude(self, remarks: Sequence[Remark]) -> None:
        """Add the findings; after that nothing changes."""
        self._remarks, self._complete = list(remarks), True

    def as_json(self, layers: Sequence[str]) -> dict[str, Any]:
        """Everything that is known, for layers of these names."""
        complete = self._complete  # before the rest: if it is set, so is everything else
        remarks = [
            {"rule": one.rule, "level": one.level, "text": one.text, "layer": place, "heads": list(one.heads)}
            for one in self._remarks
            if (place := layers.index(one.layer) if one.layer in layers else -1) >= 0
        ]
        return {
            "complete": complete,
            "statistics": [describe(name) for name in self._names],
            "layers": list(self._layers),
            "remarks": remarks,
            "first": self._most_notable(remarks) if complete else None,
        }

    def _most_notable(self, remarks: Sequence[dict[str, Any]]) -> list[int] | None:
        """The head to open on: the first that a finding names, problems first; or the one with the least entropy."""
        for one in sorted(remarks, key=lambda one: one["level"] != "problem"):
            if one["heads"]:
                return [one["layer"], min(one["heads"])]
        places = [[layer, head] for layer, heads in enumerate(self._layers) for head in range(len(heads))]
        measure = next(
            (self._names.index(name) for name in ("relative_entropy", "entropy") if name in self._names), None
        )
        if measure is None or not places:
            return places[0] if places else None
        values = [self._layers[layer][head]["values"][measure] for layer, head in places]
        return min(zip(values, places, strict=True), key=lambda pair: float("inf") if pair[0] is None else pair[0])[1]


def search_tokens(tokens: Sequence[str], wanted: str) -> list[int]:
    """The tokens at which `wanted` begins, also if several make it up; spaces and case do not count.

    >>> search_tokens([" The", " White", " Rab", "bit", " white"], "white rabbit"), search_tokens(["a", "b"], "white")
    ([1], [])
    """
    plain = ["".join(token.split()).casefold() for token in tokens]
    text, needle = "".join(plain), "".join(wanted.split()).casefold()
    starts = list(accumulate(map(len, plain), initial=0))[:-1]
    found: list[int] = []
    for at in _occurrences(text, needle):
        token = bisect_right(starts, at) - 1
        if not found or found[-1] != token:
            found.append(token)
        if len(found) == _MOST_FOUND:
            break
    return found


def _occurrences(text: str, needle: str) -> Iterator[int]:
    at = text.find(needle) if needle else -1
    while at >= 0:
        yield at
        at = text.find(needle, at + 1)
