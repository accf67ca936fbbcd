"""How much of a look fits into one page: the resolution of the maps, strongest keys per query, queries, and texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .look import LayerLook, Remark
from .page_pack import index_bytes

__all__ = [
    "LIMIT",
    "PageDetail",
    "clip_token",
    "excerpts",
    "fit_detail",
    "fit_remarks",
    "fit_tokens",
    "keys_per_query",
    "merge_factor",
]

LIMIT = 3_000_000  # bytes, the whole page
MAPS_SHARE = 0.45  # of the bytes for numbers, at most
TEXT_BYTES, REMARK_BYTES = 700_000, 300_000  # bytes, at most
MAX_TOKEN_CHARS = 120
EXCERPT_TOKENS = 64  # at least, per excerpt of a text that does not fit whole
MIN_KEYS = 3  # per query; below that, drop queries instead
MAP_SIDES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)  # cells of a map


@dataclass(frozen=True)
class PageDetail:
    """How much a page keeps: cells per side of a map, strongest keys per query, queries per text."""

    side: int
    k: int
    rows: int


def fit_detail(layers: Sequence[LayerLook], budget: int, rows: int) -> PageDetail:
    """Choose what fits into `budget` bytes: maps first, up to their share, then keys per query, then queries.

    >>> fit_detail([], 1000, 512)
    PageDetail(side=512, k=0, rows=512)
    """
    side = next((side for side in MAP_SIDES if maps_bytes(layers, side) <= MAPS_SHARE * budget), 1)
    budget -= maps_bytes(layers, side)
    most = max((one.strongest[0].shape[1] for layer in layers for one in layer.heads), default=0)
    fewest = min(MIN_KEYS, most)
    for k in range(most, fewest, -1):
        if strongest_bytes(layers, k, rows) <= budget:
            return PageDetail(side, k, rows)
    low, high = 0, rows + 1
    while high - low > 1:  # bisect for the most queries that fit
        middle = (low + high) // 2
        if strongest_bytes(layers, fewest, middle) <= budget:
            low = middle
        else:
            high = middle
    return PageDetail(side, fewest, low)


def maps_bytes(layers: Sequence[LayerLook], side: int) -> int:
    """Bytes of all maps at `side` cells per side, in base64."""
    total = 0
    for layer in layers:
        shape = [layer.heads[0].map.shape[axis] for axis in (0, 1)] if layer.heads else [0, 0]
        height, width = (-(-cells // merge_factor(cells, side)) if cells else 0 for cells in shape)
        total += _base64_bytes(len(layer.heads) * height * width)
    return total


def strongest_bytes(layers: Sequence[LayerLook], k: int, rows: int) -> int:
    """Bytes of the k strongest keys of `rows` queries per layer, in base64."""
    total = 0
    for layer in layers:
        kept = min(k, layer.heads[0].strongest[0].shape[1]) if layer.heads else 0
        pairs = len(layer.heads) * min(rows, len(layer.queries)) * kept
        total += _base64_bytes(pairs * index_bytes(len(layer.keys))) + _base64_bytes(pairs * 2)
    return total


def keys_per_query(sizes: Iterable[Sequence[int]], most: int) -> int:
    """The most strongest keys per query that a page can hold, for layers of (heads, queries, keys).

    >>> keys_per_query([(12, 256, 256)] * 4, 16), keys_per_query([(8, 4000, 4000)] * 4, 16)
    (16, 4)
    """
    each = sum(heads * queries * (index_bytes(keys) + 2) for heads, queries, keys in sizes)
    return min(most, max(MIN_KEYS, LIMIT * 3 // 4 // max(each, 1)))


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


def fit_tokens(texts: Sequence[Sequence[str]]) -> int:
    """How many tokens each text may keep so that all texts together fit into TEXT_BYTES.

    >>> fit_tokens([["a", "b"], ["c"]])
    2
    """
    longest = max(map(len, texts), default=0)
    while longest:
        parts = [text[start:stop] for text in texts for start, stop in excerpts(len(text), longest)]
        size = sum(_json_bytes([clip_token(one) for one in part]) for part in parts)
        if size <= TEXT_BYTES:
            break
        longest = min(longest - 1, int(longest * 0.95 * TEXT_BYTES / size))
    return longest


def fit_remarks(remarks: Sequence[Remark]) -> list[Remark]:
    """The remarks that fit into REMARK_BYTES, problems first."""
    kept, size = [], 0
    for one in sorted(remarks, key=lambda one: one.level != "problem"):
        size += _json_bytes([one.rule, one.text, one.layer, *one.heads]) + 40
        if size > REMARK_BYTES:
            break
        kept.append(one)
    return kept


def _json_bytes(data: Sequence[object]) -> int:
    # Escaping for a script block turns <, > and & into six bytes each.
    text = json.dumps(data, ensure_ascii=False)
    return len(text.encode("utf-8", "surrogatepass")) + 5 * sum(map(text.count, "<>&"))


def _base64_bytes(size: int) -> int:
    return -(-size // 3) * 4
