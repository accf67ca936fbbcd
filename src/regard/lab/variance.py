"""Why scores are divided by √d."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..functional import observe
from .base import Progress, Row, Study, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Variance"]

_POWERS = {"none": 0.0, "√d": 0.5, "d": 1.0}
_GRADIENTS = 4096  # keys in the mean squared norm: the error is half a percent at d = 16


@dataclass(frozen=True)
class Variance(Study):
    """Var(q·k) for normal q and k, the effect of each scaling on it, and on the softmax."""

    name: ClassVar[str] = "variance"
    claim: ClassVar[str] = (
        "For q and k with independent entries of variance 1, q·k has variance d; divided by √d it has variance 1 for "
        "every d, the entropy of the weights does not change, and the gradient of a score has E‖∇_q z‖² = 1."
    )
    test: ClassVar[str] = (
        "For every d the variance is within 5 % of d if unscaled and of 1 if scaled, and so is the squared norm of the "
        "gradient; with scaling, the entropy changes by less than 5 % of ln m from the smallest d to the largest."
    )
    caption: ClassVar[str] = (
        "Left: the variance of the scores. Right: the entropy of the softmax over the keys, as a share of ln m; "
        "without scaling it collapses as d grows, divided by d it becomes uniform, and only √d keeps it constant."
    )
    least: ClassVar[dict[str, float]] = {"keys": 2}
    among: ClassVar[dict[str, Collection[str]]] = {"scaling": _POWERS}

    dims: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    draws: int = 40_000
    keys: int = 256
    scaling: str = "√d"  # the scaling that the claim is tested with

    def measure(self, progress: Progress) -> list[Row]:
        """Sample q and k, and measure the scores, the gradient and the entropy."""
        rows: list[Row] = []
        for step, d in enumerate(self.dims):
            products = torch.cat([(torch.randn(n, d) * torch.randn(n, d)).sum(-1) for n in self._batch_sizes(d)])
            k = torch.randn(self.keys, d)
            squared = torch.randn(_GRADIENTS, d).square().sum(-1).mean().item()
            row: Row = {"d": d}
            for scaling, power in _POWERS.items():
                factor = d**-power
                row[f"variance, {scaling}"] = (products * factor).var().item()
                row[f"gradient², {scaling}"] = squared * factor**2  # ∇_q of q·k·factor is k·factor
                seen = observe(torch.randn(64, d), k, k, scale=factor)
                row[f"entropy share, {scaling}"] = seen.entropy.mean().item() / math.log(self.keys)
            rows.append(row)
            progress((step + 1) / len(self.dims))
        return rows

    def _batch_sizes(self, d: int) -> list[int]:
        size = max(1, 2_000_000 // d)
        return [min(size, self.draws - start) for start in range(0, self.draws, size)]

    def holds(self, rows: list[Row]) -> bool:
        """Every quantity is within 5 %, for every d."""
        raw = all(math.isclose(row["variance, none"], row["d"], rel_tol=0.05) for row in rows)
        kept = all(
            math.isclose(row[f"{what}, {self.scaling}"], 1.0, rel_tol=0.05)
            for row in rows
            for what in ("variance", "gradient²")
        )
        shares = [row[f"entropy share, {self.scaling}"] for row in rows]
        return raw and kept and abs(shares[-1] - shares[0]) < 0.05

    def draw(self, rows: list[Row]) -> Figure:
        """Variance and entropy against d."""
        figure, (left, right) = canvas(9.0, 3.8, columns=2)
        dims = [row["d"] for row in rows]
        for scaling in _POWERS:
            label = "unscaled" if scaling == "none" else f"divided by {scaling}"
            left.loglog(dims, [row[f"variance, {scaling}"] for row in rows], marker="o", label=label)
            right.semilogx(dims, [row[f"entropy share, {scaling}"] for row in rows], marker="o", label=label)
        left.set(xlabel="d", ylabel="Var of the scores")
        right.set(xlabel="d", ylabel="entropy / ln m", ylim=(-0.02, 1.05))
        left.legend(frameon=False)
        return figure
