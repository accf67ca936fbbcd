"""Attention as Nadaraya–Watson kernel regression."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..functional import attention
from ..scores import Gaussian
from .base import Figure, Progress, Row, Study, canvas

__all__ = ["Kernel"]

_ROUNDING = 1e-13
_BACKENDS = ("reference", "chunked", "auto")


@dataclass(frozen=True)
class Kernel(Study):
    """Attention compared with Σ κ(q, k) v / Σ κ(q, k), and the Gaussian kernel with the dot product, in float64.

    >>> Kernel().run().verdict, Kernel(spread=0.1).run().verdict
    (True, False)
    """

    name: ClassVar[str] = "kernel"
    brief: ClassVar[str] = "Attention is kernel regression of the values on the keys"
    claim: ClassVar[str] = (
        "Attention is Nadaraya–Watson regression of the values on the keys, with the kernel exp(q·k/√d); and with keys "
        "of unit norm the Gaussian kernel exp(−‖q − k‖²/2h²) gives the same weights as the dot product over h²."
    )
    test: ClassVar[str] = (
        "The two outputs differ by less than 10⁻¹³ for the exponential kernel on every backend, for the Gaussian "
        "kernel, and between Gaussian and dot product if all keys have the same norm; if their norms spread by a tenth "
        "or more, Gaussian and dot product differ by more than 10⁻³."
    )
    caption: ClassVar[str] = (
        "Left: a curve estimated from noisy points by attention (dots), which equals kernel regression (line). Right: "
        "the Gaussian kernel against the dot product: for keys of equal norm they agree to rounding, any spread of the "
        "norms makes them differ, and the bias −‖k‖²/2h² makes them agree again."
    )
    least: ClassVar[dict[str, float]] = {"spreads": 0, "spread": 0}

    queries: int = 64
    keys: int = 256
    dim: int = 16
    bandwidth: float = 0.5
    spreads: tuple[float, ...] = (0.001, 0.01, 0.1, 0.3, 1.0)
    spread: float = 0.0  # of the norms of the keys under test, as the standard deviation of ln ‖k‖

    def measure(self, progress: Progress) -> list[Row]:
        """Compare the outputs of each pair of formulas."""
        return list(self._rows())

    def _rows(self) -> Iterator[Row]:
        query = torch.randn(self.queries, self.dim, dtype=torch.float64)
        key = torch.randn(self.keys, self.dim, dtype=torch.float64)
        value = torch.randn(self.keys, self.dim, dtype=torch.float64)
        kernel = (query @ key.mT / self.dim**0.5).exp()
        for backend in _BACKENDS:
            output = attention(query, key, value, backend=backend)
            yield _row(f"attention by {backend}", "Σκv/Σκ, exponential", math.nan, output, _regression(kernel, value))
        points, heights, positions = self._curve()
        output, expected = self._estimate(points, heights, positions)
        yield _row("attention, Gaussian score", "Σκv/Σκ, Gaussian", math.nan, output, expected)

        query, unit = normalize(query, dim=-1), normalize(key, dim=-1)
        stretch = torch.randn(self.keys, 1, dtype=torch.float64)
        for spread in sorted({self.spread, 0.0, *self.spreads}):
            yield self._compare("dot product", spread, query, unit * (stretch * spread).exp(), value)
        yield self._compare("dot product, norms 3", 0.0, query, 3 * unit, value)
        stretched = unit * (stretch * max(self.spreads)).exp()
        bias = stretched.square().sum(-1) / (-2 * self.bandwidth**2)
        yield self._compare("dot product with bias", max(self.spreads), query, stretched, value, bias)

    def _compare(
        self, name: str, spread: float, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
    ) -> Row:
        gaussian = attention(query, key, value, score=Gaussian(self.bandwidth))
        dot = attention(query, key, value, scale=self.bandwidth**-2, bias=bias)
        return _row("attention, Gaussian score", name, spread, gaussian, dot)

    def _curve(self) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy points of a curve, and the positions at which to estimate it."""
        noise = torch.Generator().manual_seed(1)
        points = torch.linspace(0, 2 * math.pi, 40, dtype=torch.float64)[:, None]
        heights = points.sin() + 0.3 * torch.randn(40, 1, dtype=torch.float64, generator=noise)
        return points, heights, torch.linspace(0, 2 * math.pi, 81, dtype=torch.float64)[:, None]

    def _estimate(self, points: Tensor, heights: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The curve estimated by attention, and by kernel regression."""
        kernel = (-(positions - points.mT).square() / (2 * self.bandwidth**2)).exp()
        return attention(positions, points, heights, score=Gaussian(self.bandwidth)), _regression(kernel, heights)

    def holds(self, rows: list[Row]) -> bool:
        """Equal where the claim says so, and different elsewhere."""
        sums = [row for row in rows if row["beside"].startswith("Σ")]
        sweep = {row["spread"]: row["differ by"] for row in rows if row["beside"] == "dot product"}
        others = [row for row in rows if row["beside"].startswith("dot product") and row["beside"] != "dot product"]
        same = all(row["differ by"] < _ROUNDING for row in [*sums, *others]) and sweep[self.spread] < _ROUNDING
        return same and all(gap > 1e-3 for spread, gap in sweep.items() if spread >= 0.1)

    def draw(self, rows: list[Row]) -> Figure:
        """The regression, and the difference against the spread of the norms."""
        figure, (left, right) = canvas(9.5, 3.8, columns=2)
        points, heights, positions = self._curve()
        output, expected = self._estimate(points, heights, positions)
        left.plot(points.squeeze(), heights.squeeze(), ".", color="0.6", label="points: keys and values")
        left.plot(positions.squeeze(), expected.squeeze(), label="Nadaraya–Watson", linewidth=4, alpha=0.4)
        left.plot(positions[::4].squeeze(), output[::4].squeeze(), "o", markersize=4, color="C0", label="attention")
        left.set(xlabel="query", ylabel="output")
        left.legend(frameon=False)
        floor = 1e-17
        for beside, marker in (("dot product", "o"), ("dot product, norms 3", "s"), ("dot product with bias", "^")):
            series = [row for row in rows if row["beside"] == beside]
            right.plot(
                [row["spread"] for row in series],
                [max(row["differ by"], floor) for row in series],
                marker,
                label=beside,
            )
        right.axhline(_ROUNDING, color="0.5", linewidth=0.8, linestyle="--")
        right.set_xscale("symlog", linthresh=min(self.spreads))
        right.set_yscale("log")
        right.set(xlabel="spread of the keys' norms", ylabel="difference from the Gaussian kernel", xlim=(-2e-4, 2.0))
        right.legend(frameon=False, loc="center left")
        return figure


def _regression(kernel: Tensor, value: Tensor) -> Tensor:
    """Σ κ v / Σ κ, literally."""
    return kernel @ value / kernel.sum(-1, keepdim=True)


def _row(formula: str, beside: str, spread: float, output: Tensor, expected: Tensor) -> Row:
    return {"what": formula, "beside": beside, "spread": spread, "differ by": (output - expected).abs().max().item()}
