"""What a finding is, what a rule is, and how several heads with one finding are said in one sentence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

from ...errors import ArgumentError

if TYPE_CHECKING:
    from ..head_statistics import Head
    from ..seen import Seen

__all__ = ["Finding", "Rule", "StatisticRule", "by_layer", "span", "where"]


@dataclass(frozen=True)
class Finding:
    """What a rule found in a layer, in words with numbers.

    `level` is "problem" or "notable"; `value` is the number that decided, of the strongest head if there are several.

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
    """One thing that attention may do, with the thresholds that say when it does.

    A rule is data: a frozen dataclass whose fields are thresholds, each a number above 0, and a share at most 1.
    """

    name: ClassVar[str]
    falling: ClassVar[bool] = False  # whether a smaller value is the stronger case
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
    def judge(self, seen: Seen) -> Iterator[Finding]:
        """Give what was found, layer by layer."""

    def found(self, layer: str, heads: Mapping[int, float], of: int, says: str, level: str = "notable") -> Finding:
        """Make one finding of heads, each with its value, among `of` heads; `says` is the rest of the sentence."""
        strongest = (min if self.falling else max)(heads.values())
        places = tuple(sorted(heads))
        return Finding(self.name, level, f"{where(layer, places, of)}: {says}", layer, places, strongest)


@dataclass(frozen=True)
class StatisticRule(Rule):
    """A rule that reads the statistics of one head at a time, where `rows` rows or more made them, over the batch."""

    rows: int = field(default=8, kw_only=True)

    @abstractmethod
    def measure(self, head: Head) -> float | None:
        """Give the number that makes this head a case, or None if it is none."""

    @abstractmethod
    def says(self, heads: list[Head], values: list[float]) -> str:
        """Say in words what these heads of one layer do."""

    def judge(self, seen: Seen) -> Iterator[Finding]:
        """Give one finding a layer, with all the heads that are a case."""
        for layer, heads in by_layer(seen).items():
            cases = {head: value for head in heads if (value := self.measure(head)) is not None}
            if cases and seen[layer].lse.numel() >= self.rows * len(heads):
                values = {head.head: value for head, value in cases.items()}
                says = self.says(list(cases), list(cases.values()))
                yield self.found(layer, values, len(heads), says, self.severity(len(cases) / len(heads)))

    def severity(self, part: float) -> str:
        """Give the level of a finding that concerns this part of a layer's heads."""
        return "notable"


def by_layer(seen: Seen) -> dict[str, list[Head]]:
    """Sort the heads into their layers, in the order in which they were called."""
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
    """Say one number, or from which to which several go.

    >>> span([0.831, 0.712]), span([0.831, 0.829])
    ('0.71 to 0.83', '0.83')
    """
    numbers = sorted(values)
    low, high = (f"{number:{form}}" for number in (numbers[0], numbers[-1]))
    return low if low == high else f"{low} to {high}"
