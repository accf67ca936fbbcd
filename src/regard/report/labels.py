"""Short names for layers and heads, as interpretability writes them: L4 H2; and the full path of each layer, once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .terminal import shown

__all__ = ["layer_label", "layer_legend", "runs"]

_NUMBER = re.compile(r"\d+")


def layer_label(layer: str, layers: Sequence[str]) -> str:
    """The short name of a layer: its place in the order of the layers' first calls.

    >>> layer_label("blocks.3.attention", ["blocks.1.attention", "blocks.3.attention"])
    'L1'
    """
    return f"L{layers.index(layer)}" if layer in layers else shown(layer) or "the model itself"


def runs(numbers: Iterable[int]) -> str:
    """Numbers in order, three or more in a row written as a range.

    >>> runs([5, 0, 1, 2, 3, 7, 8]), runs([4])
    ('0–3, 5, 7, 8', '4')
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def layer_legend(layers: Sequence[str], most: int = 12) -> list[str]:
    """The path of every layer, each kind once: one line for all layers whose paths differ in a number alone.

    Lines beyond `most` are counted.

    >>> layer_legend(["h.0.attn", "h.1.attn", "h.2.attn"]), layer_legend(["h.3.attn", "h.7.attn", "head"])
    (['L0–2: h.*.attn'], ['L0, 1: h.{3, 7}.attn', 'L2: head'])
    """
    kinds: dict[str, list[int]] = {}
    for place, layer in enumerate(layers):
        kinds.setdefault(_NUMBER.sub("*", layer), []).append(place)
    lines = []
    for places in kinds.values():
        paths = [layers[place] for place in places]
        varying = _varying(paths)
        if len(varying) > 1:
            lines += [(place, f"L{place}: {layers[place]}") for place in places]
        else:
            lines.append((places[0], f"L{runs(places)}: {_joint_path(paths, places, varying)}"))
    texts = [shown(text) for _, text in sorted(lines)]
    return texts if len(texts) <= most else [*texts[: most - 1], f"and {len(texts) - most + 1:,} more"]


def _varying(paths: Sequence[str]) -> list[int]:
    """Which of the numbers in these paths differ."""
    columns = zip(*(_NUMBER.findall(path) for path in paths), strict=True)
    return [at for at, column in enumerate(columns) if len(set(column)) > 1]


def _joint_path(paths: Sequence[str], places: Sequence[int], varying: Sequence[int]) -> str:
    if not varying:
        return paths[0] or "the model itself"
    numbers = [int(_NUMBER.findall(path)[varying[0]]) for path in paths]
    counter = iter(range(len(paths[0])))
    joint = "*" if numbers == list(places) else f"{{{runs(numbers)}}}"
    return _NUMBER.sub(lambda found: joint if next(counter) == varying[0] else found[0], paths[0])
