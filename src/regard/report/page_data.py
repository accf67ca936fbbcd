"""What a page is told about a look: names and sentences as they are, numbers packed, and what was left out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from . import page_pack
from .look import LayerLook, Look, Remark
from .page_budget import Cut, every, fit, remarks_kept, spread, token, tokens_kept
from .page_statistics import described, names_of

__all__ = ["embedded", "told"]

_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def embedded(data: Any) -> str:
    r"""Write data as JSON that no parser of HTML can mistake for markup.

    >>> print(embedded(["</script>", "\u2028"]))
    ["\u003c/script\u003e","\u2028"]
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def told(look: Look, room: int) -> dict[str, Any]:
    """All that the page is told, in at most about `room` bytes of JSON."""
    layers = [layer for layer in look.layers if layer.heads]
    names = names_of(one for layer in layers for one in layer.heads)
    texts = _Texts(layers)
    remarks = remarks_kept(look.remarks)
    data: dict[str, Any] = {
        "facts": [[name, str(fact)] for name, fact in look.facts.items()],
        "statistics": [described(name) for name in names],
        "remarks": [_remark(one, layers) for one in remarks],
        "steps": [page_pack.MAP_STEPS, page_pack.WEIGHT_STEPS],
        "texts": texts.told(texts.longest),
        "layers": [_layer(layer, texts, names) for layer in layers],
    }
    spare = 2_000 + 160 * len(layers)  # the notes, names, padding
    spare += sum(6 * len(layer.heads) for layer in layers)  # the largest cells
    cut = fit(layers, room - spare - len(embedded(data).encode()), texts.longest)
    if not texts.whole:
        texts.longest = cut.rows or texts.longest
    data["texts"] = texts.told(cut.rows)
    for layer, entry in zip(layers, data["layers"], strict=True):
        entry.update(_packed(layer, cut))
    data["notes"] = [_about_maps(layers, cut), _about_keys(layers, cut)]
    if not texts.whole:
        data["notes"].append("The text is too long to keep every token; one without text is shown by its place.")
    if len(remarks) < len(look.remarks):
        data["notes"].append(f"{len(remarks):,} of {len(look.remarks):,} findings are listed, problems first.")
    return data


class _Texts:
    """The texts of all layers, each once, and how many tokens of each are kept."""

    def __init__(self, layers: Sequence[LayerLook]) -> None:
        self._places: dict[tuple[str, ...], int] = {}
        for layer in layers:
            for tokens in (layer.queries, layer.keys):
                self._places.setdefault(tuple(tokens), len(self._places))
        lengths = [len(tokens) for tokens in self._places]
        self.longest = tokens_kept(list(self._places))
        self.whole = self.longest >= max(lengths, default=0)

    def place(self, tokens: Sequence[str]) -> int:
        return self._places[tuple(tokens)]

    def told(self, rows: int) -> list[dict[str, Any]]:
        """Length, tokens in runs, and the parts whose queries have their strongest keys in the page."""
        return [
            {
                "length": len(tokens),
                "runs": [
                    [start, [token(one) for one in tokens[start:stop]]]
                    for start, stop in spread(len(tokens), self.longest)
                ],
                "parts": spread(len(tokens), rows),
            }
            for tokens in self._places
        ]


def _layer(layer: LayerLook, texts: _Texts, names: Sequence[str]) -> dict[str, Any]:
    nan = float("nan")
    return {
        "name": layer.name,
        "heads": [one.head for one in layer.heads],
        "queries": texts.place(layer.queries),
        "keys": texts.place(layer.keys),
        "statistics": page_pack.floats([[one.statistics.get(name, nan) for name in names] for one in layer.heads]),
    }


def _packed(layer: LayerLook, cut: Cut) -> dict[str, Any]:
    length = (len(layer.queries), len(layer.keys))
    height, width = layer.heads[0].map.shape
    merged = (every(height, cut.side), every(width, cut.side))
    k = min(cut.k, layer.heads[0].strongest[0].shape[1])
    largest, cells = page_pack.maps([one.map for one in layer.heads], length, merged)
    pairs = [one.strongest for one in layer.heads]
    keys, weights = page_pack.strongest(pairs, spread(length[0], cut.rows), k, length[1])
    return {
        "cells": [height, width],
        "every": merged,
        "largest": largest,
        "maps": cells,
        "k": k,
        "width": page_pack.width_of(length[1]),
        "strongest": keys,
        "weights": weights,
    }


def _remark(one: Remark, layers: Sequence[LayerLook]) -> dict[str, Any]:
    place = next((place for place, layer in enumerate(layers) if layer.name == one.layer), -1)
    there = {each.head for each in layers[place].heads} if place >= 0 else set()
    return {
        "rule": one.rule,
        "level": one.level,
        "text": one.text,
        "layer": place,
        "heads": [head for head in one.heads if head in there],
    }


def _about_maps(layers: Sequence[LayerLook], cut: Cut) -> str:
    sides = [side for layer in layers for side in layer.heads[0].map.shape]
    left = max(-(-side // every(side, cut.side)) for side in sides)
    merged = f", merged from up to {max(sides)} × {max(sides)} to fit the page" if left < max(sides) else ""
    return (
        f"Maps have at most {left} × {left} cells{merged}; a cell holds a mean weight, counted in "
        f"{page_pack.MAP_STEPS} steps of its square root: it errs by less than 0.4 % of the map's largest cell."
    )


def _about_keys(layers: Sequence[LayerLook], cut: Cut) -> str:
    most = max(layer.heads[0].strongest[0].shape[1] for layer in layers)
    queries = max(len(layer.queries) for layer in layers)
    if not most:
        return "No strongest keys were recorded."
    if not cut.rows:
        return "The strongest keys of the queries did not fit into the page; report fewer layers to see them."
    parts = spread(queries, cut.rows)
    kept = sum(stop - start for start, stop in parts)
    recorded = f", of the {most} that were recorded" if cut.k < most else ""
    some = f", for {kept:,} of up to {queries:,} queries, in {len(parts)} {'part' if len(parts) == 1 else 'parts'}"
    return (
        f"Each query has its {cut.k} strongest {'key' if cut.k == 1 else 'keys'}{recorded}"
        f"{some if kept < queries else ''}. Their weights err by less than 0.00002; weaker keys are left out."
    )
