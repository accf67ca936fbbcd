"""What a finding and a rule are, and how one sentence names several heads with the same finding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import ClassVar

from ...errors import ArgumentError
from ..head_statistics import Head
from ..record import AttentionRecord

__all__ = ["Finding", "Rule", "StatisticRule", "by_layer", "span", "where"]


@dataclass(frozen=True)
class Finding:
    """What a rule found in a layer, in words and numbers.

    `level` is "problem" or "notable"; `value` is the number that decided, for the strongest head if there are several.

    >>> print(Finding("sink", "notable", 'layer "attn", head 3: …', "attn", (3,), 0.83))
    layer "attn", head 3: …
    """

    rule: str
    level: str
    text: str
    layer: str
    heads: tuple[int, ...]
    value: float

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
        """Yield the findings, layer by layer."""

    def found(self, layer: str, heads: Mapping[int, float], of: int, says: str, level: str = "notable") -> Finding:
        """Build one finding about some of the layer's `of` heads, given with their values; `says` ends the sentence."""
        strongest = (min if self.falling else max)(heads.values())
        numbers = tuple(sorted(heads))
        return Finding(self.name, level, f"{where(layer, numbers, of)}: {says}", layer, numbers, strongest)


@dataclass(frozen=True)
class StatisticRule(Rule):
    """A rule that reads the statistics of one head at a time, if at least `rows` rows of the batch count."""

    rows: int = field(default=8, kw_only=True)

    @abstractmethod
    def measure(self, head: Head) -> float | None:
        """The number by which this head matches, or None if it does not."""

    @abstractmethod
    def says(self, heads: list[Head], values: list[float]) -> str:
        """Say in words what these heads of one layer do."""

    def judge(self, seen: AttentionRecord) -> Iterator[Finding]:
        """Yield one finding per layer, with all the heads that match."""
        for layer, heads in by_layer(seen).items():
            cases = {head: value for head in heads if (value := self.measure(head)) is not None}
            if cases and seen[layer].lse.numel() >= self.rows * len(heads):
                values = {head.head: value for head, value in cases.items()}
                text = self.says(list(cases), list(cases.values()))
                yield self.found(layer, values, len(heads), text, self.severity(len(cases) / len(heads)))

    def severity(self, part: float) -> str:
        """The level of a finding that concerns this part of a layer's heads."""
        return "notable"


def by_layer(seen: AttentionRecord) -> dict[str, list[Head]]:
    """Group the heads by layer, in the order of the layers' first calls."""
    layers: dict[str, list[Head]] = {}
    for head in seen.heads:
        layers.setdefault(head.layer, []).append(head)
    return layers


def where(layer: str, heads: tuple[int, ...], of: int) -> str:
    """Name a layer and its heads.

    >>> where("blocks.2", (3,), 8), where("blocks.2", (0, 1, 5), 8), where("", (0, 1), 2)
    ('layer "blocks.2", head 3', 'layer "blocks.2", heads 0, 1 and 5', 'the model itself, all 2 heads')
    """
    place = f'layer "{layer}"' if layer else "the model itself"
    if len(heads) == 1:
        return f"{place}, head {heads[0]}"
    if len(heads) == of:
        return f"{place}, all {of} heads"
    return f"{place}, heads {', '.join(map(str, heads[:-1]))} and {heads[-1]}"


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Write one number, or the range of several.

    >>> span([0.831, 0.712]), span([0.831, 0.829])
    ('0.71 to 0.83', '0.83')
    """
    numbers = sorted(values)
    low, high = (f"{number:{form}}" for number in (numbers[0], numbers[-1]))
    return low if low == high else f"{low} to {high}"
