"""What the pages of a census show, as plain data: few digits, short lists, and no more than a browser can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...report.labels import layer_legend
from ...report.provenance import provenance
from ..loading import random_weights_text
from .counted_heads import CountedHeads, Exemplar
from .difference import CensusDifference
from .groups import Group, nearest_heads, profiles
from .row_values import BEHAVIOURS
from .scales import SCALES
from .summary import Curve, HeadRecord, Summary

__all__ = ["comparison_view", "overview_view", "remarks"]

_BINS = 64  # of a drawn histogram
_NEAREST = 6


def overview_view(
    census: CountedHeads,
) -> tuple[dict[str, Any], Iterator[tuple[str, dict[str, Any]]], list[dict[str, Any]]]:
    """The data of the overview, of each head's page by its file name, and the rows of a table of all heads."""
    heads, groups = census.heads, census.groups()
    of_group = {place: at for at, group in enumerate(groups) for place in group.places}
    places = [[census.layers.index(one.layer), one.head] for one in heads]
    shared = {"title": census.title, "statistics": _statistics(), "names": _names(places)}
    overview = {
        **shared,
        "facts": _facts(census),
        "remarks": remarks(census),
        "layers": list(census.layers),
        "legend": layer_legend(census.layers),
        "groups": [_group(group) for group in groups],
        "heads": [
            {"at": at, "group": of_group[one.layer, one.head], "means": means, "spread": spread}
            for at, one in zip(places, heads, strict=True)
            for means, spread in [_numbers(one)]
        ],
    }
    return overview, _head_views(census, heads, groups, of_group, shared, places), census.rows()


