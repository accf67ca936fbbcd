"""Why scores are divided by √d."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..functional import observe
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["Variance"]

_POWERS = {"none": 0.0, "√d": 0.5, "d": 1.0}
_MODELS = {  # d_model and d_k, the dim of one head
    "Transformer (2017)": (512, 64),
    "BERT base": (768, 64),
    "GPT-2": (768, 64),
    "GPT-2 XL": (1600, 64),
    "GPT-3 175B": (12_288, 128),
    "Llama 2 7B": (4096, 128),
    "Llama 3.1 405B": (16_384, 128),
    "Gemma 7B": (3072, 256),
}
_GRADIENTS = 4096  # keys in the mean squared norm: the error is half a percent at d = 16


@dataclass(frozen=True)
class Variance(Study):
    """Var(q·k) for normal q and k, what each scaling does to it and to the softmax, and the dims of real models."""

    name: ClassVar[str] = "variance"
    brief: ClassVar[str] = "Why scores are divided by √d: q·k has variance d"
    claim: ClassVar[str] = (
        "For q and k with independent entries of variance 1, q·k has variance d; divided by √d it has variance 1 for "
        "every d, 95 % of the scores are within ±2, the entropy of the weights does not change, and the gradient of a "
        "score has E‖∇_q z‖² = 1. In a model d is d_k, the dim of one head, and not d_model."
    )
    test: ClassVar[str] = (
        "For every d the variance is within 5 % of d if unscaled and of 1 if scaled, and so is the squared norm of the "
        "gradient; with scaling 94 to 97 % of the scores are within ±2, and the entropy changes by less than 5 % of "
        "ln m from the smallest d to the largest; for every model, unscaled scores have σ within 5 % of √d_k."
    )
    caption: ClassVar[str] = (
        "Left: the variance of the scores. Middle: the entropy of the softmax over the keys, as a share of ln m; "
        "without scaling it collapses as d grows, divided by d it becomes uniform, and only √d keeps it constant. "
        "Right: the typical range of scores, ±2σ, at the head dims of well-known models, unscaled and divided by √d_k."
    )
    least: ClassVar[dict[str, float]] = {"keys": 2}
    among: ClassVar[dict[str, Collection[str]]] = {"scaling": _POWERS, "width": ("d_k", "d_model")}

    dims: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    draws: int = 40_000
    keys: int = 256
    scaling: str = "√d"  # the scaling that the claim is tested with
    width: str = "d_k"  # the dim of a model that gives its scores their size, according to the claim

    def measure(self, progress: Progress) -> list[Row]:
        """Sample q and k, and measure the scores, the gradient and the entropy."""
        moments: list[Row] = []
        ranges: list[Row] = []
        for d in counted(self.dims, progress, stop=0.9):
            products = self._products(d)
            k = torch.randn(self.keys, d)
            squared = torch.randn(_GRADIENTS, d).square().sum(-1).mean().item()
            row: Row = {"d": d}
            spread: Row = {"d": d, "√d": math.sqrt(d)}
            for scaling, power in _POWERS.items():
                factor = d**-power
                row[f"variance, {scaling}"] = (products * factor).var().item()
                row[f"gradient², {scaling}"] = squared * factor**2  # ∇_q of q·k·factor is k·factor
                seen = observe(torch.randn(64, d), k, k, scale=factor)
                row[f"entropy share, {scaling}"] = seen.entropy.mean().item() / math.log(self.keys)
                spread[f"±2σ, {scaling}"] = 2 * (products * factor).std().item()
            spread[f"within ±2, {self.scaling}"] = (
                (products * d ** -_POWERS[self.scaling]).abs().lt(2).double().mean().item()
            )
            moments.append(row)
            ranges.append(spread)
        return moments + ranges + self._models()

    def _models(self) -> list[Row]:
        """The scores of well-known models, if the entries of q and k had variance 1."""
        sigma = {d_k: self._products(d_k).std().item() for d_k in sorted({d_k for _, d_k in _MODELS.values()})}
        return [
            {
                "model": name,
                "d_model": d_model,
                "d_k": d_k,
                "σ, unscaled": sigma[d_k],
                "±2σ, unscaled": 2 * sigma[d_k],
                "±2σ, / √d_k": 2 * sigma[d_k] / math.sqrt(d_k),
            }
            for name, (d_model, d_k) in _MODELS.items()
        ]

    def _products(self, d: int) -> Tensor:
        """Draw q·k."""
        return torch.cat([(torch.randn(n, d) * torch.randn(n, d)).sum(-1) for n in self._batch_sizes(d)])

    def _batch_sizes(self, d: int) -> list[int]:
        size = max(1, 2_000_000 // d)
        return [min(size, self.draws - start) for start in range(0, self.draws, size)]

    def holds(self, rows: list[Row]) -> bool:
        """Every quantity is within 5 %, for every d and every model."""
        dims = len(self.dims)
        moments, ranges, models = rows[:dims], rows[dims : 2 * dims], rows[2 * dims :]
        raw = all(math.isclose(row["variance, none"], row["d"], rel_tol=0.05) for row in moments)
        kept = all(
            math.isclose(row[f"{what}, {self.scaling}"], 1.0, rel_tol=0.05)
            for row in moments
            for what in ("variance", "gradient²")
        )
        typical = all(0.94 < row[f"within ±2, {self.scaling}"] < 0.97 for row in ranges)
        shares = [row[f"entropy share, {self.scaling}"] for row in moments]
        real = all(math.isclose(row["σ, unscaled"], math.sqrt(row[self.width]), rel_tol=0.05) for row in models)
        return raw and kept and typical and real and abs(shares[-1] - shares[0]) < 0.05

    def draw(self, rows: list[Row]) -> Figure:
        """Variance and entropy against d, and the range of scores in models."""
        figure, (left, middle, right) = canvas(12.5, 3.8, columns=3)
        dims = [row["d"] for row in rows[: len(self.dims)]]
        for scaling in _POWERS:
            label = "unscaled" if scaling == "none" else f"divided by {scaling}"
            for axes, what in ((left, "variance"), (middle, "entropy share")):
                axes.plot(dims, [row[f"{what}, {scaling}"] for row in rows[: len(dims)]], marker="o", label=label)
        left.set(xlabel="d", ylabel="Var of the scores", xscale="log", yscale="log")
        middle.set(xlabel="d", ylabel="entropy / ln m", xscale="log", ylim=(-0.02, 1.05))
        middle.legend(frameon=False, loc="center right")
        models = rows[2 * len(dims) :]
        names = [f"{row['model']}, {row['d_k']}" for row in models]
        for column, colour in (("±2σ, unscaled", "C0"), ("±2σ, / √d_k", "C1")):
            ranges = [row[column] for row in models]
            right.barh(names, [2 * one for one in ranges], left=[-one for one in ranges], color=colour)
        for place, row in enumerate(models):
            right.text(row["±2σ, unscaled"] + 1, place, f"±{row['±2σ, unscaled']:.0f}", va="center", fontsize=8)
        right.invert_yaxis()
        right.set(xlabel="typical range of the scores, ±2σ", xlim=(-36, 42))
        right.grid(visible=False, axis="y")
        return figure
