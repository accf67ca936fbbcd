"""Looking at a model that reads a text: what `regard inspect` and `regard atlas` do before they show it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from regard.errors import ArgumentError
from regard.observation import Observation
from regard.report.atlas import Atlas, AtlasLayer
from regard.report.look import Look

from .interceptor import CallInterceptor
from .loading import LoadedModel, TokenizedText
from .seen import Seen
from .watch import watch

__all__ = ["drawn", "inspect", "mapped"]

Tell = Callable[[str], None]


def inspect(loaded: LoadedModel, reading: TokenizedText, tell: Tell = lambda name: None) -> Seen:
    """Watch a model read; `tell` is told the name of each layer as it is seen."""
    with watch(loaded.model, tell) as seen:
        loaded.run(reading)
    if not seen.heads:
        raise ArgumentError(
            f"inspect: no attention was seen in {loaded.name!r}. It may compute attention by hand; models that can "
            f"choose their attention are seen."
        )
    return seen


def drawn(loaded: LoadedModel, reading: TokenizedText, seen: Seen, tell: Tell = lambda name: None) -> Look:
    """What a report shows of a model that read; where no layer has a place for each token, positions stand in."""
    sizes = {size for name in seen.layers for size in seen[name].shape[-2:]}
    return seen.look(reading.pieces if len(reading.pieces) in sizes else None, loaded.name, tell=tell)


def mapped(loaded: LoadedModel, reading: TokenizedText, tell: Tell = lambda name: None) -> Atlas:
    """Let a model read, and keep of each layer what an atlas draws from: q, k and the statistics of the rows."""
    layers: dict[str, Observation] = {}

    def note(name: str, seen: Observation) -> None:
        layers[name] = seen
        tell(name)

    with torch.inference_mode(False), CallInterceptor(loaded.model, note):
        loaded.run(reading)
    found = [_layer(name, seen, reading.pieces) for name, seen in layers.items()]
    if not found:
        raise ArgumentError(f"atlas: no attention was seen in {loaded.name!r}; there is nothing to map.")
    return Atlas(loaded.name, found)


def _layer(name: str, seen: Observation, pieces: list[str]) -> AtlasLayer:
    queries, keys = (pieces if len(pieces) == size else list(map(str, range(size))) for size in seen.shape[-2:])
    return AtlasLayer(name, seen, queries, keys)
