"""Angles, norms and volumes in high dimensions, where attention works."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from ..functional import observe
from ..scores import Cosine
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["Geometry"]

_RIGHT_ANGLE = 90.0


@dataclass(frozen=True)
class Geometry(Study):
    """Random directions, norms and balls, from few dimensions to many."""

    name: ClassVar[str] = "geometry"
    brief: ClassVar[str] = "In high dimensions random vectors are nearly orthogonal"
    claim: ClassVar[str] = (
        "In high dimensions random directions are nearly orthogonal: u·v of unit vectors has mean 0 and variance 1/d. "
        "Norms of normal vectors concentrate around √d, almost all of a ball is near its surface, and since "
        "q·k = ‖q‖ ‖k‖ cos θ, a cosine score stays within ±1 however long q and k are."
    )
    test: ClassVar[str] = (
        "For every d the mean of u·v is within 0.2/√d of 0 and its variance within 10 % of 1/d; the norm is within 3 % "
        "of √d on average from d = 16 on, and its spread falls with every d; the share of the ball near its surface is "
        "within 0.02 of 1 − (1 − ε)^d; the product of norms and cosine equals q·k to within 1 / 10,000 of ‖q‖ ‖k‖; "
        "and no cosine exceeds 1."
    )
    caption: ClassVar[str] = (
        "Left: the band that holds 98 % of the angles between random directions closes around 90°. Middle: norms "
        "converge to √d. Right: the share of a ball within 5 % of its surface, sampled (dots) and by formula (curve)."
    )
    least: ClassVar[dict[str, float]] = {"power": -math.inf}
    among: ClassVar[dict[str, Collection[str]]] = {"directions": ("any", "positive")}

    dims: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    rows: int = 256
    keys: int = 256
    draws: int = 20_000
    skin: float = 0.05  # ε: closer than this is near the surface
    power: float = 1.0  # the claim is that u·v has variance d^−power
    directions: str = "any"  # "positive": no entry below 0, as after a ReLU

    def measure(self, progress: Progress) -> list[Row]:
        """Score every pair of random queries and keys, by dot product and by cosine."""
        shapes: list[Row] = []
        scores: list[Row] = []
        for d in counted(self.dims, progress):
            q, k = self._sample(self.rows, d), self._sample(self.keys, d)
            product = observe(q, k, k, scale=1.0).scores()  # (rows, keys)
            cosine = observe(q, k, k, score=Cosine()).scores()
            lengths = q.norm(dim=-1)[:, None] * k.norm(dim=-1)
            angles = torch.rad2deg(torch.acos(cosine.clamp(-1, 1))).flatten()
            norms = torch.cat([self._sample(n, d).norm(dim=-1) for n in _batch_sizes(self.draws, d)]) / math.sqrt(d)
            shapes.append(
                {
                    "d": d,
                    "mean of u·v": cosine.mean().item(),
                    "variance of u·v": cosine.var().item(),
                    "1 % of angles below, °": angles.quantile(0.01).item(),
                    "norm / √d": norms.mean().item(),
                    "its spread": norms.std().item(),
                    "volume near surface": self._near_surface(d),
                    "1 − (1 − ε)^d": 1 - (1 - self.skin) ** d,
                }
            )
            scores.append(
                {
                    "d": d,
                    "largest |q·k|": product.abs().max().item(),
                    "largest |cos θ|": cosine.abs().max().item(),
                    "(q·k − ‖q‖‖k‖cos θ) / ‖q‖‖k‖": ((product - lengths * cosine).abs() / lengths).max().item(),
                }
            )
        return shapes + scores

    def _sample(self, count: int, d: int) -> Tensor:
        x = torch.randn(count, d)
        return x.abs() if self.directions == "positive" else x

    def _near_surface(self, d: int) -> float:
        """The share of a ball in d dimensions that is near its surface.

        Dropping two coordinates of a uniform point on a sphere in d + 2 dimensions gives a uniform point of the ball.
        """
        near = 0
        for n in _batch_sizes(self.draws, d):
            sphere = torch.nn.functional.normalize(torch.randn(n, d + 2), dim=-1)
            near += int((sphere[:, :d].norm(dim=-1) > 1 - self.skin).sum())
        return near / self.draws

    def holds(self, rows: list[Row]) -> bool:
        """Every formula holds for every d."""
        shapes, scores = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        narrows = all(row["its spread"] > after["its spread"] for row, after in pairwise(shapes))
        formulas_hold = all(
            abs(row["mean of u·v"]) < 0.2 / math.sqrt(row["d"])
            and math.isclose(row["variance of u·v"], row["d"] ** -self.power, rel_tol=0.1)
            and (row["d"] < 16 or abs(row["norm / √d"] - 1) < 0.03)
            and abs(row["volume near surface"] - row["1 − (1 − ε)^d"]) < 0.02
            for row in shapes
        )
        bounded = all(row["largest |cos θ|"] <= 1 + 1e-6 for row in scores)
        return (
            narrows and formulas_hold and bounded and all(row["(q·k − ‖q‖‖k‖cos θ) / ‖q‖‖k‖"] < 1e-4 for row in scores)
        )

    def draw(self, rows: list[Row]) -> Figure:
        """Angles, norms and volume against d."""
        figure, (left, middle, right) = canvas(10.5, 3.6, columns=3)
        rows = rows[: len(rows) // 2]
        dims = [row["d"] for row in rows]
        below = [row["1 % of angles below, °"] for row in rows]
        left.fill_between(
            dims, below, [2 * _RIGHT_ANGLE - angle for angle in below], alpha=0.3, label="98 % of the angles"
        )
        wide = [
            math.degrees(math.asin(min(1.0, 2.326 / math.sqrt(d)))) for d in dims
        ]  # 1 % of a normal distribution is above 2.326
        left.plot(dims, [_RIGHT_ANGLE - w for w in wide], "--", color="C0", label="normal with variance 1/d")
        left.plot(dims, [_RIGHT_ANGLE + w for w in wide], "--", color="C0")
        left.set(xlabel="d", ylabel="angle between q and k", yticks=[0, 45, 90, 135, 180], ylim=(0, 180))
        left.yaxis.set_major_formatter("{x:.0f}°")
        means, spreads = [row["norm / √d"] for row in rows], [row["its spread"] for row in rows]
        band = [[m - 2 * s for m, s in zip(means, spreads, strict=True)]]
        band.append([m + 2 * s for m, s in zip(means, spreads, strict=True)])
        middle.fill_between(dims, *band, color="C1", alpha=0.3, label="mean ± 2 standard deviations")
        middle.plot(dims, means, color="C1")
        middle.set(xlabel="d", ylabel="‖x‖ / √d", ylim=(0, None))
        right.plot(dims, [row["1 − (1 − ε)^d"] for row in rows], color="C2", label="1 − (1 − ε)^d")
        right.plot(dims, [row["volume near surface"] for row in rows], "o", color="C2", label="sampled")
        right.set(xlabel="d", ylabel=f"volume within {self.skin:.0%} of the surface", ylim=(0, 1.04))
        right.yaxis.set_major_formatter("{x:.1f}")
        for axis in (left, middle, right):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.legend(frameon=False, fontsize="small", loc="lower right")
        return figure


def _batch_sizes(draws: int, d: int) -> list[int]:
    size = max(1, 2_000_000 // d)
    return [min(size, draws - start) for start in range(0, draws, size)]
