"""Findings: what is wrong or notable in a model's attention, in words; a new rule is a file and a line in `RULES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...errors import DtypeError
from ..record import AttentionRecord
from .base import Finding, Rule
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
    "Induction",
    "LargeLogits",
    "Positional",
    "Rule",
    "Saturated",
    "Sink",
    "Uniform",
    "find",
]

# The most serious first.
RULES: tuple[Rule, ...] = (
    *(LargeLogits(), Collapsed(), Saturated(), Uniform()),
    *(Duplicate(), Sink(), Positional(), Induction()),
)


def find(
    seen: AttentionRecord, rules: Iterable[Rule] | None = None, tell: Callable[[str], None] | None = None
) -> list[Finding]:
    """Apply each rule to what was seen; sort problems first, then by rule, then the strongest first.

    >>> import regard, torch
    >>> attend = regard.nn.MultiheadAttention(16, 2)
    >>> with regard.watch(attend) as seen:
    ...     _ = attend(*[torch.zeros(9, 1, 16)] * 3)
    >>> print(*seen.findings(), sep="\\n")
    the model itself, all 2 heads: 1.000 of the entropy of uniform attention (a dead head: it selects no key)
    """
    found = []
    for rank, rule in enumerate(RULES if rules is None else rules):
        if not isinstance(rule, Rule):
            raise DtypeError(f"findings: rules must be rules, such as Sink(share=0.5). Got {rule!r}.")
        for finding in rule.judge(seen):
            strength = finding.value if rule.falling else -finding.value
            found.append((finding.level != "problem", rank, strength, finding))
        if tell is not None:
            tell(rule.name)
    return [finding for *_, finding in sorted(found, key=lambda one: one[:3])]
