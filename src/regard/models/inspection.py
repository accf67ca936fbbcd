"""Run a model on a text and collect what `regard inspect` and `regard atlas` show."""

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

__all__ = ["build_atlas", "build_look", "inspect"]

Tell = Callable[[str], None]


def inspect(loaded: LoadedModel, text: TokenizedText, tell: Tell = lambda name: None) -> Seen:
    """Watch a model run on a text; `tell` is called with the name of each layer when it has been seen."""
    with watch(loaded.model, tell) as seen:
        loaded.run(text)
    seen.random_weights = loaded.random_weights
    if not seen.heads:
        raise ArgumentError(
            f"inspect: no attention was seen in {loaded.name!r}. It may compute attention by hand; only models "
            f"with selectable attention can be observed."
        )
    return seen


def build_look(loaded: LoadedModel, text: TokenizedText, seen: Seen, tell: Tell = lambda name: None) -> Look:
    """What a report shows of an inspected model; if no layer has one row or key per token, it shows positions."""
    sizes = {size for name in seen.layers for size in seen[name].shape[-2:]}
    return seen.look(text.pieces if len(text.pieces) in sizes else None, loaded.name, tell=tell)


def build_atlas(loaded: LoadedModel, text: TokenizedText, tell: Tell = lambda name: None) -> Atlas:
    """Run a model on a text, and keep what an atlas needs of each layer: q, k and the row statistics."""
    layers: dict[str, Observation] = {}

    def note(name: str, seen: Observation) -> None:
        layers[name] = seen
        tell(name)

    with torch.inference_mode(False), CallInterceptor(loaded.model, note):
        loaded.run(text)
    found = [_layer(name, seen, text.pieces) for name, seen in layers.items()]
    if not found:
        raise ArgumentError(f"atlas: no attention was seen in {loaded.name!r}; there is nothing to draw.")
    return Atlas(loaded.name, found)


def _layer(name: str, seen: Observation, pieces: list[str]) -> AtlasLayer:
    queries, keys = (pieces if len(pieces) == size else list(map(str, range(size))) for size in seen.shape[-2:])
    return AtlasLayer(name, seen, queries, keys)
