"""How much an attention memory holds, and at which temperature it can be read."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..functional import observe
from .base import Row, Study, Tell, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MemoryCapacity"]

_CLASSIC = 0.138  # items a dimension that the network of Hopfield (1982) holds


@dataclass(frozen=True)
class MemoryCapacity(Study):
    """Items are written as keys, and read back by noisy ones, with softmax at a temperature."""

    name: ClassVar[str] = "memory"
    claim: ClassVar[str] = (
        "Attention is a memory that is read by content: at a low temperature a noisy key brings back what was stored "
        "under the key nearest to it, and the number of items that it can hold grows exponentially with the dimension. "
        "At a high temperature every question gets the mean of all."
    )
    test: ClassVar[str] = (
        "The error is half the squared distance between what is read and what was stored, items being unit vectors; "
        "capacity is the largest number of items with a mean error of at most the bound. For every d it is within a "
        "factor of 2 of the law, which counts how often some other key is nearer; over d, its logarithm is nearer to a "
        "line than it is itself (by the correlation); and the error at the highest temperature is at least 0.4."
    )
    caption: ClassVar[str] = (
        "Left: error of what is read against temperature; dotted, T = c / ln(items), where the right item's weight "
        "drowns among the others'. Right: capacity against dimension, on a logarithmic axis: a line is exponential."
    )
    least: ClassVar[dict[str, float]] = {"similarity": 0}
    fewest: ClassVar[dict[str, int]] = {"dims": 2}
    among: ClassVar[dict[str, Collection[str]]] = {"growth": ("exponential", "linear")}

    dims: tuple[int, ...] = (16, 24, 32, 40, 48, 56, 64)
    similarity: float = 0.5  # c, the cosine between a noisy key and the key that is meant
    temperature: float = 0.02
    most: int = 32_768
    questions: int = 256
    bound: float = 0.1
    shown: tuple[int, ...] = (16, 256, 4096)  # numbers of items whose errors are shown over temperature
    temperatures: tuple[float, ...] = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.14, 0.2, 0.3, 0.5, 1.0)
    growth: str = "exponential"  # or "linear", in d

    def suit(self) -> None:
        """What is asked for is another key, and its error can be told from that of a wrong one."""
        if not self.similarity < 1:
            self.refuse("similarity", "below 1")
        if not self.bound < 1 - self.similarity**2:
            self.refuse("bound", f"below 1 − similarity², {1 - self.similarity**2:g}")

    def measure(self, tell: Tell) -> list[Row]:
        """Search the capacity of each dimension, then go over temperatures in the largest."""
        rows: list[Row] = []
        steps = len(self.dims) + len(self.shown)
        for step, d in enumerate(self.dims):
            law, classic = self._law(d), _CLASSIC * d
            rows.append({"d": d, "capacity, items": self._capacity(d), "by the law": law, "0.138·d": classic})
            tell((step + 1) / steps)
        d = self.dims[-1]
        for step, items in enumerate(self.shown):
            keys, asked = self._written(items, d)
            for temperature in self.temperatures:
                error, weight = _read(keys, asked, temperature)
                rows.append({"temperature": temperature, "items": items, "error": error, "weight on the right": weight})
            tell((len(self.dims) + step + 1) / steps)
        return rows

    def _capacity(self, d: int) -> int:
        """The largest number of items, a power of √2, whose error is within the bound, found by halving."""
        low, high = 0, 2 * int(math.log2(self.most)) + 1  # exponents of √2, of which only the first is known to do
        while high - low > 1:
            middle = (low + high) // 2
            error, _ = _read(*self._written(round(2 ** (middle / 2)), d), self.temperature)
            low, high = (middle, high) if error <= self.bound else (low, middle)
        return round(2 ** (low / 2))

    def _law(self, d: int) -> float:
        """The capacity at temperature 0: a key that is nearer than the one meant costs about 1 − c²."""
        nearer = _share_above(self.similarity, d)
        return 1 + math.log1p(-self.bound / (1 - self.similarity**2)) / math.log1p(-nearer)

    def _written(self, items: int, d: int) -> tuple[Tensor, Tensor]:
        """Keys on the unit sphere, and noisy ones that ask for the first of them; many memories if they are small."""
        asked = min(items, self.questions)
        keys = torch.nn.functional.normalize(torch.randn(-(-self.questions // asked), items, d), dim=-1)
        meant = keys[:, :asked]
        noise = torch.randn_like(meant)
        noise = torch.nn.functional.normalize(noise - (noise * meant).sum(-1, keepdim=True) * meant, dim=-1)
        return keys, self.similarity * meant + math.sqrt(1 - self.similarity**2) * noise

    def holds(self, rows: list[Row]) -> bool:
        """Exponential growth at a low temperature, the mean of all at a high one."""
        held = [row for row in rows if "d" in row]
        lawful = all(0.5 < row["capacity, items"] / row["by the law"] < 2 for row in held)
        dims = torch.tensor([float(row["d"]) for row in held])
        capacity = torch.tensor([float(row["capacity, items"]) for row in held])
        fits = {"exponential": _correlation(dims, capacity.log()), "linear": _correlation(dims, capacity)}
        blurred = [row["error"] for row in rows if row.get("temperature") == max(self.temperatures)]
        return lawful and max(fits, key=lambda fit: fits[fit]) == self.growth and min(blurred) >= 0.4

    def draw(self, rows: list[Row]) -> Figure:
        """Error against temperature, capacity against dimension."""
        figure, (left, right) = canvas(9.5, 3.8, columns=2)
        for number, items in enumerate(self.shown):
            curve = [row for row in rows if row.get("items") == items]
            temperatures, errors = [row["temperature"] for row in curve], [row["error"] for row in curve]
            left.semilogx(temperatures, errors, marker="o", color=f"C{number}", label=f"{items:,} items")
            left.axvline(self.similarity / math.log(items), color=f"C{number}", linestyle=":")
        left.set(xlabel="temperature", ylabel="error of what is read", ylim=(-0.02, None))
        left.legend(frameon=False, title=f"d = {self.dims[-1]}")
        held = [row for row in rows if "d" in row]
        dims = [row["d"] for row in held]
        right.semilogy(dims, [row["capacity, items"] for row in held], "o-", label=f"measured, T = {self.temperature}")
        right.semilogy(dims, [row["by the law"] for row in held], "--", label="law: when another key is nearer")
        right.semilogy(dims, [row["0.138·d"] for row in held], ":", label="0.138·d: Hopfield's network of 1982")
        right.set(xlabel="d", ylabel="items held")
        right.legend(frameon=False)
        return figure


def _read(keys: Tensor, asked: Tensor, temperature: float) -> tuple[float, float]:
    """The mean error of what is read, and the mean weight that lies on the item meant."""
    meant, scale = keys[:, : asked.shape[1]], 1.0 / temperature
    seen = observe(asked, keys, keys, scale=scale)
    weight = ((asked * meant).sum(-1) * scale - seen.lse).exp()
    return (seen.output - meant).square().sum(-1).mean().item() / 2, weight.mean().item()


def _share_above(cosine: float, d: int) -> float:
    """The share of a sphere's points whose cosine with a direction is above `cosine`."""
    angle = torch.linspace(0, math.pi, 200_001, dtype=torch.float64)
    density = angle.sin() ** (d - 2)  # of the angle, ∝ sin^(d − 2)
    return float(density[angle < math.acos(cosine)].sum() / density.sum())


def _correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((x, y)))[0, 1])
