"""Run a model on a text and collect what `regard inspect` and `regard atlas` show."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
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

__all__ = ["build_comparison", "build_look", "fill_atlas", "inspect", "new_atlas"]

Tell = Callable[[str], None]


def inspect(loaded: LoadedModel, text: TokenizedText, tell: Tell = lambda name: None) -> Seen:
    """Watch a model run on a text; `tell` is called with the name of each layer when it has been seen."""
    with warnings.catch_warnings(), watch(loaded.model, tell) as seen:
        warnings.simplefilter("ignore")  # that nothing was seen is an error here
        loaded.run(text)
    seen.random_weights, seen.texts, seen.title = loaded.random_weights, _fitting(text, seen), loaded.title
    if not seen.heads:
        raise ArgumentError(
            f"inspect: no attention was seen in {loaded.name!r}. It may compute softmax(q @ k.T) @ v by hand; "
            f"regard.attention(q, k, v) in its place is seen."
        )
    return seen


def build_look(loaded: LoadedModel, text: TokenizedText, seen: Seen, tell: Tell = lambda name: None) -> Look:
    """What a report shows of an inspected model; if no layer has one row or key per token, it shows positions."""
    look = seen.look(_fitting(text, seen), loaded.title, tell=tell)
    facts = {"model type": loaded.kind, "tokens": _tokens_used(text), **look.facts}
    limits = loaded.limits(text)
    return replace(look, facts={**facts, "limits": limits} if limits else facts)


def _fitting(text: TokenizedText, seen: Seen) -> list[str] | None:
    """The texts of the tokens, if some layer has one row or key per token."""
    sizes = {size for name in seen.layers for size in seen[name].shape[-2:]}
    return text.pieces if len(text.pieces) in sizes else None


def _tokens_used(text: TokenizedText) -> str:
    used, given = len(text.pieces), text.given
    return f"{used:,}" if used == given else f"{used:,} of {given:,}, the last {given - used:,} are left out"


def build_comparison(first: Seen, second: Seen, names: tuple[str, str]) -> Look:
    """What a report shows of two runs: the maps of the second, its statistics, and how much each has changed.

    A finding that holds for only one of the two says for which.
    """
    difference = first.diff(second)
    ours = dict(zip(second.layers, first.layers, strict=False)) if difference.by_order else {}
    theirs = {name: other for other, name in ours.items()}
    changes = {
        (theirs.get(head.layer, head.layer), head.head): {f"change_of_{x}": y for x, y in head.numbers().items()}
        for head in difference.heads
    }
    look = second.look(title=f"{names[1]} minus {names[0]}")
    layers = [
        replace(
            layer,
            heads=[
                replace(one, statistics=changes.get((layer.name, one.head), {}) | one.statistics) for one in layer.heads
            ],
        )
        for layer in look.layers
    ]
    before = {(one.rule, theirs.get(one.layer, one.layer), head): one for one in _remarks(first) for head in one.heads}
    after = {(one.rule, one.layer, head): one for one in _remarks(second) for head in one.heads}
    remarks = [
        *_split(after, set(before), "", f"only in {names[1]}: "),
        *_split(
            {place: one for place, one in before.items() if place not in after}, set(), "", f"only in {names[0]}: "
        ),
    ]
    facts = {"first": names[0], "second": names[1], "maps and statistics": f"of {names[1]}", **look.facts}
    return replace(look, facts=facts, layers=layers, remarks=remarks)


def _remarks(seen: Seen) -> list[Remark]:
    return [Remark(one.rule, one.level, one.says, *place) for one in seen.findings() for place in one.places]


def _split(
    places: dict[tuple[str, str, int], Remark], others: set[tuple[str, str, int]], both: str, alone: str
) -> Iterator[Remark]:
    """The remarks of one run, apart for the heads that have it in the other run too."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for (rule, layer, head), one in places.items():
        prefix = both if (rule, layer, head) in others else alone
        groups.setdefault((rule, one.level, prefix + one.text, layer), []).append(head)
    for (rule, level, text, layer), heads in groups.items():
        yield Remark(rule, level, text, layer, tuple(heads))


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
    atlas.heads.conclude(_remarks(seen))


def _layer(name: str, seen: Observation, pieces: list[str]) -> AtlasLayer:
    queries, keys = (pieces if len(pieces) == size else list(map(str, range(size))) for size in seen.shape[-2:])
    return AtlasLayer(name, seen, queries, keys)
