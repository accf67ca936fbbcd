"""Run a model on a text and collect what `regard inspect` and `regard atlas` show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from regard.errors import ArgumentError
from regard.observation import Observation
from regard.report.atlas import Atlas, AtlasLayer
from regard.report.look import Look

from .interceptor import CallInterceptor
from .loading import LoadedModel, TokenizedText
from .seen import Seen
from .watch import watch

__all__ = ["build_look", "fill_atlas", "inspect", "new_atlas"]

Tell = Callable[[str], None]


def inspect(loaded: LoadedModel, text: TokenizedText, tell: Tell = lambda name: None) -> Seen:
    """Watch a model run on a text; `tell` is called with the name of each layer when it has been seen."""
    with watch(loaded.model, tell) as seen:
        loaded.run(text)
    seen.random_weights, seen.texts, seen.title = loaded.random_weights, text.pieces, loaded.name
    if not seen.heads:
        raise ArgumentError(
            f"inspect: no attention was seen in {loaded.name!r}. It may compute attention by hand; only models "
            f"with selectable attention can be observed."
        )
    return seen


def build_look(loaded: LoadedModel, text: TokenizedText, seen: Seen, tell: Tell = lambda name: None) -> Look:
    """What a report shows of an inspected model; if no layer has one row or key per token, it shows positions."""
    sizes = {size for name in seen.layers for size in seen[name].shape[-2:]}
    look = seen.look(text.pieces if len(text.pieces) in sizes else None, loaded.name, tell=tell)
    limits = loaded.limits(text)
    return replace(look, facts={**look.facts, "limits": limits}) if limits else look


def new_atlas(loaded: LoadedModel, text: TokenizedText) -> Atlas:
    """An atlas without layers, to be served at once while `fill_atlas` adds them."""
    title = f"{loaded.name} (with random weights)" if loaded.random_weights else loaded.name
    return Atlas(title, expected=loaded.layers, note=loaded.limits(text))


def fill_atlas(atlas: Atlas, loaded: LoadedModel, text: TokenizedText, tell: Tell = lambda name: None) -> None:
    """Run a model on a text, and give the atlas q, k and the row statistics of each layer as soon as they are known.

    A module that attends several times, as where layers share one, gives several layers.
    """
    calls: Counter[str] = Counter()

    def note(name: str, seen: Observation) -> None:
        calls[name] += 1
        atlas.add(_layer(name if calls[name] == 1 else f"{name}, call {calls[name]}", seen, text.pieces))
        tell(name)

    with torch.inference_mode(False), CallInterceptor(loaded.model, note):
        loaded.run(text)
    if not calls:
        raise ArgumentError(f"atlas: no attention was seen in {loaded.name!r}; there is nothing to draw.")
    atlas.complete()


def _layer(name: str, seen: Observation, pieces: list[str]) -> AtlasLayer:
    queries, keys = (pieces if len(pieces) == size else list(map(str, range(size))) for size in seen.shape[-2:])
    return AtlasLayer(name, seen, queries, keys)
