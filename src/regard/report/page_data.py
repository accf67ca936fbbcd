"""The data of a page: names and sentences as they are, numbers packed, and notes on what was left out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import page_pack
from .look import LayerLook, Look, Remark
from .page_budget import (
    MIN_KEYS,
    REMARK_SHARE,
    TEXT_SHARE,
    PageDetail,
    clip_token,
    excerpts,
    fit_detail,
    fit_remarks,
    fit_strongest,
    fit_tokens,
    maps_room,
    merge_factors,
)
from .page_statistics import describe

__all__ = ["page_data", "script_json"]

_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def script_json(data: Any) -> str:
    r"""Write data as JSON that no HTML parser can mistake for markup.

    >>> print(script_json(["</script>", "\u2028"]))
    ["\u003c/script\u003e","\u2028"]
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def page_data(look: Look, budget: int) -> dict[str, Any]:
    """Everything the page needs, in at most about `budget` bytes of JSON."""
    layers = [layer for layer in look.layers if layer.heads]
    names = list(dict.fromkeys(name for layer in layers for one in layer.heads for name in one.statistics))
    texts = _Texts(layers, TEXT_SHARE * budget)
    remarks = fit_remarks(look.remarks, REMARK_SHARE * budget)
    data: dict[str, Any] = {
        "facts": [[name, str(fact)] for name, fact in look.facts.items()],
        "statistics": [describe(name) for name in names],
        "remarks": [_remark(one, layers) for one in remarks],
        "least": page_pack.LEAST_WEIGHT,
        "texts": texts.data(texts.longest),
        "layers": [_layer(layer, texts, names) for layer in layers],
    }
    reserved = 2_000 + 200 * len(layers)  # notes, names, padding
    reserved += sum(6 * len(layer.heads) for layer in layers)  # the largest cell of each map
    detail, packed = _packed(layers, budget - reserved - len(script_json(data).encode()), texts.longest)
    if not texts.complete:
        texts.longest = detail.rows or texts.longest
    data["texts"] = texts.data(detail.rows)
    for entry, more in zip(data["layers"], packed, strict=True):
        entry.update(more)
    data["notes"] = [_maps_note(layers, detail), _keys_note(layers, detail)]
    if not texts.complete:
        data["notes"].append("The text is too long to keep every token; a token without text is shown by its position.")
    if len(remarks) < len(look.remarks):
        data["notes"].append(f"{len(remarks):,} of {len(look.remarks):,} findings are listed, problems first.")
    return data


