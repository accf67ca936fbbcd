"""How many items an attention memory holds, and at which temperature it can be read."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..functional import observe
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["MemoryCapacity"]

_HOPFIELD = 0.138  # items per dimension in the network of Hopfield (1982)


@dataclass(frozen=True)
class MemoryCapacity(Study):
    """Items are stored as keys and read back with noisy keys, by a softmax at some temperature."""

    name: ClassVar[str] = "memory"
    brief: ClassVar[str] = "A memory whose capacity grows exponentially with the dim"
    claim: ClassVar[str] = (
        "Attention is a content-addressable memory: at a low temperature a noisy key retrieves what was stored under "
        "the nearest key, and the number of items it can hold grows exponentially with the dimension. At a high "
        "temperature every query retrieves the mean of all items."
    )
    test: ClassVar[str] = (
        "The error is half the squared distance between the retrieved and the stored item, which are unit vectors; the "
        "capacity is the largest number of items with a mean error within the bound. For every d it is within a factor "
        "of 2 of the prediction from how often another key is nearer; its logarithm is closer to linear in d than the "
        "capacity itself (by correlation); and the error at the highest temperature is at least 0.4."
    )
    caption: ClassVar[str] = (
        "Left: retrieval error against temperature; dotted, T = c / ln(items), where the weight of the right item is "
        "drowned out by the others. Right: capacity against dimension, on a logarithmic axis: a line is exponential."
    )
    least: ClassVar[dict[str, float]] = {"similarity": 0}
    fewest: ClassVar[dict[str, int]] = {"dims": 2}
    among: ClassVar[dict[str, Collection[str]]] = {"growth": ("exponential", "linear")}

    dims: tuple[int, ...] = (16, 24, 32, 40, 48, 56, 64)
    similarity: float = 0.5  # c, the cosine between a noisy key and its target
    temperature: float = 0.02
    most: int = 32_768
    questions: int = 256
    bound: float = 0.1
    shown: tuple[int, ...] = (16, 256, 4096)  # numbers of items in the plot of error against temperature
    temperatures: tuple[float, ...] = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.14, 0.2, 0.3, 0.5, 1.0)
    growth: str = "exponential"  # or "linear", in d

    def suit(self) -> None:
        """The query must be noisy, and the bound below the error of a wrong item."""
        if not self.similarity < 1:
            self.refuse("similarity", "below 1")
        if not self.bound < 1 - self.similarity**2:
            self.refuse("bound", f"below 1 − similarity², {1 - self.similarity**2:g}")

    def measure(self, progress: Progress) -> list[Row]:
        """Find the capacity for each dimension, then sweep the temperature in the largest."""
        rows: list[Row] = []
        for d in counted(self.dims, progress, stop=0.7):
            predicted, hopfield = self._predicted_capacity(d), _HOPFIELD * d
            rows.append({"d": d, "capacity, items": self._capacity(d), "by the law": predicted, "0.138·d": hopfield})
        d = self.dims[-1]
        for items in counted(self.shown, progress, start=0.7):
            keys, queries = self._sample(items, d)
            for temperature in self.temperatures:
                error, weight = _retrieve(keys, queries, temperature)
                rows.append({"temperature": temperature, "items": items, "error": error, "weight on the right": weight})
        return rows

    def _capacity(self, d: int) -> int:
        """The largest number of items, a power of √2, whose error is within the bound, by bisection."""
        low, high = (
            0,
            2 * int(math.log2(self.most)) + 1,
        )  # exponents of √2; only the first is known to be within the bound
        while high - low > 1:
            middle = (low + high) // 2
            error, _ = _retrieve(*self._sample(round(2 ** (middle / 2)), d), self.temperature)
            low, high = (middle, high) if error <= self.bound else (low, middle)
        return round(2 ** (low / 2))

    def _predicted_capacity(self, d: int) -> float:
        """The capacity at temperature 0: retrieving a nearer key than the target costs about 1 − c²."""
        nearer = _share_above(self.similarity, d)
        return 1 + math.log1p(-self.bound / (1 - self.similarity**2)) / math.log1p(-nearer)

    def _sample(self, items: int, d: int) -> tuple[Tensor, Tensor]:
        """Keys on the unit sphere, and noisy queries for the first of them; several memories if each is small."""
        queries = min(items, self.questions)
        keys = torch.nn.functional.normalize(torch.randn(-(-self.questions // queries), items, d), dim=-1)
        target = keys[:, :queries]
        noise = torch.randn_like(target)
        noise = torch.nn.functional.normalize(noise - (noise * target).sum(-1, keepdim=True) * target, dim=-1)
        return keys, self.similarity * target + math.sqrt(1 - self.similarity**2) * noise

    def holds(self, rows: list[Row]) -> bool:
        """Exponential growth at a low temperature, the mean of all items at a high one."""
        capacities = [row for row in rows if "d" in row]
        as_predicted = all(0.5 < row["capacity, items"] / row["by the law"] < 2 for row in capacities)
        dims = torch.tensor([float(row["d"]) for row in capacities])
        capacity = torch.tensor([float(row["capacity, items"]) for row in capacities])
        fits = {"exponential": _correlation(dims, capacity.log()), "linear": _correlation(dims, capacity)}
        hot_errors = [row["error"] for row in rows if row.get("temperature") == max(self.temperatures)]
        return as_predicted and max(fits, key=lambda fit: fits[fit]) == self.growth and min(hot_errors) >= 0.4

    def draw(self, rows: list[Row]) -> Figure:
        """Error against temperature, capacity against dimension."""
        figure, (left, right) = canvas(9.5, 3.8, columns=2)
        for number, items in enumerate(self.shown):
            curve = [row for row in rows if row.get("items") == items]
            temperatures, errors = [row["temperature"] for row in curve], [row["error"] for row in curve]
            left.semilogx(temperatures, errors, marker="o", color=f"C{number}", label=f"{items:,} items")
            left.axvline(self.similarity / math.log(items), color=f"C{number}", linestyle=":")
        left.set(xlabel="temperature", ylabel="retrieval error", ylim=(-0.02, None))
        left.legend(frameon=False, title=f"d = {self.dims[-1]}")
        capacities = [row for row in rows if "d" in row]
        dims = [row["d"] for row in capacities]
        right.semilogy(
            dims, [row["capacity, items"] for row in capacities], "o-", label=f"measured, T = {self.temperature}"
        )
        right.semilogy(dims, [row["by the law"] for row in capacities], "--", label="predicted: another key is nearer")
        right.semilogy(dims, [row["0.138·d"] for row in capacities], ":", label="0.138·d: Hopfield's network of 1982")
        right.set(xlabel="d", ylabel="items held")
        right.legend(frameon=False)
        return figure


def _retrieve(keys: Tensor, queries: Tensor, temperature: float) -> tuple[float, float]:
    """The mean retrieval error, and the mean weight on the target."""
    target, scale = keys[:, : queries.shape[1]], 1.0 / temperature
    seen = observe(queries, keys, keys, scale=scale)
    weight = ((queries * target).sum(-1) * scale - seen.lse).exp()
    return (seen.output - target).square().sum(-1).mean().item() / 2, weight.mean().item()


def _share_above(cosine: float, d: int) -> float:
    """The share of a sphere whose cosine with a direction is above `cosine`."""
    angle = torch.linspace(0, math.pi, 200_001, dtype=torch.float64)
    density = angle.sin() ** (d - 2)  # of the angle, ∝ sin^(d − 2)
    return float(density[angle < math.acos(cosine)].sum() / density.sum())


def _correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((x, y)))[0, 1])
