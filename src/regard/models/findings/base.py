"""What a finding and a rule are, and how one sentence names all the heads with the same finding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import ClassVar, NamedTuple

from regard.report.labels import layer_label, runs

from ...errors import ArgumentError
from ..head_statistics import Head
from ..record import AttentionRecord

__all__ = ["Finding", "Place", "Rule", "StatisticRule", "by_layer", "span", "where"]


class Place(NamedTuple):
    """A layer and some of its heads."""

    layer: str
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """What a rule found in a model, in words and numbers: one finding for all heads that show the same.

    `level` is "problem" or "notable"; `value` is the number that decided, for the strongest head; `layer` and `heads`
    are where the strongest is, and `places` are all layers with their heads, in the order of the model. `says` is the
    sentence without the places.

    >>> found = Finding("sink", "notable", "L0 H3: rests on the first token", "attn", (3,), 0.83)
    >>> print(found, found.places)
    L0 H3: rests on the first token (Place(layer='attn', heads=(3,)),)
    """

    rule: str
    level: str
    text: str
    layer: str
    heads: tuple[int, ...]
    value: float
    places: tuple[Place, ...] = ()
    says: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", self.places or (Place(self.layer, self.heads),))
        object.__setattr__(self, "says", self.says or self.text)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Rule(ABC):
    """A pattern that attention may show, with the thresholds that decide when it does.

    A rule is data: a frozen dataclass whose fields are thresholds, each a number above 0; a share is at most 1.
    """

    name: ClassVar[str]
    falling: ClassVar[bool] = False  # whether a smaller value is the stronger finding
    shares: ClassVar[frozenset[str]] = frozenset()  # the thresholds that are shares of a whole

    def __post_init__(self) -> None:
        for threshold in fields(self):
            name = threshold.name
            value, part = getattr(self, name), name in self.shares
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not value > 0 or (part and value > 1):
                limits = "above 0, at most 1" if part else "above 0"
                raise ArgumentError(f"{type(self).__name__}: {name} must be a number {limits}. Got {value!r}.")

    @abstractmethod
    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield the findings, each with all the heads that it concerns."""

    def found(
        self, seen: AttentionRecord, cases: Mapping[str, Mapping[int, float]], says: str, level: str = "notable"
    ) -> Finding:
        """Build one finding about heads of some layers, given with their values; `says` ends the sentence."""
        places = tuple(Place(layer, tuple(sorted(heads))) for layer, heads in cases.items())
        best = min if self.falling else max
        strongest = {layer: best(heads.values()) for layer, heads in cases.items()}
        layer = best(strongest, key=strongest.__getitem__)
        text = f"{where(places, seen)}: {says}"
        return Finding(self.name, level, text, layer, tuple(sorted(cases[layer])), strongest[layer], places, says)


@dataclass(frozen=True)
class StatisticRule(Rule):
    """A rule that reads the statistics of one head at a time, if at least `rows` rows of the batch count."""

    rows: int = field(default=8, kw_only=True)

    @abstractmethod
    def measure(self, head: Head) -> float | None:
        """The number by which this head matches, or None if it does not."""

    @abstractmethod
    def says(self, heads: list[Head], values: list[float]) -> str:
        """Say in words what these heads do."""

    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield one finding per level, with all the heads that match."""
        matching: dict[str, dict[Head, float]] = {}
        for layer, heads in by_layer(seen).items():
            cases = {head: value for head in heads if (value := self.measure(head)) is not None}
            if cases and seen[layer].lse.numel() >= self.rows * len(heads):
                matching[layer] = cases
        groups: dict[str, dict[str, dict[Head, float]]] = {}
        for layer, (level, some) in self.weigh(seen, matching).items():
            groups.setdefault(level, {})[layer] = some
        for level, layers in groups.items():
            values = {layer: {head.head: value for head, value in cases.items()} for layer, cases in layers.items()}
            every = {head: value for cases in layers.values() for head, value in cases.items()}
            yield self.found(seen, values, self.says(list(every), list(every.values())), level)

    def weigh(
        self, seen: AttentionRecord, matching: dict[str, dict[Head, float]]
    ) -> dict[str, tuple[str, dict[Head, float]]]:
        """The level of the finding in each layer, and the heads that stay in it."""
        return {layer: ("notable", cases) for layer, cases in matching.items()}


def by_layer(seen: AttentionRecord) -> dict[str, list[Head]]:
    """Group the heads by layer, in the order of the layers' first calls."""
    layers: dict[str, list[Head]] = {}
    for head in seen.heads:
        layers.setdefault(head.layer, []).append(head)
    return layers


def where(places: Sequence[Place], seen: AttentionRecord) -> str:
    """Name layers by their place in the model, and heads by their number: L1 H0, 2–4; L2, all 8 heads."""
    named = []
    for layer, heads in places:
        label, size = layer_label(layer, seen.layers), seen[layer].shape[-3]
        named.append(f"{label}, all {size} heads" if len(heads) == size > 1 else f"{label} H{runs(heads)}")
    return "; ".join(named)


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Write one number, or the range of several.

    >>> span([0.831, 0.712]), span([0.831, 0.829])
    ('0.71 to 0.83', '0.83')
    """
    numbers = sorted(values)
    low, high = (f"{number:{form}}" for number in (numbers[0], numbers[-1]))
    return low if low == high else f"{low} to {high}"
