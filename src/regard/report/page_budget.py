"""How much of a look fits into one page: the resolution of the maps, strongest keys per query, queries, and texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .look import HeadLook, LayerLook, Remark
from .page_pack import MAP_STEPS, WEIGHT_STEPS, index_bytes, pack_maps, pack_strongest

__all__ = [
    "EMBEDDED_LIMIT",
    "LIMIT",
    "PageDetail",
    "clip_token",
    "excerpts",
    "fit_detail",
    "fit_remarks",
    "fit_strongest",
    "fit_tokens",
    "keys_per_query",
    "maps_room",
    "merge_factor",
    "merge_factors",
]

LIMIT = 3_000_000  # bytes, the whole page
EMBEDDED_LIMIT = 300_000  # bytes of a page inside another one, such as a notebook
WHOLE_MAPS_SHARE, MAPS_SHARE = 0.78, 0.45  # of the bytes for numbers, at most: maps as they are, or with merged cells
MIN_MAPS_SHARE = 0.25  # maps keep this much, even if not all queries fit then
TEXT_SHARE, REMARK_SHARE = 0.23, 0.1  # of the whole page, at most
MAX_TOKEN_CHARS = 120
EXCERPT_TOKENS = 64  # at least, per excerpt of a text that does not fit whole
MIN_KEYS = 2  # per query; below that, drop queries instead
MIN_RECORDED = 3  # keys per query that a look has, at least
MAP_SIDES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)  # cells of a map
SAMPLE, SAMPLED_QUERIES, SAMPLED_CELLS = 16, 1000, 600_000  # packed, to estimate what all would take


@dataclass(frozen=True)
class PageDetail:
    """How much a page keeps: cells per side of a map, strongest keys per query, queries per text, and steps of both."""

    side: int
    map_steps: int
    k: int
    rows: int
    weight_steps: int


def fit_detail(layers: Sequence[LayerLook], budget: float, rows: int) -> PageDetail:
    """Choose what should fit into `budget` bytes: maps first, up to their share, then keys per query, then queries.

    >>> fit_detail([], 1000, 512)
    PageDetail(side=512, map_steps=255, k=0, rows=512, weight_steps=65535)
    """
    side, steps = fit_maps(layers, budget, maps_room(layers, budget, rows))
    return fit_strongest(layers, budget * (1 - MAPS_SHARE), PageDetail(side, steps, 0, rows, 0))


def maps_room(layers: Sequence[LayerLook], budget: float, rows: int) -> float:
    """The most bytes that maps may take: what the fewest keys of all queries leave, but at least a share of all."""
    need = _estimate_strongest(layers, PageDetail(0, 0, MIN_KEYS, rows, WEIGHT_STEPS[-1]))
    return max(MIN_MAPS_SHARE * budget, budget - need)


def fit_maps(layers: Sequence[LayerLook], budget: float, most: float) -> tuple[int, int]:
    """The finest maps that should fit into their share of `budget`, and into `most` bytes: cells per side and steps.

    Coarser numbers come before coarser cells.
    """
    largest = max((max(layer.heads[0].map.shape) for layer in layers), default=MAP_SIDES[0])
    sides = [min(largest, MAP_SIDES[0]), *(side for side in MAP_SIDES if side < largest)]
    costs: dict[int, float] = {}
    for side in sides:
        count, share = _count_cells(layers, side), WHOLE_MAPS_SHARE if side >= largest else MAPS_SHARE
        for steps in MAP_STEPS:
            costs[steps] = costs.get(steps) or _bytes_per_cell(layers, steps)
            if count * costs[steps] <= min(share * budget, most):
                return side, steps
    return sides[-1], MAP_STEPS[-1]


def _bytes_per_cell(layers: Sequence[LayerLook], steps: int) -> float:
    """What a cell takes in a page, packed, from the maps of a few heads."""
    size = cells = 0
    for layer, one in _sample(layers):
        if cells < SAMPLED_CELLS:
            size += len(pack_maps([one.map], (len(layer.queries), len(layer.keys)), (1, 1), steps)[1])
            cells += one.map.numel()
    return size / max(1, cells)


def _count_cells(layers: Sequence[LayerLook], side: int) -> int:
    total = 0
    for layer in layers:
        height, width = layer.heads[0].map.shape
        down, across = merge_factors(layer, side)
        total += len(layer.heads) * -(-height // down) * -(-width // across)
    return total


def fit_strongest(layers: Sequence[LayerLook], budget: float, detail: PageDetail) -> PageDetail:
    """The most keys per query that should fit, or the fewest and as many queries as fit."""
    most = max((one.strongest[0].shape[1] for layer in layers for one in layer.heads), default=0)
    fewest = min(MIN_KEYS, most)
    fine = replace(detail, k=most, weight_steps=WEIGHT_STEPS[0])
    if _estimate_strongest(layers, fine) <= budget:
        return fine
    all_keys, few_keys = (replace(fine, k=k, weight_steps=WEIGHT_STEPS[-1]) for k in (most, fewest))
    high, low = (_estimate_strongest(layers, each) for each in (all_keys, few_keys))
    if low > budget:
        return replace(few_keys, rows=max(0, int(few_keys.rows * budget / low)))
    return replace(all_keys, k=fewest + int((most - fewest) * min(1.0, (budget - low) / max(high - low, 1.0))))


def _estimate_strongest(layers: Sequence[LayerLook], detail: PageDetail) -> float:
    """About how many bytes the strongest keys of all queries take, from those of a few heads."""
    packed = []
    for layer, one in _sample(layers):
        kept, rows = min(detail.k, one.strongest[0].shape[1]), min(detail.rows, len(layer.queries))
        some = [(0, min(rows, SAMPLED_QUERIES))]
        found = pack_strongest([one.strongest], some, kept, len(layer.keys), detail.weight_steps)
        packed.append(sum(map(len, found)) * rows / max(1, some[0][1]))
    return sum(packed) * sum(len(layer.heads) for layer in layers) / max(len(packed), 1)


def merge_factors(layer: LayerLook, side: int) -> tuple[int, int]:
    """How many cells of a layer's maps to merge, (down, across), so that at most `side` remain per side."""
    height, width = layer.heads[0].map.shape
    return merge_factor(height, side), merge_factor(width, side)


