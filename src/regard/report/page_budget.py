"""What of a look fits into one page: the resolution of the maps, strongest keys a query, queries, and texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .look import LayerLook, Remark
from .page_pack import width_of

__all__ = ["LIMIT", "Cut", "every", "fit", "keys_worth", "remarks_kept", "spread", "token", "tokens_kept"]

LIMIT = 3_000_000  # bytes, the whole page
FOR_MAPS = 0.45  # of the room for numbers, at most
FOR_TEXTS, FOR_REMARKS = 700_000, 300_000  # bytes, at most
LONGEST_TOKEN, RUN = 120, 64  # characters; queries in a part, where not all fit
FEWEST_KEYS = 3  # a query; then rather fewer queries
SIDES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)  # cells of a map


@dataclass(frozen=True)
class Cut:
    """How much is kept: cells a side of a map, strongest keys a query, queries a text."""

    side: int
    k: int
    rows: int


def fit(layers: Sequence[LayerLook], room: int, rows: int) -> Cut:
    """Choose what fits into `room` bytes: maps first, up to their share, then keys a query, then queries.

    >>> fit([], 1000, 512)
    Cut(side=512, k=0, rows=512)
    """
    side = next((side for side in SIDES if maps_cost(layers, side) <= FOR_MAPS * room), 1)
    room -= maps_cost(layers, side)
    most = max((one.strongest[0].shape[1] for layer in layers for one in layer.heads), default=0)
    fewest = min(FEWEST_KEYS, most)
    for k in range(most, fewest, -1):
        if strongest_cost(layers, k, rows) <= room:
            return Cut(side, k, rows)
    none, all_of_them = 0, rows + 1
    while all_of_them - none > 1:  # the most queries that fit
        middle = (none + all_of_them) // 2
        if strongest_cost(layers, fewest, middle) <= room:
            none = middle
        else:
            all_of_them = middle
    return Cut(side, fewest, none)


def maps_cost(layers: Sequence[LayerLook], side: int) -> int:
    """Bytes of all maps at `side` cells a side, in base64."""
    total = 0
    for layer in layers:
        shape = [layer.heads[0].map.shape[axis] for axis in (0, 1)] if layer.heads else [0, 0]
        height, width = (-(-cells // every(cells, side)) if cells else 0 for cells in shape)
        total += _in_base64(len(layer.heads) * height * width)
    return total


def strongest_cost(layers: Sequence[LayerLook], k: int, rows: int) -> int:
    """Bytes of the k strongest keys of `rows` queries a layer, in base64."""
    total = 0
    for layer in layers:
        kept = min(k, layer.heads[0].strongest[0].shape[1]) if layer.heads else 0
        pairs = len(layer.heads) * min(rows, len(layer.queries)) * kept
        total += _in_base64(pairs * width_of(len(layer.keys))) + _in_base64(pairs * 2)
    return total


def keys_worth(sizes: Iterable[Sequence[int]], most: int) -> int:
    """How many strongest keys a query are worth finding, for layers of (heads, queries, keys): a page holds no more.

    >>> keys_worth([(12, 256, 256)] * 4, 16), keys_worth([(8, 4000, 4000)] * 4, 16)
    (16, 4)
    """
    each = sum(heads * queries * (width_of(keys) + 2) for heads, queries, keys in sizes)
    return min(most, max(FEWEST_KEYS, LIMIT * 3 // 4 // max(each, 1)))


def every(cells: int, side: int) -> int:
    """How many of `cells` go into one, so that at most `side` are left."""
    return max(1, -(-cells // side))


def spread(length: int, kept: int) -> list[tuple[int, int]]:
    """Place `kept` of `length` tokens in parts that can be read, from the first token to the last.

    >>> spread(100, 100), spread(1000, 150), spread(1000, 50)
    ([(0, 100)], [(0, 75), (925, 1000)], [(0, 50)])
    """
    if kept >= length:
        return [(0, length)]
    count = max(1, kept // RUN)
    size = kept // count
    starts = [place * (length - size) // max(count - 1, 1) for place in range(count)]
    return [(start, start + size) for start in starts] if size else []


def token(text: str) -> str:
    """Give a token's text, cut where it is very long."""
    return text if len(text) <= LONGEST_TOKEN else text[: LONGEST_TOKEN - 1] + "…"


def tokens_kept(texts: Sequence[Sequence[str]]) -> int:
    """How many tokens a text may keep so that all texts together take their share at most.

    >>> tokens_kept([["a", "b"], ["c"]])
    2
    """
    longest = max(map(len, texts), default=0)
    while longest:
        parts = [text[start:stop] for text in texts for start, stop in spread(len(text), longest)]
        size = sum(_written([token(one) for one in part]) for part in parts)
        if size <= FOR_TEXTS:
            break
        longest = min(longest - 1, int(longest * 0.95 * FOR_TEXTS / size))
    return longest


def remarks_kept(remarks: Sequence[Remark]) -> list[Remark]:
    """The remarks that take their share at most, problems first."""
    kept, size = [], 0
    for one in sorted(remarks, key=lambda one: one.level != "problem"):
        size += _written([one.rule, one.text, one.layer, *one.heads]) + 40
        if size > FOR_REMARKS:
            break
        kept.append(one)
    return kept


def _written(data: Sequence[object]) -> int:
    # What a script block needs escaped grows to six bytes; this counts the most it can become.
    text = json.dumps(data, ensure_ascii=False)
    return len(text.encode("utf-8", "surrogatepass")) + 5 * sum(map(text.count, "<>&"))


def _in_base64(size: int) -> int:
    return -(-size // 3) * 4
