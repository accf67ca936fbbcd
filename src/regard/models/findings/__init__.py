"""Findings: what is wrong or notable in a model's attention, in words; a new rule is a file and a line in `RULES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from textwrap import fill

from regard.report.labels import layer_legend
from regard.report.tables import NOTHING_FOUND, NOTHING_SEEN

from ...display import block, listed, note, shown
from ...errors import DtypeError
from ..record import AttentionRecord
from .base import Finding, Place, Rule
from .collapsed import Collapsed
from .duplicate import Duplicate
from .induction import Induction
from .logits import LargeLogits
from .positional import Positional
from .saturated import Saturated
from .sink import Sink
from .uniform import Uniform

__all__ = [
    "RULES",
    "Collapsed",
    "Duplicate",
    "Finding",
    "Findings",
    "Induction",
    "LargeLogits",
    "Place",
    "Positional",
    "Rule",
    "Saturated",
    "Sink",
    "Uniform",
    "find",
]

_WIDTH = 100  # characters in a line of text

# The most serious first.
RULES: tuple[Rule, ...] = (
    *(LargeLogits(), Collapsed(), Saturated(), Uniform()),
    *(Duplicate(), Sink(), Positional(), Induction()),
)


class Findings(list[Finding]):
    """Findings in their order, which print one per line, problems marked, and then the path of each layer, once."""

    def __init__(self, found: Iterable[Finding] = (), layers: Iterable[str] = ()) -> None:
        super().__init__(found)
        self.layers = list(layers)

    def __repr__(self) -> str:
        if not self:
            return NOTHING_FOUND if self.layers else NOTHING_SEEN
        lines = [
            fill(f"{'!' if one.level == 'problem' else '·'} {shown(one.text)}", _WIDTH, subsequent_indent="  ")
            for one in self
        ]
        return "\n".join([*lines, *self._legend()])

    def _repr_html_(self) -> str:
        if not self:
            return block("", note(NOTHING_FOUND if self.layers else NOTHING_SEEN))
        return block("", listed((one.text, one.level == "problem") for one in self), *map(note, self._legend()))

    def _legend(self) -> list[str]:
        named = {place.layer for finding in self for place in finding.places}
        return layer_legend(self.layers) if named & set(self.layers) else []


def find(
    seen: AttentionRecord, rules: Iterable[Rule] | None = None, tell: Callable[[str], None] | None = None
) -> Findings:
    """Apply each rule to what was seen; sort problems first, then by rule, then the strongest first.

    >>> import regard, torch
    >>> attend = regard.nn.MultiheadAttention(16, 2)
    >>> with regard.watch(attend) as seen:
    ...     _ = attend(*[torch.zeros(9, 1, 16)] * 3)
    >>> seen.findings()
    · L0, all 2 heads: dead head: attends to every key alike, with 1.000 of the entropy of uniform
      attention
    L0: the model itself
    """
    rules = RULES if rules is None else rules
    if isinstance(rules, Rule) or not isinstance(rules, Iterable):
        raise DtypeError(f"findings: rules must be a list of rules, such as [Sink(share=0.5)]. Got {rules!r}.")
    found = []
    for rank, rule in enumerate(rules):
        if not isinstance(rule, Rule):
            raise DtypeError(f"findings: rules must be rules, such as Sink(share=0.5). Got {rule!r}.")
        for finding in rule.judge(seen):
            strength = finding.value if rule.falling else -finding.value
            found.append((finding.level != "problem", rank, strength, finding))
        if tell is not None:
            tell(rule.name)
    return Findings((finding for *_, finding in sorted(found, key=lambda one: one[:3])), seen.layers)