def _sample(layers: Sequence[LayerLook]) -> Iterator[tuple[LayerLook, HeadLook]]:
    """A few heads of all layers; the first of them are spread over the layers, too."""
    every = [(layer, one) for layer in layers for one in layer.heads]
    count = min(SAMPLE, len(every))
    chosen = [every[(2 * place + 1) * len(every) // (2 * count)] for place in range(count)]
    return iter(chosen[::2] + chosen[1::2])


def keys_per_query(sizes: Iterable[Sequence[int]], most: int) -> int:
    """The most strongest keys per query that a page can hold, for layers of (heads, queries, keys).

    >>> keys_per_query([(12, 256, 256)] * 4, 16), keys_per_query([(8, 4000, 4000)] * 4, 16)
    (16, 4)
    """
    each = sum(heads * queries * (index_bytes(keys) + 2) for heads, queries, keys in sizes)
    return min(most, max(MIN_RECORDED, LIMIT * 3 // 4 // max(each, 1)))


def merge_factor(cells: int, side: int) -> int:
    """How many of `cells` to merge into one, so that at most `side` remain."""
    return max(1, -(-cells // side))


def excerpts(length: int, kept: int) -> list[tuple[int, int]]:
    """Choose `kept` of `length` tokens as readable excerpts (start, stop), spread over the whole text.

    >>> excerpts(100, 100), excerpts(1000, 150), excerpts(1000, 50)
    ([(0, 100)], [(0, 75), (925, 1000)], [(0, 50)])
    """
    if kept >= length:
        return [(0, length)]
    count = max(1, kept // EXCERPT_TOKENS)
    size = kept // count
    starts = [place * (length - size) // max(count - 1, 1) for place in range(count)]
    return [(start, start + size) for start in starts] if size else []


def clip_token(text: str) -> str:
    """The text of a token, clipped if it is very long."""
    return text if len(text) <= MAX_TOKEN_CHARS else text[: MAX_TOKEN_CHARS - 1] + "…"


def fit_tokens(texts: Sequence[Sequence[str]], budget: float) -> int:
    """How many tokens each text may keep so that all texts together fit into `budget` bytes.

    >>> fit_tokens([["a", "b"], ["c"]], 1000)
    2
    """
    longest = max(map(len, texts), default=0)
    while longest:
        parts = [text[start:stop] for text in texts for start, stop in excerpts(len(text), longest)]
        size = sum(_json_bytes([clip_token(one) for one in part]) for part in parts)
        if size <= budget:
            break
        longest = min(longest - 1, int(longest * 0.95 * budget / size))
    return longest


def fit_remarks(remarks: Sequence[Remark], budget: float) -> list[Remark]:
    """The remarks that fit into `budget` bytes, problems first."""
    kept, size = [], 0
    for one in sorted(remarks, key=lambda one: one.level != "problem"):
        size += _json_bytes([one.rule, one.text, one.layer, *one.heads]) + 40
        if size > budget:
            break
        kept.append(one)
    return kept


def _json_bytes(data: Sequence[object]) -> int:
    # Escaping for a script block turns <, > and & into six bytes each.
    text = json.dumps(data, ensure_ascii=False)
    return len(text.encode("utf-8", "surrogatepass")) + 5 * sum(map(text.count, "<>&"))