def _packed(layers: Sequence[LayerLook], budget: int, rows: int) -> tuple[PageDetail, list[dict[str, Any]]]:
    """The maps and strongest keys of each layer, in `budget` bytes, and how much detail that leaves.

    The detail is an estimate; if it was too high, the packed maps or keys are replaced by smaller ones.
    """
    detail = fit_detail(layers, budget, rows)
    maps = [_packed_maps(layer, detail) for layer in layers]
    room = maps_room(layers, budget, rows)
    while _bytes(maps) > room and detail.side > 1:
        detail = replace(detail, side=detail.side * 3 // 4)
        maps = [_packed_maps(layer, detail) for layer in layers]
    left = budget - _bytes(maps)
    detail = fit_strongest(layers, left, replace(detail, rows=rows))
    keys = [_packed_strongest(layer, detail) for layer in layers]
    while detail.rows and (size := _bytes(keys)) > left:
        fewer = {"k": detail.k - 1} if detail.k > MIN_KEYS else {"rows": int(detail.rows * 0.995 * left / size)}
        detail = replace(detail, **fewer)
        keys = [_packed_strongest(layer, detail) for layer in layers]
    return detail, [one | other for one, other in zip(maps, keys, strict=True)]


def _bytes(packed: Sequence[dict[str, Any]]) -> int:
    return sum(len(text) for entry in packed for text in entry.values() if isinstance(text, str))


class _Texts:
    """The texts of all layers, each stored once, and how many tokens of each are kept."""

    def __init__(self, layers: Sequence[LayerLook], budget: float) -> None:
        self._indices: dict[tuple[str, ...], int] = {}
        for layer in layers:
            for tokens in (layer.queries, layer.keys):
                self._indices.setdefault(tuple(tokens), len(self._indices))
        lengths = [len(tokens) for tokens in self._indices]
        self.longest = fit_tokens(list(self._indices), budget)
        self.complete = self.longest >= max(lengths, default=0)

    def index(self, tokens: Sequence[str]) -> int:
        return self._indices[tuple(tokens)]

    def data(self, rows: int) -> list[dict[str, Any]]:
        """Length, excerpts of tokens, and the parts whose queries have their strongest keys in the page."""
        return [
            {
                "length": len(tokens),
                "runs": [
                    [start, [clip_token(one) for one in tokens[start:stop]]]
                    for start, stop in excerpts(len(tokens), self.longest)
                ],
                "parts": excerpts(len(tokens), rows),
            }
            for tokens in self._indices
        ]


def _layer(layer: LayerLook, texts: _Texts, names: Sequence[str]) -> dict[str, Any]:
    nan = float("nan")
    return {
        "name": layer.name,
        "heads": [one.head for one in layer.heads],
        "queries": texts.index(layer.queries),
        "keys": texts.index(layer.keys),
        "statistics": page_pack.pack_floats([[one.statistics.get(name, nan) for name in names] for one in layer.heads]),
    }


def _packed_maps(layer: LayerLook, detail: PageDetail) -> dict[str, Any]:
    merged = merge_factors(layer, detail.side)
    length = (len(layer.queries), len(layer.keys))
    largest, cells = page_pack.pack_maps([one.map for one in layer.heads], length, merged, detail.map_steps)
    shape = list(layer.heads[0].map.shape)
    return {"cells": shape, "every": merged, "steps": detail.map_steps, "largest": largest, "maps": cells}


def _packed_strongest(layer: LayerLook, detail: PageDetail) -> dict[str, Any]:
    k, keys = min(detail.k, layer.heads[0].strongest[0].shape[1]), len(layer.keys)
    parts = excerpts(len(layer.queries), detail.rows)
    found, weights = page_pack.pack_strongest(
        [one.strongest for one in layer.heads], parts, k, keys, detail.weight_steps
    )
    width = page_pack.index_bytes(keys)
    return {"k": k, "width": width, "fine": detail.weight_steps, "strongest": found, "weights": weights}


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


def _maps_note(layers: Sequence[LayerLook], detail: PageDetail) -> str:
    shapes = [(one.heads[0].map.shape, merge_factors(one, detail.side)) for one in layers]
    left = max(-(-side // factor) for shape, merged in shapes for side, factor in zip(shape, merged, strict=True))
    sides = max(max(shape) for shape, _ in shapes)
    merged = f", merged from up to {sides} × {sides} to fit the page" if left < sides else ""
    exact = all(
        tuple(shape) == (len(one.queries), len(one.keys)) for one, (shape, _) in zip(layers, shapes, strict=True)
    )
    holds = "a single weight" if exact and not merged else "a mean weight"
    error = f"the error is below {100 / detail.map_steps:.1f} % of the map's largest cell"
    return (
        f"Maps have at most {left} × {left} cells{merged}; a cell holds {holds}, whose square root "
        f"is rounded to {detail.map_steps} steps: {error}."
    )


def _keys_note(layers: Sequence[LayerLook], detail: PageDetail) -> str:
    most = max(layer.heads[0].strongest[0].shape[1] for layer in layers)
    queries = max(len(layer.queries) for layer in layers)
    if not most:
        return "No strongest keys were recorded."
    if not detail.rows:
        return "The strongest keys of the queries did not fit into the page; report fewer layers to see them."
    parts = excerpts(queries, detail.rows)
    kept = sum(stop - start for start, stop in parts)
    recorded = f" of the {most} recorded" if detail.k < most else ""
    some = f", for {kept:,} of up to {queries:,} queries, in {len(parts)} {'part' if len(parts) == 1 else 'parts'}"
    return (
        f"Each query has its {detail.k} strongest {'key' if detail.k == 1 else 'keys'}{recorded}"
        f"{some if kept < queries else ''}, down to a weight of {page_pack.LEAST_WEIGHT}. "
        f"The error of their weights is below {1 / detail.weight_steps:.1g}."
    )
