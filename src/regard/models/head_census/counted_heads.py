"""The heads and exemplars of a census, read out of its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import ArgumentError
from .exemplars import BEFORE
from .groups import Group, group_heads
from .row_values import BEHAVIOURS
from .state import LayerState, State
from .summary import HeadRecord, TokenShare, summarise
from .tally import WEIGHT_UNIT

__all__ = ["CountedHeads", "Exemplar", "KeyWeight"]

_TOP_TOKENS = 24
_RARE = 3  # a query token must occur so often for its mean to be shown


@dataclass(frozen=True)
class KeyWeight:
    """A key that a row attends to."""

    position: int  # in the window
    weight: float
    tokens: tuple[int, ...]  # the ids around it: it is in the middle; −1 beyond the ends


@dataclass(frozen=True)
class Exemplar:
    """One row that shows a behaviour, with its context and the keys that it attends to, the strongest first."""

    behaviour: str
    score: float
    document: str
    start: int  # where the window begins in the document, in tokens
    position: int  # of the row in the window
    tokens: tuple[int, ...]  # the ids around the row: `place` is the row; −1 beyond the ends
    place: int
    keys: tuple[KeyWeight, ...]
    text: str  # of these tokens, with the row's own in brackets: ⟦ ⟧


class CountedHeads:
    """What was counted of every head."""

    def __init__(self, state: State) -> None:
        self.state = state

    @property
    def title(self) -> str:
        """The model."""
        return self.state.facts.title

    @property
    def tokens(self) -> int:
        """How many tokens were counted."""
        return self.state.facts.tokens

    @property
    def layers(self) -> list[str]:
        """The names of the modules that attended, in the order of their first calls."""
        return list(self.state.layers)

    @property
    def missed(self) -> dict[str, str]:
        """Modules whose attention was not seen, and why."""
        return dict(self.state.facts.missed)

    @cached_property
    def heads(self) -> list[HeadRecord]:
        """One record per head, layer by layer."""
        return [
            HeadRecord(name, head, keys, queries, **summarise(layer.parts, head))
            for name, layer in self.state.layers.items()
            for head in range(layer.heads)
            for keys, queries in [self._tokens_of(layer, head)]
        ]

    def head(self, layer: str | int, head: int) -> HeadRecord:
        """The record of one head; the layer is its name, or its place."""
        name = self._layer(layer)
        self._check_head(name, head)
        return next(one for one in self.heads if (one.layer, one.head) == (name, head))

    def exemplars(self, layer: str | int, head: int, behaviour: str | None = None) -> list[Exemplar]:
        """The exemplars of one head, the best of each behaviour first; "sample" are rows drawn at random."""
        name = self._layer(layer)
        self._check_head(name, head)
        if behaviour is not None and behaviour not in BEHAVIOURS:
            raise ArgumentError(f"exemplars: behaviour must be one of {', '.join(BEHAVIOURS)}. Got {behaviour!r}.")
        return list(self._exemplars(self.state.layers[name], head, behaviour))

    def groups(self) -> list[Group]:
        """The heads, grouped by what they do: each group named in words, with how sure that is."""
        return group_heads(self.heads)

    def rows(self) -> list[dict[str, Any]]:
        """What `to_pandas` shows, as one dictionary per head."""
        grouped = {place: group.name for group in self.groups() for place in group.places}
        found = []
        for one in self.heads:
            row: dict[str, Any] = {
                "layer": one.layer,
                "head": one.head,
                "group": grouped.get((one.layer, one.head), ""),
            }
            for name, summary in one.summaries().items():
                deciles = summary.deciles
                row |= {
                    name: summary.mean,
                    f"{name}_p10": deciles[0],
                    f"{name}_p50": deciles[4],
                    f"{name}_p90": deciles[8],
                }
            found.append(row)
        return found

    def _layer(self, layer: str | int) -> str:
        names = self.layers
        if isinstance(layer, int) and not isinstance(layer, bool) and -len(names) <= layer < len(names):
            return names[layer]
        if isinstance(layer, str) and layer in self.state.layers:
            return layer
        raise ArgumentError(
            f"Census: a layer is its name, or its place from 0 to {len(names) - 1}. Got {layer!r}; the names are "
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}."
        )

    def _check_head(self, layer: str, head: int) -> None:
        count = self.state.layers[layer].heads
        if not isinstance(head, int) or not 0 <= head < count:
            raise ArgumentError(f"Census: a head of {layer!r} is from 0 to {count - 1}. Got {head!r}.")

    def _tokens_of(self, layer: LayerState, head: int) -> tuple[tuple[TokenShare, ...], tuple[TokenShare, ...]]:
        """The tokens that receive most, and those at which the head is most active."""
        counts, texts = self.state.counts, self.state.texts
        received, active = (layer.parts[name][head] * WEIGHT_UNIT for name in ("received", "active"))
        total = received.sum() or 1.0
        enough = counts >= min(_RARE, int(counts.max(initial=0)))
        means = np.where(enough, active / np.maximum(counts, 1), 0.0)

        def top(shares: np.ndarray) -> tuple[TokenShare, ...]:
            best = [at for at in np.lexsort((self.state.tokens, -shares))[:_TOP_TOKENS] if shares[at] > 0]
            ids = [int(self.state.tokens[at]) for at in best]
            return tuple(
                TokenShare(token, texts.get(token, ""), float(shares[at]), int(counts[at]))
                for at, token in zip(best, ids, strict=True)
            )

        return top(received / total), top(means)

    def _exemplars(self, layer: LayerState, head: int, wanted: str | None) -> Iterator[Exemplar]:
        e = layer.exemplars
        for b, behaviour in enumerate(BEHAVIOURS):
            if wanted not in (None, behaviour):
                continue
            for rank in range(e.kept):
                if np.isneginf(e.score[head, b, rank]):
                    continue
                at = head, b, rank
                keys = tuple(
                    KeyWeight(int(position), float(weight), tuple(ids.tolist()))
                    for position, weight, ids in zip(e.keys[at], e.weights[at], e.key_tokens[at], strict=True)
                    if position >= 0
                )
                document = self.state.names.get(f"{e.source[at]} {e.document[at]}", f"item {e.document[at]}")
                tokens = tuple(e.tokens[at].tolist())
                yield Exemplar(
                    behaviour, float(e.score[at]), document, int(e.start[at]), int(e.row[at]), tokens, BEFORE, keys,
                    self._text(tokens),
                )  # fmt: skip

    def _text(self, tokens: tuple[int, ...]) -> str:
        known = self.state.texts
        texts = [known.get(token, f" {token}") if token >= 0 else "" for token in tokens]
        own = texts[BEFORE]
        space = own[: len(own) - len(own.lstrip())]
        return "".join((*texts[:BEFORE], f"{space}⟦{own.lstrip()}⟧", *texts[BEFORE + 1 :]))
