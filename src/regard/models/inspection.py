"""Run a model on a text and collect what `regard inspect` and `regard atlas` show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from regard.errors import ArgumentError
from regard.observation import Observation
from regard.report.atlas import Atlas, AtlasLayer
from regard.report.look import Look, Remark
from regard.report.page import render

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
    look = seen.look(text.pieces if len(text.pieces) in sizes else None, loaded.title, tell=tell)
    facts = {"model type": loaded.kind, "tokens": _tokens_used(text), **look.facts}
    limits = loaded.limits(text)
    return replace(look, facts={**facts, "limits": limits} if limits else facts)


def _tokens_used(text: TokenizedText) -> str:
    used, given = len(text.pieces), text.given
    return f"{used:,}" if used == given else f"{used:,} of {given:,}, the last {given - used:,} are left out"


def new_atlas(loaded: LoadedModel, text: TokenizedText) -> Atlas:
    """An atlas without layers, to be served at once while `fill_atlas` adds them."""
    title = f"{loaded.title} (with random weights)" if loaded.random_weights else loaded.title
    cut = f"tokens used: {_tokens_used(text)}" if text.cut else ""
    return Atlas(title, expected=loaded.layers, note="; ".join(filter(None, (cut, loaded.limits(text)))))


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
    _describe_heads(atlas, loaded, text)


def _describe_heads(atlas: Atlas, loaded: LoadedModel, text: TokenizedText) -> None:
    """Give the atlas a small map, statistics and findings of each head, and a report; it is served meanwhile."""
    seen = Seen(tokens=text.inputs.get("input_ids", text.inputs.get("ids")), random_weights=loaded.random_weights)
    for layer in atlas.layers:
        seen.add(layer.name, layer.observation)
        numbers = [head.numbers() for head in seen.heads if head.layer == layer.name]
        atlas.heads.add(numbers, seen.map(layer.name))
    atlas.report = cache(lambda: render(build_look(loaded, text, seen), atlas="./"))
    atlas.heads.conclude([Remark(one.rule, one.level, one.text, one.layer, one.heads) for one in seen.findings()])


def _layer(name: str, seen: Observation, pieces: list[str]) -> AtlasLayer:
    queries, keys = (pieces if len(pieces) == size else list(map(str, range(size))) for size in seen.shape[-2:])
    return AtlasLayer(name, seen, queries, keys)
