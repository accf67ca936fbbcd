"""Why a softmax: no other distribution with the same mean score is as spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..functional import observe
from ..softmax import stable
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["MaximumEntropy"]

_EXACT = 1e-9  # agreement in float64


@dataclass(frozen=True)
class MaximumEntropy(Study):
    """The weights of a row against many other distributions with the same mean score.

    A competitor is proportional to exp(noise + λs), with the λ that gives it the mean score of the weights. Every
    distribution without zeros has this form; small noise gives competitors that are near, large noise distant ones.

    >>> MaximumEntropy(others=50).run().verdict, MaximumEntropy(others=50, ratio=1.1).run().verdict
    (True, False)
    """

    name: ClassVar[str] = "maximum-entropy"
    brief: ClassVar[str] = "Softmax has the most entropy for its mean score"
    claim: ClassVar[str] = (
        "Among all distributions over the keys with the same mean score, softmax(s/T) has the largest entropy; another "
        "distribution q falls short of it by exactly KL(q ‖ softmax(s/T)). The mean score determines the temperature."
    )
    test: ClassVar[str] = (
        "At every temperature softmax(s/T) has the given mean score and every competitor has it too, to 9 decimals; no "
        "competitor has a larger entropy, and each shortfall is the divergence, to 9 decimals."
    )
    caption: ClassVar[str] = (
        "Left: mean score and entropy. Each bar spans the competitors with the mean score of one temperature; the "
        "curve of softmax(s/T) bounds them all from above, and its slope is −1/T. Right: how far the "
        "median competitor falls short; while the noise is small, by its square, as around any maximum."
    )
    least: ClassVar[dict[str, float]] = {"keys": 3}  # with two keys, the mean score leaves no choice
    fewest: ClassVar[dict[str, int]] = {"noises": 2}

    temperatures: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    noises: tuple[float, ...] = (0.01, 0.1, 1.0, 5.0)  # the standard deviation of a competitor's noise
    others: int = 2000
    keys: int = 16
    dim: int = 64
    ratio: float = 1.0  # the temperature of the softmax under test, relative to the one that gives the mean score

    def measure(self, progress: Progress) -> list[Row]:
        """Compare the weights of one query with competitors, at each temperature and noise."""
        query, key = (torch.randn(n, self.dim, dtype=torch.float64) for n in (1, self.keys))
        root, rows = self.dim**0.5, []
        for T in counted(self.temperatures, progress):
            given = observe(query, key, key, scale=1 / (T * root))
            scores = given.scores()[0] * T  # q·k / √d
            mean = (given.weights()[0] * scores).sum()
            tested = observe(query, key, key, scale=1 / (T * self.ratio * root))
            for noise in self.noises:
                row: Row = {"T": T, "noise": noise, "mean score": mean.item(), "entropy": tested.entropy.item()}
                rows.append(row | self._against(tested.weights()[0], scores, mean, noise))
        return rows

    def _against(self, weights: Tensor, scores: Tensor, mean: Tensor, noise: float) -> Row:
        """Compare `weights` with random distributions of the mean score `mean`."""
        others = _with_mean(noise * torch.randn(self.others, self.keys, dtype=torch.float64), scores, mean)
        shortfall = _entropy(weights) - _entropy(others)
        divergence = (torch.special.xlogy(others, others) - others * weights.log()).sum(-1)
        missed = torch.cat([others, weights[None]]) @ scores - mean
        return {
            "least shortfall": shortfall.min().item(),
            "median shortfall": shortfall.median().item(),
            "largest shortfall": shortfall.max().item(),
            "mean score off by": missed.abs().max().item(),
            "shortfall − KL": (shortfall - divergence).abs().max().item(),
        }

    def holds(self, rows: list[Row]) -> bool:
        """All have the same mean score, none has more entropy, and each shortfall is the divergence."""
        return all(
            row["mean score off by"] < _EXACT and row["least shortfall"] > 0 and row["shortfall − KL"] < _EXACT
            for row in rows
        )

    def draw(self, rows: list[Row]) -> Figure:
        """The competitors under the curve of the softmax, and the shortfall against the noise."""
        figure, (left, right) = canvas(9.5, 3.8, columns=2)
        groups = [[row for row in rows if row["T"] == T] for T in self.temperatures]
        for some in groups:
            mean, entropy = some[0]["mean score"], some[0]["entropy"]
            least = entropy - max(row["largest shortfall"] for row in some)
            most = entropy - min(row["least shortfall"] for row in some)
            left.plot([mean, mean], [least, most], color="#a9c9e3", linewidth=6, solid_capstyle="butt")
            left.annotate(f"T = {some[0]['T']:g}", (mean, entropy), (4, 5), textcoords="offset points")
        curve = [(some[0]["mean score"], some[0]["entropy"]) for some in groups]
        left.plot(*zip(*curve, strict=True), "o-", color="C1")
        left.set(xlabel="mean score", ylabel="entropy, nats")
        left.margins(x=0.12, y=0.1)
        for T, some in zip(self.temperatures, groups, strict=True):
            shortfalls = [row["median shortfall"] for row in some]
            right.loglog([row["noise"] for row in some], shortfalls, marker="o", label=f"T = {T:g}")
        right.set(xlabel="noise of the competitors", ylabel="median shortfall, nats")
        right.legend(frameon=False, fontsize=8)
        return figure


def _with_mean(noise: Tensor, scores: Tensor, mean: Tensor) -> Tensor:
    """The distributions exp(noise + λ scores), with λ of each row such that it has the mean score."""
    low = torch.full((len(noise), 1), -1e4, dtype=noise.dtype)
    high = -low
    for _ in range(80):  # the mean score rises with λ
        middle = (low + high) / 2
        below = stable(noise + middle * scores) @ scores < mean
        low, high = torch.where(below[:, None], middle, low), torch.where(below[:, None], high, middle)
    return stable(noise + high * scores)


def _entropy(weights: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(weights).sum(-1)
    return entropy
