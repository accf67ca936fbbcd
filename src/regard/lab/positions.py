"""What attention knows of order: nothing, until positions are added; and what they add."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..functional import attention
from ..masks import causal
from ..positions import Terms, alias_period, aliases, decompose, sinusoidal
from .base import Row, Study, Tell, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Positions"]

_TERMS = tuple(name.replace("_", "-") for name in Terms._fields)


@dataclass(frozen=True)
class Positions(Study):
    """Order lost and found: permutations, the four terms of a score, the offset alone, aliases, and the balance."""

    name: ClassVar[str] = "positions"
    claim: ClassVar[str] = (
        "Without positions attention does not know the order of its keys. Sinusoidal positions bring it: p_i·p_j is "
        "cos(2π(i−j)/T) for each period T, so positions a period apart cannot be told apart, and coprime periods push "
        "that to their product. With content a score has four terms; the size of the content sets their balance, and "
        "dividing by √d leaves it as it is."
    )
    test: ClassVar[str] = (
        "Permuted keys change nothing, and permuted tokens only permute the result, to 1e−12, but with positions or a "
        "causal mask they do change it; products of positions are the cosine to 1e−12; the first alias is at the least "
        "common multiple, for the cure at the product; and the terms sum to the score, each with its computed share of "
        "the variance across the keys to 0.03, which 1/√d does not change."
    )
    caption: ClassVar[str] = (
        "Left: the product of two encodings against their offset; where it is 1 again (▼), two positions look alike. "
        "Two coprime periods come near it before their product, and never reach it. Right: whose variance a row of "
        "scores has, by the size of the content's entries: at 1/√d, a usual start for embeddings, content drowns in "
        "positions; multiplied by √d, it leads."
    )
    least: ClassVar[dict[str, float]] = {"length": 2}

    dim: int = 64
    length: int = 384
    period: int = 8
    common: tuple[int, ...] = (8, 12)
    cure: tuple[int, ...] = (8, 13)  # periods of which the claim says that they first repeat at their product
    content: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0, 2.0)

    def measure(self, tell: Tell) -> list[Row]:
        """One part after the other."""
        rows: list[Row] = []
        for step, part in enumerate((self._order, self._offset, self._alias, self._balance)):
            rows += part()
            tell((step + 1) / 4)
        return rows

    def _order(self) -> list[Row]:
        x = torch.randn(12, self.dim, dtype=torch.float64)
        placed = sinusoidal(12, self.dim, dtype=torch.float64)
        order = torch.randperm(12)

        def moved(position: Tensor | float, **how: object) -> float:
            """How far the result for permuted tokens is from the permuted result."""
            plain, turned = x + position, x[order] + position
            result = attention(plain, plain, plain, **how)  # type: ignore[arg-type]
            return _apart(attention(turned, turned, turned, **how), result[order])  # type: ignore[arg-type]

        keys = _apart(attention(x[:1], x[order], x[order]), attention(x[:1], x, x))
        return [
            _row("order", "keys permuted, one query", keys, 0.0, keys < 1e-12),
            _row("order", "tokens permuted", (found := moved(0.0)), 0.0, found < 1e-12),
            _row("order", "the same with positions", (found := moved(placed)), "> 0.01", found > 0.01),
            _row("order", "the same under a causal mask", (found := moved(0.0, mask=causal())), "> 0.01", found > 0.01),
        ]

    def _offset(self) -> list[Row]:
        p = sinusoidal(4 * self.period, periods=[self.period], dtype=torch.float64)
        place = torch.arange(4 * self.period, dtype=torch.float64)
        cosine = torch.cos(2 * math.pi * (place[:, None] - place) / self.period)
        off = _apart(p @ p.mT, cosine)
        steps = [(f"p_i·p_j at i−j = {j}", (p[2 * j] @ p[j]).item(), cosine[j, 0].item()) for j in self._some()]
        return [
            *(
                _row("offset", case, found, value, math.isclose(found, value, abs_tol=1e-12))
                for case, found, value in steps
            ),
            _row("offset", "largest |p_i·p_j − cos|", off, 0.0, off < 1e-12),
        ]

    def _some(self) -> list[int]:
        return [0, self.period // 4, self.period // 2, self.period]

    def _alias(self) -> list[Row]:
        rows = []
        for periods in ((self.period,), self.common, self.cure):
            expected = math.prod(periods) if periods == self.cure else alias_period(periods)
            pairs = aliases(sinusoidal(expected + 8, periods=periods, dtype=torch.float64))
            first = int((pairs[:, 1] - pairs[:, 0]).min()) if len(pairs) else 0
            named = ", ".join(map(str, periods))
            rows.append(_row("alias", f"first alias, periods {named}", first, expected, first == expected))
        return rows

    def _balance(self) -> list[Row]:
        p = sinusoidal(self.length, self.dim, dtype=torch.float64)
        first, second = torch.randn(2, self.length, self.dim, dtype=torch.float64)
        off = _apart(sum(decompose(first, p, second, p), torch.zeros(())), (first + p) @ (second + p).mT)
        rows = [_row("terms", "largest |sum of four − score|", off, 0.0, off < 1e-10)]
        for size in self.content:
            expected = self._expected(p, size)
            terms = decompose(size * first, p, size * second, p)
            found = _shares([_across(term) for term in terms])
            divided = _shares([_across(term / math.sqrt(self.dim)) for term in terms])
            cases = [(f"{_TERMS[i]}, c = {size:g}", found[i], expected[i]) for i in range(len(_TERMS))]
            if size == 1.0:
                cases.append((f"{_TERMS[0]}, c = 1, over √d", divided[0], found[0]))
            rows += [_row("balance", case, a, b, math.isclose(a, b, abs_tol=0.03)) for case, a, b in cases]
        return rows

    def _expected(self, p: Tensor, size: float) -> list[float]:
        """The shares for independent content of variance c²: the terms have d·c⁴, c²·Σ Var(p), c²·|p|² and p's own."""
        spread = p.var(0, correction=0).sum().item()
        own = _across(p @ p.mT)
        return _shares([self.dim * size**4, size**2 * spread, size**2 * self.dim / 2, own])

    def holds(self, rows: list[Row]) -> bool:
        """Everything agrees."""
        return all(row["agrees"] for row in rows)

    def draw(self, rows: list[Row]) -> Figure:
        """Similarity against offset, and the shares of the four terms against the size of the content."""
        figure, (left, right) = canvas(10.0, 3.9, columns=2)
        for colour, periods in enumerate(((self.period,), self.cure)):
            length, repeat = math.prod(self.cure) + self.period, alias_period(periods)
            p = sinusoidal(length, periods=periods, dtype=torch.float64)
            similar = (p @ p[0] / len(periods)).tolist()
            named = "period" if len(periods) == 1 else "periods"
            label = f"{named} {', '.join(map(str, periods))}: first alias at {repeat}"
            left.plot(range(length), similar, color=f"C{colour}", lw=(0.8, 1.6)[colour], label=label)
            left.plot(range(repeat, length, repeat), [1.0] * len(range(repeat, length, repeat)), f"C{colour}v", ms=6)
        left.set(xlabel="offset i − j", ylabel="p_i·p_j, of its largest", ylim=(-1.1, 1.5))
        left.legend(frameon=False, loc="upper left", fontsize=8)
        shares = [[row["found"] for row in rows if row["case"] in self._cases(term)] for term in _TERMS]
        right.stackplot(self.content, shares, labels=_TERMS, colors=("C0", "#9ecae1", "#fdd0a2", "C1"))
        for size, label in ((self.dim**-0.5, "1/√d"), (1.0, "1/√d · √d")):
            right.axvline(size, color="black", lw=1, ls=":")
            right.annotate(
                label, (size, 1.01), ha="center", va="bottom", fontsize=8, xycoords=("data", "axes fraction")
            )
        right.set(xlabel="size c of the content's entries", ylabel="share of the variance across keys", ylim=(0, 1))
        right.set(xscale="log", xlim=(min(self.content), max(self.content)))
        right.set_xticks(self.content, [f"{size:g}" for size in self.content], minor=False)
        right.minorticks_off()
        right.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, fontsize=8)
        return figure

    def _cases(self, term: str) -> list[str]:
        return [f"{term}, c = {size:g}" for size in self.content]


def _row(part: str, case: str, found: float, expected: float | str, agrees: bool) -> Row:
    return {"part": part, "case": case, "found": found, "expected": expected, "agrees": agrees}


def _apart(x: Tensor, y: Tensor) -> float:
    return (x - y).abs().max().item()


def _across(logits: Tensor) -> float:
    """The variance across the keys, which is all that a softmax sees of logits, in the mean over the queries."""
    return logits.var(-1, correction=0).mean().item()


def _shares(parts: list[float]) -> list[float]:
    return [part / sum(parts) for part in parts]
