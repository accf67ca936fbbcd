"""What a temperature does: from the best key alone to the mean of all values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import scores
from ..functional import observe
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["Temperature"]

_STEP = 3e-4  # of finite differences, relative to T


@dataclass(frozen=True)
class Temperature(Study):
    """Entropy, its derivative, and the output of softmax(s/T) V, for T from almost 0 to very large.

    >>> Temperature().run().verdict, Temperature(power=2).run().verdict
    (True, False)
    """

    name: ClassVar[str] = "temperature"
    brief: ClassVar[str] = "Softmax at temperature T: from the best key to the mean"
    claim: ClassVar[str] = (
        "The weights softmax(s/T) are a Gibbs distribution: their entropy H rises strictly with T, by "
        "dH/dT = Var_p(s)/T³. As T → 0 attention returns the value of the best key, as T → ∞ the mean of all values."
    )
    test: ClassVar[str] = (
        "The entropy of every row rises from each T to the next; Var_p(s)/T³ agrees with autograd to 9 digits and with "
        "finite differences to 5 (or to 10⁻¹², their rounding error); at the smallest T the output is within 10⁻⁶ of "
        "the best key's value, at the largest within 10⁻² of the mean."
    )
    caption: ClassVar[str] = (
        "Left: the entropy rises from 0 to ln m, and its slope, computed in three ways, is the same curve. Right: the "
        "distance of the output from its two limits; it approaches the best key exponentially in 1/T, and the mean as "
        "1/T."
    )
    least: ClassVar[dict[str, float]] = {"keys": 2, "power": -math.inf}

    temperatures: tuple[float, ...] = tuple(2.0**power for power in range(-5, 11))
    queries: int = 8
    keys: int = 32
    dim: int = 16
    power: int = 3  # of T in the derivative under test

    def measure(self, progress: Progress) -> list[Row]:
        """Attend at each temperature, with the same queries, keys and values."""
        query, key, value = self._sample()
        products = query @ key.mT
        best, mean = value[products.argmax(-1)], value.mean(0)
        before = torch.zeros(self.queries, dtype=torch.float64)
        rows: list[Row] = []
        for T in counted(self.temperatures, progress):
            score = scores.Temperature(T).double()
            seen = observe(query, key, value, score=score)
            (by_log,) = torch.autograd.grad(seen.entropy.mean(), score.log_ratio)  # dH/d ln T = T dH/dT
            with torch.no_grad():
                weights, entropy, output = seen.weights(), seen.entropy.detach(), seen.output.detach()
                row: Row = {"T": T, "entropy": entropy.mean().item(), "least rise": (entropy - before).min().item()}
                row[f"Var/T^{self.power}"] = (_variance(weights, products) / T**self.power).mean().item()
                row["autograd"] = by_log.item() / T
                row["differences"] = self._difference(query, key, T)
                row["from the best"] = (output - best).abs().max().item()
                row["from the mean"] = (output - mean).abs().max().item()
            rows.append(row)
            before = entropy
        return rows

    def _sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values; only the queries whose best key leads by most, because a tie has no best key."""
        key = torch.randn(self.keys, self.dim, dtype=torch.float64)
        query = torch.randn(8 * self.queries, self.dim, dtype=torch.float64)
        first, second = (query @ key.mT).topk(2).values.unbind(-1)
        query = query[(first - second).topk(self.queries).indices]
        return query, key, torch.randn(self.keys, 4, dtype=torch.float64)

    def _difference(self, query: Tensor, key: Tensor, T: float) -> float:
        """dH/dT by central differences."""
        low, high = (
            observe(query, key, key, score=scores.Temperature(t, learnable=False)).entropy.mean().item()
            for t in (T * (1 - _STEP), T * (1 + _STEP))
        )
        return (high - low) / (2 * _STEP * T)

    def holds(self, rows: list[Row]) -> bool:
        """The entropy rises with the claimed derivative, and the output reaches both limits."""
        rises = all(row["least rise"] > 0 for row in rows)
        slopes = all(
            math.isclose(row[f"Var/T^{self.power}"], row[way], rel_tol=share, abs_tol=rest)
            for row in rows
            for way, share, rest in (("autograd", 1e-9, 0.0), ("differences", 1e-5, 1e-12))
        )
        return rises and slopes and rows[0]["from the best"] < 1e-6 and rows[-1]["from the mean"] < 1e-2

    def draw(self, rows: list[Row]) -> Figure:
        """Entropy with its derivative, and the two limits."""
        figure, (left, right) = canvas(9.5, 3.8, columns=2)
        T = [row["T"] for row in rows]
        left.semilogx(T, [row["entropy"] for row in rows], marker="o", label="entropy H, in nats")
        left.axhline(math.log(self.keys), color="0.5", linewidth=0.8, linestyle="--")
        left.text(T[0], math.log(self.keys), "ln m", va="bottom", color="0.3")
        ways = {f"Var/T^{self.power}": "o", "autograd": "+", "differences": "x"}
        for (way, marker), size in zip(ways.items(), (8, 13, 7), strict=True):
            slope = [row["T"] * row[way] for row in rows]
            label = f"T · {way.replace('^3', '³')}" if way.startswith("Var") else f"T · dH/dT by {way}"
            left.semilogx(T, slope, marker=marker, markersize=size, linestyle="none", label=label)
        left.set(xlabel="temperature T", ylim=(-0.1, 1.15 * math.log(self.keys)))
        left.legend(frameon=False, loc="center right")
        for column, label in (("from the best", "the best key's value"), ("from the mean", "the mean of all values")):
            right.loglog(T, [row[column] for row in rows], marker="o", label=label)
        right.set(xlabel="temperature T", ylabel="distance of the output from")
        right.legend(frameon=False, loc="lower center")
        return figure


def _variance(weights: Tensor, products: Tensor) -> Tensor:
    """Var_p(s) of each row."""
    mean = (weights * products).sum(-1, keepdim=True)
    return (weights * (products - mean).square()).sum(-1)
