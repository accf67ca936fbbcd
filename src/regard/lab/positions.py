"""Attention ignores order until positions are added; and what positions contribute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..functional import attention
from ..masks import causal
from ..positions import Terms, alias_period, aliases, decompose, sinusoidal
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["Positions"]

_TERMS = tuple(name.replace("_", "-") for name in Terms._fields)


@dataclass(frozen=True)
class Positions(Study):
    """Permutations, products of positions, aliases, and the four terms of a score and their balance."""

    name: ClassVar[str] = "positions"
    brief: ClassVar[str] = "Sinusoidal positions give attention the order of its keys"
    claim: ClassVar[str] = (
        "Without positions attention ignores the order of its keys. Sinusoidal positions provide it: p_i·p_j is "
        "cos(2π(i−j)/T) for each period T, so positions one period apart are indistinguishable, and coprime periods "
        "extend that distance to their product. With content, a score has four terms; the size of the content sets "
        "their balance, which dividing by √d does not change."
    )
    test: ClassVar[str] = (
        "Permuting the keys changes nothing, and permuting the tokens only permutes the result, to 1e−12, but with "
        "positions or a causal mask the result changes. Products of positions equal the cosine to 1e−12. The first "
        "alias is at the least common multiple of the periods, and for coprime periods (cure) at their product. The "
        "terms sum to the score, and each has its predicted share of the variance across keys to 0.03, which 1/√d "
        "does not change."
    )
    caption: ClassVar[str] = (
        "Left: the product of two encodings against their offset; where it returns to 1 (▼), two positions are "
        "indistinguishable. With two coprime periods it comes close to 1 but does not reach it before their product. "
        "Right: the share of each term in the variance of a row of scores, by the size of the content's entries: at "
        "1/√d, a usual initialization of embeddings, positions drown out content; multiplied by √d, content dominates."
    )
    least: ClassVar[dict[str, float]] = {"length": 2}

    dim: int = 64
    length: int = 384
    period: int = 8
    common: tuple[int, ...] = (8, 12)
    cure: tuple[int, ...] = (8, 13)  # periods that, by the claim, first repeat at their product
    content: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0, 2.0)

    def measure(self, progress: Progress) -> list[Row]:
        """Run the four parts."""
        parts = (self._order_rows, self._offset_rows, self._alias_rows, self._balance_rows)
        return [row for part in counted(parts, progress) for row in part()]

    def _order_rows(self) -> list[Row]:
        x = torch.randn(12, self.dim, dtype=torch.float64)
        encodings = sinusoidal(12, self.dim, dtype=torch.float64)
        order = torch.randperm(12)

        def permutation_error(position: Tensor | float, **options: object) -> float:
            """The largest difference between the result for permuted tokens and the permuted result."""
            original, permuted = x + position, x[order] + position
            result = attention(original, original, original, **options)  # type: ignore[arg-type]
            return _difference(attention(permuted, permuted, permuted, **options), result[order])  # type: ignore[arg-type]

        keys = _difference(attention(x[:1], x[order], x[order]), attention(x[:1], x, x))
        return [
            _row("order", "keys permuted, one query", keys, 0.0, keys < 1e-12),
            _row("order", "tokens permuted", (found := permutation_error(0.0)), 0.0, found < 1e-12),
            _row("order", "the same with positions", (found := permutation_error(encodings)), "> 0.01", found > 0.01),
            _row(
                "order",
                "the same under a causal mask",
                (found := permutation_error(0.0, mask=causal())),
                "> 0.01",
                found > 0.01,
            ),
        ]

    def _offset_rows(self) -> list[Row]:
        p = sinusoidal(4 * self.period, periods=[self.period], dtype=torch.float64)
        place = torch.arange(4 * self.period, dtype=torch.float64)
        cosine = torch.cos(2 * math.pi * (place[:, None] - place) / self.period)
        off = _difference(p @ p.mT, cosine)
        steps = [(f"p_i·p_j at i−j = {j}", (p[2 * j] @ p[j]).item(), cosine[j, 0].item()) for j in self._offsets()]
        return [
            *(
                _row("offset", case, found, value, math.isclose(found, value, abs_tol=1e-12))
                for case, found, value in steps
            ),
            _row("offset", "largest |p_i·p_j − cos|", off, 0.0, off < 1e-12),
        ]

    def _offsets(self) -> list[int]:
        return [0, self.period // 4, self.period // 2, self.period]

    def _alias_rows(self) -> list[Row]:
        rows = []
        for periods in ((self.period,), self.common, self.cure):
            expected = math.prod(periods) if periods == self.cure else alias_period(periods)
            pairs = aliases(sinusoidal(expected + 8, periods=periods, dtype=torch.float64))
            first = int((pairs[:, 1] - pairs[:, 0]).min()) if len(pairs) else 0
            named = ", ".join(map(str, periods))
            rows.append(_row("alias", f"first alias, periods {named}", first, expected, first == expected))
        return rows

    def _balance_rows(self) -> list[Row]:
        p = sinusoidal(self.length, self.dim, dtype=torch.float64)
        first, second = torch.randn(2, self.length, self.dim, dtype=torch.float64)
        off = _difference(sum(decompose(first, p, second, p), torch.zeros(())), (first + p) @ (second + p).mT)
        rows = [_row("terms", "largest |sum of four − score|", off, 0.0, off < 1e-10)]
        for size in self.content:
            expected = self._expected_shares(p, size)
            terms = decompose(size * first, p, size * second, p)
            found = _shares([_variance_across_keys(term) for term in terms])
            divided = _shares([_variance_across_keys(term / math.sqrt(self.dim)) for term in terms])
            cases = [(f"{_TERMS[i]}, c = {size:g}", found[i], expected[i]) for i in range(len(_TERMS))]
            if size == 1.0:
                cases.append((f"{_TERMS[0]}, c = 1, over √d", divided[0], found[0]))
            rows += [_row("balance", case, a, b, math.isclose(a, b, abs_tol=0.03)) for case, a, b in cases]
        return rows

    def _expected_shares(self, p: Tensor, size: float) -> list[float]:
        """Shares for independent content of variance c²: the terms have d·c⁴, c²·Σ Var(p), c²·|p|², and that of p·p."""
        spread = p.var(0, correction=0).sum().item()
        own = _variance_across_keys(p @ p.mT)
        return _shares([self.dim * size**4, size**2 * spread, size**2 * self.dim / 2, own])

    def holds(self, rows: list[Row]) -> bool:
        """Every row agrees with its expectation."""
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
        left.set(xlabel="offset i − j", ylabel="p_i·p_j / its maximum", ylim=(-1.1, 1.5))
        left.legend(frameon=False, loc="upper left", fontsize=8)
        found = {row["case"]: row["found"] for row in rows}
        shares = [[found[f"{term}, c = {size:g}"] for size in self.content] for term in _TERMS]
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


def _row(part: str, case: str, found: float, expected: float | str, agrees: bool) -> Row:
    return {"part": part, "case": case, "found": found, "expected": expected, "agrees": agrees}


def _difference(x: Tensor, y: Tensor) -> float:
    return (x - y).abs().max().item()


def _variance_across_keys(logits: Tensor) -> float:
    """The variance across the keys, which is all that matters to a softmax, averaged over the queries."""
    return logits.var(-1, correction=0).mean().item()


def _shares(parts: list[float]) -> list[float]:
    return [part / sum(parts) for part in parts]
