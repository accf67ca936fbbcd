"""An alignment of two sentences that emerges from attention."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..functional import observe
from ..report.example import SOURCE, TARGET, known
from .base import Progress, Row, Study, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Alignment"]

_TRANSLATIONS = dict(
    zip(
        ("le", "chat", "noir", "veut", "souvent", "lait", "froid"),
        ("the", "cat", "black", "wants", "often", "milk", "cold"),
        strict=True,
    )
)  # "du" has no counterpart
_RULES = ("meaning", "place")


@dataclass(frozen=True)
class Alignment(Study):
    """A French sentence attends to the English one that it translates, without any supervision."""

    name: ClassVar[str] = "alignment"
    claim: ClassVar[str] = (
        "Attention aligns two sentences by the meaning of their words, not by their positions: each French word gives "
        "most of its weight to the English word it translates, and a word without a counterpart spreads its weight."
    )
    test: ClassVar[str] = (
        "Every French word with a translation gives it more than half of its weight, every row of weights sums to 1, "
        "and “du”, the only word without a translation, has the largest entropy."
    )
    caption: ClassVar[str] = (
        "Each bar is the share of a French word's attention that an English word receives; the largest of each row is "
        "dark. Three pairs are in the opposite order (chat noir, veut souvent, lait froid). Right: exp(entropy), the "
        "number of words effectively attended to: “du” has no counterpart and spreads its attention."
    )
    among: ClassVar[dict[str, Collection[str]]] = {"rule": _RULES}

    temperature: float = 1.0
    rule: str = "meaning"  # what a word aligns by, according to the claim: its meaning, or its place in the sentence

    def measure(self, progress: Progress) -> list[Row]:
        """Attend, and record the weights and statistics of each row."""
        q, k = known(TARGET), known(SOURCE)
        seen = observe(q, k, k, scale=1.0 / (self.temperature * math.sqrt(q.shape[-1])))
        strongest = seen.top(1)[1][:, 0].tolist()
        return [
            {
                "query": word,
                **dict(zip(SOURCE, weights, strict=True)),
                "strongest": SOURCE[best],
                "entropy, nats": entropy,
            }
            for word, weights, best, entropy in zip(
                TARGET, seen.weights().tolist(), strongest, seen.entropy.tolist(), strict=True
            )
        ]

    def holds(self, rows: list[Row]) -> bool:
        """Check the weights against the rule, their sums, and the entropy of “du”."""
        sums_to_one = all(math.isclose(sum(row[key] for key in SOURCE), 1.0, abs_tol=1e-5) for row in rows)
        aligned = all(row[key] > 0.5 for row, key in zip(rows, self._expected(), strict=True) if key is not None)
        most_spread = max(rows, key=lambda row: row["entropy, nats"])["query"]
        return sums_to_one and aligned and most_spread == "du"

    def _expected(self) -> list[str | None]:
        if self.rule == "meaning":
            return [_TRANSLATIONS.get(word) for word in TARGET]
        return [SOURCE[place] if place < len(SOURCE) else None for place in range(len(TARGET))]

    def draw(self, rows: list[Row]) -> Figure:
        """A matrix of bars, and the number of words each row effectively attends to."""
        figure, (matrix, effective) = canvas(9.0, 3.9, columns=2)
        matrix.get_gridspec().set_width_ratios([4, 1])
        places = range(len(rows))
        for column, key in enumerate(SOURCE):
            shares = [row[key] for row in rows]
            colours = ["C0" if row["strongest"] == key else "#a9c9e3" for row in rows]
            matrix.barh(places, [1.0] * len(rows), left=[1.15 * column] * len(rows), height=0.7, color="#f1f1f1")
            matrix.barh(places, shares, left=[1.15 * column] * len(rows), height=0.7, color=colours)
            for place, share in zip(places, shares, strict=True):
                if share > 0.1:
                    inside = share > 0.4
                    left = 1.15 * column + (0.04 if inside else share + 0.04)
                    colour = "white" if inside else "#333333"
                    matrix.text(left, place, f"{share:.0%}", va="center", fontsize=7.5, color=colour)
        matrix.set_xticks([1.15 * column + 0.5 for column in range(len(SOURCE))], SOURCE)
        matrix.set_yticks(places, [row["query"] for row in rows])
        matrix.set(xlabel="English (keys)", ylabel="French (queries)")
        effective.barh(places, [math.exp(row["entropy, nats"]) for row in rows], height=0.7, color="C1")
        effective.set_yticks([])
        effective.set(xlabel="effective words", xlim=(0, len(SOURCE)))
        for axes in (matrix, effective):
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y" if axes is effective else "both")
        matrix.spines[["left", "bottom"]].set_visible(False)
        matrix.tick_params(length=0)
        return figure