def _head_views(
    census: CountedHeads,
    heads: list[HeadRecord],
    groups: list[Group],
    of_group: dict[tuple[str, int], int],
    shared: dict[str, Any],
    places: list[list[int]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    X = profiles(heads)
    ranks = _ranks(heads)
    for index, one in enumerate(heads):
        texts = _Texts(census.state.texts)
        group = groups[of_group[one.layer, one.head]]
        yield (
            shared["names"][index],
            {
                **{name: shared[name] for name in ("title", "statistics")},
                "at": places[index],
                "layer": one.layer,
                "around": [_link(shared, places, index + step) for step in (-1, 1)],
                "group": _group(group),
                "summaries": [
                    _summary(x, rank) for x, rank in zip(one.summaries().values(), ranks[index], strict=True)
                ],
                "heads": len(heads),
                "keys": [[t.text or f"id {t.token}", _short(t.share), t.count] for t in one.keys],
                "queries": [[t.text or f"id {t.token}", _short(t.share), t.count] for t in one.queries],
                "nearest": [[*_link(shared, places, at), _short(far)] for at, far in nearest_heads(X, index, _NEAREST)],
                "behaviours": list(BEHAVIOURS.items()),
                "exemplars": [_exemplar(e, texts) for e in census.exemplars(one.layer, one.head)],
                "texts": texts.found,
            },
        )


class _Texts:
    """The texts of a page's tokens, each once."""

    def __init__(self, known: dict[int, str]) -> None:
        self._known, self.found = known, list[str]()
        self._at: dict[int, int] = {}

    def index(self, token: int) -> int:
        """Where the text of a token is; −1 beyond the ends of a text."""
        if token < 0:
            return -1
        if token not in self._at:
            self._at[token] = len(self.found)
            self.found.append(self._known.get(token, f" {token}"))
        return self._at[token]


def _exemplar(e: Exemplar, texts: _Texts) -> dict[str, Any]:
    return {
        "kind": e.behaviour,
        "score": _short(e.score),
        "document": e.document,
        "position": e.position,
        "start": e.start,
        "place": e.place,
        "tokens": [texts.index(token) for token in e.tokens],
        "keys": [
            [k.position, _short(k.weight), [texts.index(t) for t in k.tokens]] for k in e.keys if k.weight >= 0.005
        ],
    }


def _link(shared: dict[str, Any], places: list[list[int]], index: int) -> list[Any]:
    if not 0 <= index < len(places):
        return []
    return [*places[index], shared["names"][index]]


def _names(places: list[list[int]]) -> list[str]:
    return [f"L{layer}H{head}" for layer, head in places]


def _ranks(heads: list[HeadRecord]) -> list[list[int]]:
    """The rank of each head in each statistic, 0 for the largest mean."""
    means = np.array([[x.mean for x in one.summaries().values()] for one in heads])
    order = np.argsort(np.argsort(-np.nan_to_num(means, nan=-np.inf), axis=0, kind="stable"), axis=0, kind="stable")
    ranks: list[list[int]] = order.tolist()
    return ranks


def _statistics() -> list[dict[str, Any]]:
    return [
        {"name": s.name, "title": s.title, "about": s.about, "exact": s.resolution, "transform": s.transform}
        for s in SCALES
    ]


def _facts(census: CountedHeads) -> dict[str, str]:
    facts = census.state.facts
    found = {
        "layers": f"{len(census.layers):,}",
        "heads": f"{len(census.heads):,}",
        "tokens counted": f"{facts.tokens:,}",
        "texts": f"{facts.documents:,}" + (f" from {facts.texts}" if facts.texts else ""),
        **{name.replace("_", " "): f"{value:,}" for name, value in facts.settings.items() if value is not None},
        **provenance(),
    }
    if facts.random_weights:
        found["random weights"] = random_weights_text(facts.random_weights)
    return found


def remarks(census: CountedHeads) -> list[str]:
    """What a reader must know before the numbers: heads that are not finite, and calls that were not seen."""
    found = []
    for one in census.heads:
        if one.entropy.undefined:
            rows = one.entropy.undefined + one.entropy.count
            where = f"L{census.layers.index(one.layer)} H{one.head}"
            found.append(f"{where}: the logits are not finite in {one.entropy.undefined:,} of {rows:,} rows")
    found += [f"not seen: {layer or 'the model itself'}: {why}" for layer, why in census.missed.items()]
    return found if len(found) <= 12 else [*found[:11], f"and {len(found) - 11:,} more"]


def _group(group: Group) -> dict[str, Any]:
    sure = None if math.isnan(group.sure) else _short(group.sure)
    return {"name": group.name, "sure": sure, "words": group.words, "size": len(group.places)}


def _numbers(one: HeadRecord) -> tuple[list[Any], list[Any]]:
    summaries = list(one.summaries().values())
    return [_short(x.mean) for x in summaries], [[_short(d) for d in x.deciles[::4]] for x in summaries]


def _summary(x: Summary, rank: int) -> dict[str, Any]:
    edges = x.scale.edges
    step = len(x.counts) // _BINS
    counts = x.counts.reshape(_BINS, step).sum(1)
    used = np.flatnonzero(counts)
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    return {
        "mean": _short(x.mean),
        "deciles": [_short(d) for d in x.deciles],
        "extremes": [_short(x.smallest), _short(x.largest)],
        "count": x.count,
        "undefined": x.undefined,
        "rank": rank,
        "first": low,
        "counts": counts[low:high].tolist(),
        "edges": [_short(float(edge)) for edge in edges[::step][low : high + 1]],
        "curves": {
            name: _curve(curve)
            for name, curve in (("position", x.by_position), ("length", x.by_length), ("class", x.by_class))
        },
    }


def _curve(curve: Curve) -> list[Any]:
    return [list(curve.buckets), [_short(float(x)) for x in curve.means], curve.counts.tolist()]


def comparison_view(difference: CensusDifference) -> dict[str, Any]:
    """The data of the page that compares two censuses."""
    names = [scale.name for scale in SCALES]
    return {
        "title": f"{difference.titles[1]} against {difference.titles[0]}",
        "titles": list(difference.titles),
        "statistics": _statistics(),
        "layers": difference.layers,
        "only": [list(one) for one in difference.only],
        "facts": {"heads": f"{len(difference.heads):,}", **provenance()},
        "heads": [
            {
                "at": [difference.layers.index(one.layer), one.head],
                "moved": _short(one.distance),
                "most": names.index(one.most),
                "changes": [_short(one.changes[name]) for name in names],
                "apart": [_short(one.apart[name]) for name in names],
                "first": [_short(one.first[name]) for name in names],
            }
            for one in difference.heads
        ],
    }


def _short(value: float) -> float | None:
    """A number with few digits, or None if it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
